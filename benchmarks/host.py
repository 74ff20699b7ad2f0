"""Host time of one layer's forward and backward on a GPU, with maps so small that the device waits for the host.

    python benchmarks/host.py [--rounds 7] [--out benchmarks/results]

One row per candidate and run: the best of several rounds of 400 steps, microseconds per step; all candidates take turns. The
identity shows what autograd and the step itself cost.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import torch
import triton
from layer import gpu_file, gpu_name
from torch import nn

from inplace_abn import InPlaceABN

STEPS = 400


def step_time(layer: nn.Module, leaf: torch.Tensor, dz: torch.Tensor, backward: bool) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        z = layer(leaf * 1)
        if backward:
            z.backward(dz)
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e6 * spent / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    layers = {
        "Identity": nn.Identity(),
        "BatchNorm2d + LeakyReLU": nn.Sequential(nn.BatchNorm2d(16), nn.LeakyReLU(0.01, inplace=True)),
        "InPlaceABN": InPlaceABN(16),
    }
    leaf, dz = torch.randn(2, 16, 4, 4, device="cuda", requires_grad=True), torch.randn(2, 16, 4, 4, device="cuda")
    path, card = gpu_file(given.out, "host"), gpu_name()
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["run", "layer", "forward_backward_us", "forward_us", "gpu", "torch", "triton"])
        for run in range(1, given.runs + 1):
            best: dict[tuple[str, bool], float] = {}
            for _ in range(given.rounds):
                for name, layer in layers.items():
                    for backward in (True, False):
                        us = step_time(layer.cuda(), leaf, dz, backward)
                        best[name, backward] = min(us, best.get((name, backward), us))
            for name in layers:
                figures = [f"{best[name, backward]:.1f}" for backward in (True, False)]
                rows.writerow([run, name, *figures, card, torch.__version__, triton.__version__])
                print(run, name, *figures, flush=True)
    print(path)


if __name__ == "__main__":
    main()

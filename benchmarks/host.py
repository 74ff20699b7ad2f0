"""Host time of a layer's forward and backward on a GPU, with maps so small that the device waits for the host.

    python benchmarks/host.py [--rounds 7] [--runs 8] [--out benchmarks/results]

One row per candidate, run and length of chain: microseconds per layer and step, the best of several rounds in which all
candidates take turns. A run is a process of its own, so that runs have nothing in common. A chain is so many layers behind each
other, with a multiplication in front of each: one alone wakes autograd's thread for every backward, which costs more than the
layer; in a chain, as in a network, that is shared. The identity shows what is left without the layer.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton
from layer import gpu_file, gpu_name
from torch import Tensor, nn

from inplace_abn import InPlaceABN

STEPS = 400
CHAINS = (1, 20)
LAYERS = {
    "Identity": nn.Identity,
    "BatchNorm2d + LeakyReLU": lambda: nn.Sequential(nn.BatchNorm2d(16), nn.LeakyReLU(0.01, inplace=True)),
    "InPlaceABN": lambda: InPlaceABN(16),
}


class Times(nn.Module):
    """A map of its own for the layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def step_time(layers: nn.Module, x: Tensor, dz: Tensor, steps: int, backward: bool) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        z = layers(x)
        if backward:
            z.backward(dz)
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e6 * spent / steps


def run(number: int, rounds: int) -> list[list[str]]:
    """The rows of one run."""
    x, dz = torch.randn(2, 16, 4, 4, device="cuda", requires_grad=True), torch.randn(2, 16, 4, 4, device="cuda")
    rows = []
    for chain in CHAINS:
        candidates = {
            name: nn.Sequential(*[nn.Sequential(Times(), make()) for _ in range(chain)]).cuda()
            for name, make in LAYERS.items()
        }
        best: dict[tuple[str, bool], float] = {}
        for _ in range(rounds):
            for name, layers in candidates.items():
                for backward in (True, False):
                    us = step_time(layers, x, dz, STEPS // chain, backward) / chain
                    best[name, backward] = min(us, best.get((name, backward), us))
        for name in LAYERS:
            figures = [f"{best[name, backward]:.1f}" for backward in (True, False)]
            rows.append([str(number), name, str(chain), *figures, gpu_name(), torch.__version__, triton.__version__])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run is not None:
        csv.writer(sys.stdout).writerows(run(given.run, given.rounds))
        return
    path = gpu_file(given.out, "host")
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["run", "layer", "chain", "forward_backward_us", "forward_us", "gpu", "torch", "triton"])
        for number in range(1, given.runs + 1):
            again = [sys.executable, __file__, "--rounds", str(given.rounds), "--run", str(number)]
            told = subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True).stdout
            print(told, end="", flush=True)
            rows.writerows(csv.reader(told.splitlines()))
            file.flush()
    print(path)


if __name__ == "__main__":
    main()

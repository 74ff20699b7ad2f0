"""Host time of a layer's forward and backward on a GPU, with maps so small that the device waits for the host.

    python benchmarks/host.py [--rounds 7] [--runs 8] [--out benchmarks/results]
    python benchmarks/host.py --device cpu [--source FOLDER --code NAME]...     # without a GPU

One row per candidate, run and length of chain: microseconds per layer and step, the best of several rounds in which all
candidates take turns. A run is a process of its own, so that runs have nothing in common. A chain is so many layers behind each
other, with a multiplication in front of each: one alone wakes autograd's thread for every backward, which costs more than the
layer; in a chain, as in a network, that is shared. The identity shows what is left without the layer.

On a CPU the layer goes the way of the kernels, whose launches do nothing: what is left is Python and autograd; eager has
its arithmetic, too. Forward and backward are timed apart, by medians of some thousand steps. Several versions,
each with its sources and a name, take turns.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton
from layer import gpu_file, gpu_name
from torch import Tensor, nn

from inplace_abn import InPlaceABN, functions, kernels
from inplace_abn.kernels import launches, plans

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


class Unlaunched(dict):
    """Every launch there could be, which does nothing."""

    def __missing__(self, key: object) -> launches.Launch:
        nothing = launches.Launch(None, (1, 1), 1, (0, 0), (), {}, {}, lambda *_: None)
        self[key] = nothing
        return nothing


def run_on_cpu(number: int, code: str, steps: int = 4000) -> list[list[str]]:
    """The rows of one run, its launches left out."""
    torch.set_num_threads(1)
    # As where they are chosen, which looks at the layout.
    functions.backend = lambda x: kernels if plans.layout(x) is not None else None
    launches.LAUNCHES = Unlaunched()
    x, dz, times = torch.randn(2, 16, 4, 4, requires_grad=True), torch.randn(2, 16, 4, 4), Times()
    spent: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in LAYERS}
    layers = {name: make() for name, make in LAYERS.items()}
    for _ in range(steps // 100):
        for name, layer in layers.items():
            for _ in range(100):
                h = times(x)
                began = time.perf_counter_ns()
                z = layer(h)
                half = time.perf_counter_ns()
                z.backward(dz)
                ended = time.perf_counter_ns()
                spent[name][0].append(half - began)
                spent[name][1].append(ended - half)
    versions = [platform.machine(), platform.python_version(), torch.__version__]
    return [
        [code, str(number), name, *(f"{statistics.median(ns) / 1e3:.2f}" for ns in both), *versions]
        for name, both in spent.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--source", action="append", help="folder with the package (on a CPU); several take turns")
    parser.add_argument("--code", action="append", help="what the code in it is called")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    on_cpu = given.device == "cpu"
    if given.run is not None:
        rows_of_run = run_on_cpu(given.run, given.code[0]) if on_cpu else run(given.run, given.rounds)
        csv.writer(sys.stdout).writerows(rows_of_run)
        return
    path = given.out / f"host-cpu-torch{torch.__version__.split('+')[0]}.csv" if on_cpu else gpu_file(given.out, "host")
    columns = ["run", "layer", "chain", "forward_backward_us", "forward_us", "gpu", "torch", "triton"]
    if on_cpu:
        columns = ["code", "run", "layer", "forward_us", "backward_us", "machine", "python", "torch"]
    sources = given.source or [str(Path(functions.__file__).parents[1])]
    codes = given.code or ["present"]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(columns)
        for number in range(1, given.runs + 1):
            for source, code in zip(sources, codes, strict=True):
                again = [sys.executable, __file__, "--rounds", str(given.rounds), "--run", str(number)]
                again += ["--device", given.device, "--code", code]
                # First on the path, before what is installed.
                env = {**os.environ, "PYTHONPATH": source}
                told = subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
                print(told, end="", flush=True)
                rows.writerows(csv.reader(told.splitlines()))
                file.flush()
    print(path)


if __name__ == "__main__":
    main()

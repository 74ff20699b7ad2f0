"""Time of forward and backward of the layer against its rivals, interleaved in one run.

    python benchmarks/layer.py [--threads 2] [--rounds 40] [--out benchmarks/results]

One row per candidate, layout and dtype: median, 10th and 90th percentile of forward + backward in milliseconds. All candidates
of a shape take turns, each on a fresh copy of the same input, so that the machine's moods are shared.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import InPlaceABN

SHAPE = (16, 64, 56, 56)
COLUMNS = [
    "candidate",
    "shape",
    "dtype",
    "layout",
    "median_ms",
    "p10_ms",
    "p90_ms",
    "ratio_of_medians",
    "rounds",
    "threads",
]
COLUMNS += ["machine", "python", "torch"]
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def standard(channels: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.LeakyReLU(0.01, inplace=True))


def candidates(channels: int) -> dict[str, nn.Module]:
    return {
        "BatchNorm2d + LeakyReLU": standard(channels),
        "the same, torch.compile": torch.compile(standard(channels)),
        "the same, checkpointed": Checkpointed(standard(channels)),
        "InPlaceABN I": InPlaceABN(channels, variant="I"),
        "InPlaceABN II": InPlaceABN(channels, variant="II"),
    }


def measure(
    shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format, rounds: int
) -> dict[str, list[float]]:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype).contiguous(memory_format=layout)
    dz = torch.randn(shape).to(dtype).contiguous(memory_format=layout)
    layers = candidates(shape[1])
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for i in range(rounds + 5):
        for name, layer in layers.items():
            h = x.clone().requires_grad_() * 1
            began = time.perf_counter()
            layer(h).backward(dz)
            if i >= 5:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"layer-cpu-torch{torch.__version__.split('+')[0]}.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for dtype in (torch.float32, torch.bfloat16):
            for name, layout in LAYOUTS.items():
                seconds = measure(SHAPE, dtype, layout, given.rounds)
                base = statistics.median(seconds["BatchNorm2d + LeakyReLU"])
                for candidate, times in seconds.items():
                    deciles = statistics.quantiles(times, n=10)
                    median = statistics.median(times)
                    figures = [f"{1e3 * t:.2f}" for t in (median, deciles[0], deciles[-1])] + [f"{median / base:.2f}"]
                    where = [
                        given.rounds,
                        given.threads,
                        platform.machine(),
                        platform.python_version(),
                        torch.__version__,
                    ]
                    kind = ["x".join(map(str, SHAPE)), str(dtype).removeprefix("torch."), name]
                    rows.writerow([candidate, *kind, *figures, *where])
                    print(f"{candidate:26s} {kind[1]:9s} {name:14s} {' '.join(figures)}", flush=True)
    print(path)


if __name__ == "__main__":
    main()

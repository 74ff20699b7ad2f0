"""The paper's timing analysis: batch norm, activation and convolution of ResNeXt-101's blocks, by five strategies.

    python benchmarks/block.py [--rounds 40] [--batches 32 128] [--out benchmarks/results]       # on a GPU

CONV1 to CONV4 are the modules mod2 to mod5 of the released network, for images of 224 by 224: a block's three units are bn1 and a
1×1 convolution, bn2 and a 3×3 convolution of 64 groups, bn3 and a 1×1 convolution. One row per block, strategy and direction:
microseconds of device time of the three units together, median over the rounds, candidates taking turns, the L2 cache flushed
before each; and the bytes that autograd keeps for them. The convolutions are part of every figure. Rows of batches and dtypes
that are not run again stay in the file.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

import torch
from layer import LAYOUTS, gpu_file, gpu_name, rows_in
from torch import Tensor, nn

from inplace_abn import memory
from inplace_abn.strategies import STRATEGIES, BNActConv

COLUMNS = ["block", "batch", "dtype", "layout", "strategy", "direction", "median_us", "p10_us", "p90_us", "kept_bytes"]
COLUMNS += ["rounds", "gpu", "torch", "triton"]
# Width of a block's input, of its inner maps, and its pixels.
BLOCKS = {f"CONV{i + 1}": (256 << i, 128 << i, 56 >> i) for i in range(4)}


def units(block: str, strategy: str) -> nn.ModuleList:
    outer, inner, _ = BLOCKS[block]
    convs = [
        (outer, nn.Conv2d(outer, inner, 1, bias=False)),
        (inner, nn.Conv2d(inner, inner, 3, padding=1, groups=64, bias=False)),
        (inner, nn.Conv2d(inner, outer, 1, bias=False)),
    ]
    return nn.ModuleList([BNActConv(conv, channels, strategy) for channels, conv in convs])


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def measure(block: str, batch: int, dtype: torch.dtype, layout: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of every round, by strategy and direction; and bytes kept."""
    outer, inner, size = BLOCKS[block]
    form = LAYOUTS[layout]

    def draw(channels: int) -> Tensor:
        x = torch.randn(batch, channels, size, size, device="cuda").to(dtype)
        return x.contiguous(memory_format=form)

    inputs = [draw(c) for c in (outer, inner, inner)]
    results: dict[str, dict[str, list[float]]] = {}
    candidates = {}
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        candidates[strategy] = units(block, strategy).cuda().to(memory_format=form)
        results[strategy] = {"forward": [], "backward": [], "kept": []}
    flush = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
    for i in range(rounds + 3):
        for strategy, three in candidates.items():
            forward = backward = 0.0
            for unit, x in zip(three, inputs, strict=True):
                # Behind a node, so that it may be overwritten, and one whose backward costs nothing.
                leaf = x.clone().requires_grad_()
                h = leaf.clone()
                flush.max()
                marks = [event() for _ in range(4)]
                torch.cuda._sleep(2_000_000)
                marks[0].record()
                with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                    out = unit(h)
                marks[1].record()
                dout = torch.ones_like(out)
                flush.max()
                torch.cuda._sleep(2_000_000)
                marks[2].record()
                torch.autograd.grad(out, [leaf, *unit.parameters()], dout)
                marks[3].record()
                torch.cuda.synchronize()
                forward += marks[0].elapsed_time(marks[1])
                backward += marks[2].elapsed_time(marks[3])
                del out, h, leaf
            if i >= 3:
                results[strategy]["forward"].append(1e3 * forward)
                results[strategy]["backward"].append(1e3 * backward)
    for strategy, three in candidates.items():
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            kept = [memory.saved_bytes(Behind(unit), x).total for unit, x in zip(three, inputs, strict=True)]
        results[strategy]["kept"] = [sum(kept)]
    return results


class Behind(nn.Module):
    """A unit behind an operation that keeps nothing."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        # x needs a gradient, so that the unit sees the output of a node.
        out: Tensor = self.unit(x.detach().requires_grad_().clone())
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    import triton

    torch.backends.cudnn.benchmark = True
    path, card = gpu_file(given.out, "block"), gpu_name()
    kept = [r for r in rows_in(path) if int(r["batch"]) not in given.batches or r["dtype"] not in given.dtypes]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        rows.writerows([r[column] for column in COLUMNS] for r in kept)
        for batch in given.batches:
            for dtype in given.dtypes:
                for layout in LAYOUTS:
                    for block in BLOCKS:
                        results = measure(block, batch, getattr(torch, dtype), layout, given.rounds)
                        shown = {}
                        for strategy, by in results.items():
                            for direction in ("forward", "backward"):
                                us = by[direction]
                                deciles = statistics.quantiles(us, n=10)
                                figures = [f"{v:.1f}" for v in (statistics.median(us), deciles[0], deciles[-1])]
                                where = [block, batch, dtype, layout, strategy, direction]
                                on = [given.rounds, card, torch.__version__, triton.__version__]
                                rows.writerow([*where, *figures, int(by["kept"][0]), *on])
                            shown[strategy] = round(sum(statistics.median(by[d]) for d in ("forward", "backward")))
                        file.flush()
                        print(block, batch, dtype, layout, shown, flush=True)
    print(path)


if __name__ == "__main__":
    main()

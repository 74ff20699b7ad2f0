"""What fits a card of so much memory, standard against in place: largest batches and crops of the paper's networks.

    python benchmarks/capacity.py [--memory 12] [--beside 8] [--study capacity steps] [--out benchmarks/results]

On a GPU, whose memory is capped. Every case is a training step of SGD with momentum in a process of its own, under
``torch.cuda.set_per_process_memory_fraction``: it fits, or torch runs out of memory. Batches are searched by doubling and
halving, crops in steps of 8 pixels. The cap is on each process, so several are searched beside each other. The paper's Table 3
has four cards of 12 GB: its 16 crops are 4 on each. Last, step times of every network alone on the card, standard and in place
taking turns, at what the standard network can hold.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from layer import gpu_file, gpu_name
from torch import nn

from inplace_abn import ABN, InPlaceABN, models
from inplace_abn.planning import cross_entropy

CAPACITY = ["net", "task", "dtype", "norm", "vary", "fixed", "largest", "memory_gb", "gpu", "torch", "triton"]
STEPS = [
    "net",
    "task",
    "dtype",
    "norm",
    "batch",
    "size",
    "median_ms",
    "p10_ms",
    "p90_ms",
    "peak_gib",
    "steps",
    *CAPACITY[-3:],
]
STUDIES = ("capacity", "steps")
NORMS: dict[str, Any] = {"standard": ABN, "in place": InPlaceABN}
# Sides of crops are multiples of this: the paper's are, and the networks' output stride is.
SIDE = 8
# net, task, what is varied, what is fixed (a crop's side, or a batch): the paper's tables, per card.
CASES = [
    ("resnext101", "classification", "batch", 224),
    ("resnext152", "classification", "batch", 224),
    ("wide_resnet38", "classification", "batch", 224),
    ("resnext101", "segmentation", "batch", 512),
    ("resnext101", "segmentation", "crop", 4),
    ("resnext101", "segmentation", "batch", 480),
    ("wide_resnet38_a2", "segmentation", "batch", 512),
    ("wide_resnet38_a2", "segmentation", "crop", 5),
    ("wide_resnet38_a2", "segmentation", "batch", 496),
    ("wide_resnet38_a2", "segmentation", "crop", 4),
    ("wide_resnet38_a2", "segmentation", "crop", 3),
    ("resnext152", "segmentation", "crop", 3),
]
# net, task, batch, size: for the step times.
TIMED = [
    ("resnext101", "classification", 64, 224),
    ("resnext152", "classification", 64, 224),
    ("wide_resnet38", "classification", 64, 224),
    ("resnext101", "segmentation", 4, 512),
    ("resnext152", "segmentation", 3, 680),
    ("wide_resnet38_a2", "segmentation", 5, 512),
]


class Trained:
    """A network with its optimizer, and a step of it."""

    def __init__(self, net: str, task: str, dtype: str, norm: str) -> None:
        norm_act = NORMS[norm]
        model: nn.Module = (
            models.create(net, norm_act=norm_act)
            if task == "classification"
            else models.deeplabv3(net, 19, norm_act, output_stride=8)
        )
        self.model = model.cuda().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        self.half, self.autocast = getattr(torch, dtype), dtype != "float32"

    def step(self, batch: int, side: int) -> None:
        x = torch.randn(batch, 3, side, side, device="cuda").contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", self.half, enabled=self.autocast):
            loss = cross_entropy(self.model(x))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def static_bytes(self) -> int:
        learned = list(self.model.parameters())
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in learned]
        return sum(t.nbytes for t in (*learned, *momenta, *self.model.buffers()))


def largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest number that fits: doubled until it does not, then by halves."""
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def search(net: str, task: str, dtype: str, norm: str, vary: str, fixed: int, memory: float) -> int:
    """The largest batch or crop of a case, under the cap."""
    torch.cuda.set_per_process_memory_fraction(memory * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    run = Trained(net, task, dtype, norm)

    def fits(n: int) -> bool:
        try:
            # Twice: optimizer state and workspaces are there in the second.
            for _ in range(2):
                run.step(*((n, fixed) if vary == "batch" else (fixed, SIDE * n)))
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return False
        finally:
            run.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        return True

    found = largest(fits, 8 if vary == "batch" else 448 // SIDE)
    return found if vary == "batch" else SIDE * found


def timed(net: str, task: str, dtype: str, batch: int, size: int, steps: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of every step and the peak of one, by norm; the norms take turns."""
    torch.backends.cudnn.benchmark = True
    runs = {norm: Trained(net, task, dtype, norm) for norm in NORMS}
    results: dict[str, dict[str, Any]] = {norm: {"ms": [], "peak": 0} for norm in NORMS}
    for i in range(steps + 3):
        for norm, run in runs.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            # Two at a time: the host is to run ahead, as it does in training.
            for _ in range(2):
                run.step(batch, size)
            torch.cuda.synchronize()
            if i >= 3:
                results[norm]["ms"].append(500 * (time.perf_counter() - began))
                # The other network's weights and momenta are there as well.
                others = sum(r.static_bytes() for r in runs.values() if r is not run)
                results[norm]["peak"] = torch.cuda.max_memory_allocated() - others
    return results


def in_a_process(*arguments: Any) -> Any:
    """What this file prints for these arguments; None if it failed, which is told."""
    command = [sys.executable, __file__, "--only", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    if done.returncode:
        print(arguments, done.stderr[-1000:], file=sys.stderr, flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=12, help="gigabytes of the card")
    parser.add_argument("--beside", type=int, default=8, help="searches at once; each may take all of --memory")
    parser.add_argument("--steps", type=int, default=10, help="timings of each network")
    parser.add_argument("--study", nargs="+", choices=STUDIES, default=STUDIES, help="what to measure")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        which, *arguments = json.loads(given.only)
        print(json.dumps({"search": search, "timed": timed}[which](*arguments)))
        return
    import triton

    where = [gpu_name(), torch.__version__, triton.__version__]
    if "capacity" in given.study:
        measure_capacity(given, where)
    if "steps" in given.study:
        measure_steps(given, where)


def measure_capacity(given: argparse.Namespace, where: list[str]) -> None:
    cases = [(n, t, dtype, norm, v, f) for dtype in given.dtypes for n, t, v, f in CASES for norm in NORMS]
    path = gpu_file(given.out, "capacity")
    with path.open("w", newline="") as file, ThreadPoolExecutor(given.beside) as pool:
        rows = csv.writer(file)
        rows.writerow(CAPACITY)
        for case, found in zip(cases, pool.map(lambda c: in_a_process("search", *c, given.memory), cases), strict=True):
            if found is not None:
                rows.writerow([*case, found, given.memory, *where])
                file.flush()
                print(*case, found, flush=True)
    print(path)


def measure_steps(given: argparse.Namespace, where: list[str]) -> None:
    path = gpu_file(given.out, "steps")
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(STEPS)
        for dtype in given.dtypes:
            for net, task, batch, size in TIMED:
                found = in_a_process("timed", net, task, dtype, batch, size, given.steps)
                for norm, run in (found or {}).items():
                    deciles = statistics.quantiles(run["ms"], n=10)
                    figures = [f"{v:.1f}" for v in (statistics.median(run["ms"]), deciles[0], deciles[-1])]
                    peak = f"{run['peak'] / 2**30:.2f}"
                    rows.writerow([net, task, dtype, norm, batch, size, *figures, peak, given.steps, *where])
                    print(net, task, dtype, norm, batch, size, figures[0], peak, flush=True)
                file.flush()
    print(path)


if __name__ == "__main__":
    main()

"""What fits a card of so much memory, standard against in place: largest batches and crops of the paper's networks.

    python benchmarks/capacity.py [--memory 12] [--out benchmarks/results]       # on a GPU, whose memory is capped

Every case is a training step of SGD with momentum in a process of its own, under
``torch.cuda.set_per_process_memory_fraction``: it fits, or torch runs out of memory. Batches are searched by doubling and
halving, crops in steps of 32 pixels. The paper's Table 3 has four cards of 12 GB: its 16 crops are 4 on each.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from layer import gpu_file, gpu_name
from torch import nn

from inplace_abn import ABN, InPlaceABN, models
from inplace_abn.planning import cross_entropy

COLUMNS = ["net", "task", "dtype", "norm", "vary", "fixed", "largest", "step_ms", "memory_gb", "gpu", "torch", "triton"]
NORMS: dict[str, Any] = {"standard": ABN, "in place": InPlaceABN}
# net, task, what is varied, what is fixed: a crop's side, or a batch.
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
    ("wide_resnet38_a2", "segmentation", "crop", 3),
    ("resnext152", "segmentation", "crop", 3),
]


def build(net: str, task: str, norm: str) -> nn.Module:
    norm_act = NORMS[norm]
    model: nn.Module = (
        models.create(net, norm_act=norm_act)
        if task == "classification"
        else models.deeplabv3(net, 19, norm_act, output_stride=8)
    )
    return model.cuda().to(memory_format=torch.channels_last)


def largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest number that fits: doubled until it does not, then by halves."""
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def measure(net: str, task: str, dtype: str, norm: str, vary: str, fixed: int, memory: float) -> dict[str, float]:
    share = memory * 1e9 / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    model = build(net, task, norm)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    half = getattr(torch, dtype)

    def step(batch: int, side: int) -> None:
        x = torch.randn(batch, 3, side, side, device="cuda").contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", half, enabled=dtype != "float32"):
            loss = cross_entropy(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def shape(n: int) -> tuple[int, int]:
        return (n, fixed) if vary == "batch" else (fixed, 32 * n)

    def fits(n: int) -> bool:
        try:
            # Twice: optimizer state and workspaces are there in the second.
            for _ in range(2):
                step(*shape(n))
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return False
        finally:
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        return True

    found = largest(fits, 4 if vary == "batch" else 8)
    milliseconds = 0.0
    if found:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            step(*shape(found))
        torch.cuda.synchronize()
        milliseconds = 200 * (time.perf_counter() - began)
    return {"largest": found if vary == "batch" else 32 * found, "step_ms": milliseconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=12, help="gigabytes of the card")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(*json.loads(given.only))))
        return
    import triton

    path = gpu_file(given.out, "capacity")
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for dtype in given.dtypes:
            for net, task, vary, fixed in CASES:
                for norm in NORMS:
                    case = [net, task, dtype, norm, vary, fixed, given.memory]
                    command = [sys.executable, __file__, "--only", json.dumps(case)]
                    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
                    if done.returncode:
                        print(case, done.stderr[-1000:], file=sys.stderr)
                        continue
                    found = json.loads(done.stdout.splitlines()[-1])
                    where = [given.memory, gpu_name(), torch.__version__, triton.__version__]
                    rows.writerow([*case[:-1], int(found["largest"]), f"{found['step_ms']:.1f}", *where])
                    file.flush()
                    print(net, task, dtype, norm, vary, fixed, int(found["largest"]), flush=True)
    print(path)


if __name__ == "__main__":
    main()

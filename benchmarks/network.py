"""Training steps of whole networks on a GPU: images per second and peak memory, each candidate in a process of its own.

    python benchmarks/network.py [--net resnet50] [--batch 256] [--steps 20] [--rounds 2] [--out benchmarks/results]

bfloat16 by autocast, channels_last, SGD with momentum, random images of 224 by 224. The standard network has batch norm, in-place
ReLU and sum as torch's own steps; "in place" has the sum inside of the layer and leaky ReLU, "exact ReLU" the standard function,
recomputed where it is read. "budget 0.99" is torch.compile told to keep less, by
``torch._functorch.config.activation_memory_budget``, "CUDA graphs" its mode "reduce-overhead", whose graphs hold their memory for
good, so that the peak of allocations says nothing, and what is reserved all. Candidates take turns, round after round.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from layer import gpu_file, gpu_name
from torch import Tensor, nn

from inplace_abn import ABN, InPlaceABN, models, recompute

COLUMNS = ["net", "batch", "candidate", "images_per_second", "p10", "p90", "peak_gib", "reserved_gib", "static_gib"]
COLUMNS += ["rounds", "steps", "gpu", "torch", "triton"]
CANDIDATES = ("standard", "compile", "compile, budget 0.99", "compile, CUDA graphs")
CANDIDATES += ("in place", "in place, compile", "in place, compile, CUDA graphs", "exact ReLU, recomputed")


class Standard(ABN):
    """Batch norm, sum and in-place ReLU as torch has them, and nothing else."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.0,
            self.eps,
        )
        if residual is not None:
            y += residual
        return F.relu_(y) if self.activation == "relu" else y


def build(net: str, candidate: str) -> nn.Module:
    exact = functools.partial(InPlaceABN, activation="relu")
    standard = functools.partial(Standard, activation="relu")
    norm_act = InPlaceABN if "in place" in candidate else exact if "exact" in candidate else standard
    torch.manual_seed(0)
    model: nn.Module = getattr(models, net)(norm_act=norm_act)
    if "recomputed" in candidate:
        recompute(model)
    return model.cuda().to(memory_format=torch.channels_last)


def measure(net: str, batch: int, candidate: str, steps: int) -> dict[str, object]:
    """Seconds of every step and the peak of memory, after a few steps to warm up."""
    torch.backends.cudnn.benchmark = True
    model = build(net, candidate)
    if "budget" in candidate:
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = 0.99
    mode = "reduce-overhead" if "graphs" in candidate else None
    call = torch.compile(model, mode=mode) if "compile" in candidate else model
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x = torch.randn(batch, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (batch,), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    # What trying out convolutions left behind is not the network's.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    static = torch.cuda.memory_allocated()
    seconds = []
    # Several steps at a time: the host is to run ahead, as it does in training.
    for _ in range(max(1, steps // 5)):
        began = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / 5)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"seconds": seconds, "peak": peak, "reserved": reserved, "static": static}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given.net, given.batch, given.only, given.steps)))
        return
    import triton

    path, card = gpu_file(given.out, "network"), gpu_name()
    results: dict[str, list[dict[str, object]]] = {name: [] for name in CANDIDATES}
    for _ in range(given.rounds):
        for name in CANDIDATES:
            options = ["--net", given.net, "--batch", str(given.batch), "--steps", str(given.steps), "--only", name]
            done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, timeout=300)
            if done.returncode:
                print(f"{name}: {done.stderr[-2000:]}", file=sys.stderr)
                continue
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, f"{given.batch / statistics.median(results[name][-1]['seconds']):.0f} images/s", flush=True)
            write(path, given, results, card, triton.__version__)
    print(path)


def write(path: Path, given: argparse.Namespace, results: dict[str, list[dict[str, object]]], *where: str) -> None:
    """All that is known so far."""
    card, triton = where
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for name, runs in results.items():
            if not runs:
                continue
            speeds = [given.batch / s for run in runs for s in run["seconds"]]
            deciles = statistics.quantiles(speeds, n=10) if len(speeds) > 1 else speeds * 9
            gib = [max(run[k] for run in runs) / 2**30 for k in ("peak", "reserved", "static")]
            figures = [f"{v:.0f}" for v in (statistics.median(speeds), deciles[0], deciles[-1])] + [
                f"{v:.2f}" for v in gib
            ]
            rows.writerow(
                [given.net, given.batch, name, *figures, len(runs), given.steps, card, torch.__version__, triton]
            )


if __name__ == "__main__":
    main()

"""Training steps of whole networks on a GPU: images per second and peak memory, each candidate in a process of its own.

    python benchmarks/network.py [--net resnet50] [--batch 256] [--size 224] [--steps 20] [--rounds 2] [--out benchmarks/results]
    python benchmarks/network.py --name converted --net torchvision:resnet50 timm:resnet50 --batch 256 128 --size 224 224

bfloat16 by autocast, channels_last, SGD with momentum, random images. With a colon, nets are those of torchvision or timm, as
they are and converted; what :func:`inplace_abn.plan` forecasts for them is added at the end. Without, they are the package's
own: the standard network has batch norm, in-place
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
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from layer import gpu_file, gpu_name
from torch import Tensor, nn

from inplace_abn import ABN, InPlaceABN, convert, models, plan, recompute
from inplace_abn.cli import load
from inplace_abn.planning import cross_entropy

COLUMNS = [
    "net",
    "batch",
    "size",
    "candidate",
    "images_per_second",
    "p10",
    "p90",
    "peak_gib",
    "reserved_gib",
    "static_gib",
]
COLUMNS += ["forecast_gib", "rounds", "steps", "gpu", "torch", "triton"]
CANDIDATES = ("standard", "compile", "compile, budget 0.99", "compile, CUDA graphs")
OUTSIDE = (*CANDIDATES[:3], "converted", "converted, leaky ReLU")
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
    if ":" in net:
        torch.manual_seed(0)
        model = load(net)
        if "converted" in candidate:
            model, report = convert(model, relu="leaky" if "leaky" in candidate else "exact")
            assert report.converted == len(report.lines), report
        return model.cuda().to(memory_format=torch.channels_last)
    exact = functools.partial(InPlaceABN, activation="relu")
    standard = functools.partial(Standard, activation="relu")
    norm_act = InPlaceABN if "in place" in candidate else exact if "exact" in candidate else standard
    torch.manual_seed(0)
    model = getattr(models, net)(norm_act=norm_act)
    if "recomputed" in candidate:
        recompute(model)
    return model.cuda().to(memory_format=torch.channels_last)


def measure(net: str, batch: int, size: int, candidate: str, steps: int) -> dict[str, object]:
    """Seconds of every step and the peak of memory, after a few steps to warm up."""
    torch.backends.cudnn.benchmark = True
    model = build(net, candidate)
    if "budget" in candidate:
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = 0.99
    mode = "reduce-overhead" if "graphs" in candidate else None
    call = torch.compile(model, mode=mode) if "compile" in candidate else model
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x = torch.randn(batch, 3, size, size, device="cuda").contiguous(memory_format=torch.channels_last)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(call(x))
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
    parser.add_argument("--net", nargs="+", default=["resnet50"])
    parser.add_argument("--batch", type=int, nargs="+", default=[256])
    parser.add_argument("--size", type=int, nargs="+", default=[224])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--name", default="network")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    cases = list(zip(given.net, given.batch, given.size, strict=True))
    if given.only:
        print(json.dumps(measure(*cases[0], given.only, given.steps)))
        return
    path = gpu_file(given.out, given.name)
    results: dict[tuple[str, int, int, str], list[dict[str, object]]] = {}
    for _ in range(given.rounds):
        for net, batch, size in cases:
            for name in OUTSIDE if ":" in net else CANDIDATES:
                options = ["--net", net, "--batch", str(batch), "--size", str(size), "--steps", str(given.steps)]
                command = [sys.executable, __file__, *options, "--only", name]
                done = subprocess.run(command, capture_output=True, text=True, timeout=300)
                if done.returncode:
                    print(f"{net} {name}: {done.stderr[-2000:]}", file=sys.stderr)
                    continue
                run = json.loads(done.stdout.splitlines()[-1])
                results.setdefault((net, batch, size, name), []).append(run)
                speed = batch / statistics.median(run["seconds"])
                print(net, name, f"{speed:.0f} images/s, {run['peak'] / 2**30:.2f} GiB", flush=True)
                write(path, given.steps, results)
    write(path, given.steps, results, forecast)
    print(path)


@functools.cache
def forecast(net: str, batch: int, size: int) -> dict[str, int]:
    """Peaks that the plan expects, by candidate."""
    if ":" not in net:
        return {}
    return {row.way: row.peak for row in plan(load(net), (batch, 3, size, size), dtype=torch.bfloat16).rows}


def write(
    path: Path,
    steps: int,
    results: dict[tuple[str, int, int, str], list[dict[str, object]]],
    expect: Callable[[str, int, int], dict[str, int]] = lambda *_: {},
) -> None:
    """All that is known so far."""
    import triton

    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for (net, batch, size, name), runs in results.items():
            speeds = [batch / s for run in runs for s in run["seconds"]]
            deciles = statistics.quantiles(speeds, n=10) if len(speeds) > 1 else speeds * 9
            gib = [max(run[k] for run in runs) / 2**30 for k in ("peak", "reserved", "static")]
            figures = [f"{v:.0f}" for v in (statistics.median(speeds), deciles[0], deciles[-1])]
            figures += [f"{v:.2f}" for v in gib]
            expected = expect(net, batch, size).get(name)
            figures.append("" if expected is None else f"{expected / 2**30:.2f}")
            where = [len(runs), steps, gpu_name(), torch.__version__, triton.__version__]
            rows.writerow([net, batch, size, name, *figures, *where])


if __name__ == "__main__":
    main()

"""Time of forward and backward of the layer against its rivals, interleaved in one run.

    python benchmarks/layer.py [--threads 2] [--rounds 40] [--out benchmarks/results]      # on a CPU
    python benchmarks/layer.py --device cuda [--rounds 20] [--residual]                    # on a GPU

CPU: one row per candidate, layout and dtype: median, 10th and 90th percentile of forward + backward in milliseconds. All
candidates of a shape take turns, each on a fresh copy of the same input, so that the machine's moods are shared.

GPU: one row per shape, direction and implementation, in microseconds of device time, the L2 cache flushed before each. The
floor is the least traffic (2 passes forward, 3 backward) over the copy bandwidth measured in the same run; floor2 is that of two
launches (3 and 5); empty, for small maps, is a launch of our grid that does nothing. With --residual, in a file of its own, the
layer adds a map before its activation and gives its gradient, too: 3 and 5 passes, 4 and 8. plot.py draws it.
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
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import InPlaceABN, InPlaceABNSync
from inplace_abn.activations import resolve
from inplace_abn.functions import backend

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


class Summed(nn.Module):
    """φ(BN(x) + r)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm2d(channels), nn.LeakyReLU(0.01, inplace=True)

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(x) + r)


def candidates(channels: int) -> dict[str, nn.Module]:
    return {
        "BatchNorm2d + LeakyReLU": standard(channels),
        "the same, torch.compile": torch.compile(standard(channels)),
        "the same, checkpointed": Checkpointed(standard(channels)),
        "InPlaceABN I": InPlaceABN(channels, variant="I"),
        "InPlaceABN II": InPlaceABN(channels, variant="II"),
        "InPlaceABNSync, one rank": InPlaceABNSync(channels),
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


GPU_COLUMNS = [
    "shape",
    "dtype",
    "layout",
    "direction",
    "impl",
    "median_us",
    "p10_us",
    "p90_us",
    "gpu",
    "torch",
    "triton",
]
# Maps of segmentation networks, and those of ResNeXt-101 with 128 images: with 32, most fit into an L2 cache.
GPU_SHAPES = [
    (32, 256, 56, 56),
    (64, 64, 112, 112),
    (16, 128, 336, 336),
    (12, 4096, 97, 97),
    (32, 2048, 7, 7),
    (128, 64, 112, 112),
    (128, 256, 56, 56),
    (128, 512, 28, 28),
    (128, 1024, 14, 14),
    (128, 2048, 7, 7),
]
GPU_DTYPES = ("bfloat16", "float32", "float16")
# The ends of ResNet-50's blocks.
RESIDUAL_SHAPES = [(128, 256, 56, 56), (128, 512, 28, 28), (128, 1024, 14, 14), (128, 2048, 7, 7)]
# Passes over a map, of one launch and of two: reading x (and r), writing z; reading dz and z (and r), writing dx (and dr).
PASSES = {
    False: {"forward": {"floor": 2, "floor2": 3}, "backward": {"floor": 3, "floor2": 5}},
    True: {"forward": {"floor": 3, "floor2": 4}, "backward": {"floor": 5, "floor2": 8}},
}
Case = tuple[tuple[int, ...], str, str]


def gpu_cases(residual: bool) -> list[Case]:
    shapes = RESIDUAL_SHAPES if residual else GPU_SHAPES
    return [(shape, dtype, layout) for dtype in GPU_DTYPES for shape in shapes for layout in LAYOUTS]


def size_of(case: Case) -> int:
    return torch.Size(case[0]).numel() * getattr(torch, case[1]).itemsize


def device_times(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of device time of each call, in turn, with a cold L2 cache."""
    other = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 3):
        for name, call in calls.items():
            # Read, not written: lines still to be written back would be the next call's burden.
            other.max()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # The host runs ahead while the device sleeps, so that launch gaps do not count.
            torch.cuda._sleep(4_000_000)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                times[name].append(1e3 * start.elapsed_time(end))
    return times


def gpu_calls(case: Case, residual: bool) -> dict[str, dict[str, Callable[[], object]]]:
    """Forward and backward of every implementation. Ours are the verbs, on buffers of their own, as autograd would call them."""
    shape, dtype, layout = case
    x, dz, r = (
        torch.randn(shape, device="cuda").to(getattr(torch, dtype)).contiguous(memory_format=LAYOUTS[layout])
        for _ in range(3)
    )
    make = Summed if residual else standard
    calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "backward": {}}
    for name, layer in (("eager", make(shape[1])), ("compile", torch.compile(make(shape[1])))):
        layer.cuda()
        maps = [t.clone().requires_grad_() for t in ((x, r) if residual else (x,))]
        z = layer(*maps)
        inputs = [*maps, *layer.parameters()]
        calls["forward"][name] = lambda layer=layer, maps=maps: layer(*maps)
        calls["backward"][name] = lambda z=z, inputs=inputs: torch.autograd.grad(z, inputs, dz, retain_graph=True)
    ours = InPlaceABN(shape[1]).cuda()
    phi, a = resolve(ours.activation, ours.activation_param)
    state = (ours.weight, ours.bias, ours.running_mean, ours.running_var, ours.num_batches_tracked)
    verbs = backend(x)
    rest = (ours.momentum, ours.eps, ours.weight_floor, phi, a, r if residual else None)
    z, again = x.clone(), x.clone()
    invstd = verbs.normalize_batch_(z, *state, *rest)
    dr = torch.empty_like(z) if residual else None
    calls["forward"]["ours"] = lambda: verbs.normalize_batch_(again, *state, *rest)
    calls["backward"]["ours"] = lambda: verbs.input_grad_batch(
        dz, z, ours.weight, ours.bias, invstd, ours.weight_floor, phi, a, ours.variant, rest[-1], dr
    )
    for call in calls["backward"].values():
        call()
    torch.cuda.synchronize()
    return calls


def empty_launches() -> dict[str, Callable[[], object]]:
    """For the kernels last prepared: a launch of the same grid that does nothing."""
    import triton

    from inplace_abn import kernels

    @triton.jit
    def nothing(pointer):
        pass

    spare = torch.zeros(1, device="cuda")
    named = {"forward_kernel": "forward", "backward_kernel": "backward"}
    launches = {
        named[k.kernel.__name__]: k for k in kernels.launches.LAUNCHES.values() if k and k.kernel.__name__ in named
    }
    return {
        direction: lambda launch=launch: nothing[launch.grid](spare, num_warps=launch.options["num_warps"])
        for direction, launch in launches.items()
    }


def microseconds_per_byte() -> float:
    """Of traffic, by a large copy."""
    source, target = (torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    copying = statistics.median(device_times({"copy": lambda: target.copy_(source)}, 20)["copy"])
    return copying / (2 * source.nbytes)


def gpu_name() -> str:
    return torch.cuda.get_device_name().replace("NVIDIA ", "").replace(" ", "-")


def gpu_file(out: Path, name: str) -> Path:
    """Where a benchmark of this GPU and these versions writes."""
    import triton

    return out / f"{name}-{gpu_name()}-torch{torch.__version__.split('+')[0]}-triton{triton.__version__}.csv"


def rows_in(path: Path) -> list[dict[str, str]]:
    """What a benchmark wrote before; nothing where there is no file yet."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def compile_ahead(processes: int, residual: bool) -> None:
    """Fill the compilers' caches on disk by several processes at once; the largest maps are left to the run itself."""
    again = [sys.executable, __file__, "--device", "cuda", *(["--residual"] if residual else [])]
    shares = [subprocess.Popen([*again, "--share", f"{i}/{processes}"]) for i in range(processes)]
    for share in shares:
        share.wait()


def gpu(rounds: int, out: Path, share: str | None, residual: bool) -> Path | None:
    import triton

    from inplace_abn import kernels

    torch._dynamo.config.cache_size_limit = 256
    # The compiled backward is called again and again on one graph.
    torch._functorch.config.donated_buffer = False
    if share is not None:
        i, n = map(int, share.split("/"))
        for case in [case for case in gpu_cases(residual) if size_of(case) < 1 << 29][i::n]:
            gpu_calls(case, residual)
        return None
    compile_ahead(max(1, (os.cpu_count() or 3) - 2), residual)
    per_byte = microseconds_per_byte()
    path, card = gpu_file(out, "residual" if residual else "layer"), gpu_name()
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(GPU_COLUMNS)
        for case in gpu_cases(residual):
            kernels.launches.LAUNCHES.clear()
            calls = gpu_calls(case, residual)
            if size_of(case) <= 12 << 20:
                for direction, call in empty_launches().items():
                    calls[direction]["empty"] = call
            for direction, by_name in calls.items():
                passes = PASSES[residual][direction].items()
                figures = {impl: [per_byte * size_of(case) * n] * 3 for impl, n in passes}
                for impl, us in device_times(by_name, rounds).items():
                    deciles = statistics.quantiles(us, n=10)
                    figures[impl] = [statistics.median(us), deciles[0], deciles[-1]]
                for impl, values in figures.items():
                    where = ["x".join(map(str, case[0])), *case[1:], direction, impl]
                    rows.writerow([*where, *(f"{v:.2f}" for v in values), card, torch.__version__, triton.__version__])
                print(*case, direction, {impl: round(v[0]) for impl, v in figures.items()}, flush=True)
            file.flush()
            del calls
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--residual", action="store_true", help="add a map before the activation (on a GPU)")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.residual and given.device != "cuda":
        parser.error("--residual is measured on a GPU: --device cuda")
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.device == "cuda":
        if (path := gpu(given.rounds, given.out, given.share, given.residual)) is not None:
            print(path)
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
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

"""Other plans than the package's, measured beside it: how wide tiles are, how many programs work, how much is in hand.

    python benchmarks/plans.py [--study crew ring sweep small] [--rounds 9] [--out benchmarks/results]      # needs a GPU

crew: the four kernels of two launches, channels innermost, by the bytes of a row that a program has, the tiles a loop has in hand
and the programs on a processor. ring: the two that hold channels in shared memory, by warps, programs on a processor and bytes of
a tile. sweep: the two that hold what they can of channels innermost, by width, programs on a processor, bytes of a tile and tiles
ahead. small: the same two on small maps, by width, programs, warps, and whether a program asks for all the shared memory there is
for it or for what its tiles need, and with tiles of half the size, of which more are ahead; narrow strips may have one member
each, which exchanges nothing. Every row of the CSV is one kernel under one plan; the first plan of each is the package's own.
Device time, medians, with a cold L2 cache, all plans of a case in turn. The file is named by its studies.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layer import device_times, gpu_file, microseconds_per_byte

from inplace_abn import kernels
from inplace_abn.activations import resolve

PHI, SLOPE = resolve("leaky_relu", 0.01)
CREW_SHAPES = [(128, 256, 56, 56), (128, 512, 28, 28), (16, 128, 336, 336), (256, 64, 56, 56), (256, 512, 28, 28)]
SWEEP_SHAPES = [(32, 2048, 7, 7), (128, 1024, 14, 14), (128, 512, 28, 28), (128, 256, 56, 56), (16, 128, 336, 336)]
SMALL_SHAPES = [(32, 2048, 7, 7), (32, 1024, 14, 14), (32, 512, 14, 14), (32, 512, 7, 7), (128, 512, 7, 7)]
RING_SHAPES = [(16, 128, 336, 336), (128, 256, 56, 56), (128, 64, 112, 112), (128, 512, 28, 28), (128, 1024, 14, 14)]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Passes over a map.
PASSES = {"moments": 1, "transform": 2, "sums": 2, "input_grad": 3, "forward": 2, "backward": 3}
COLUMNS = ["study", "shape", "dtype", "kernel", "plan", "floor_us", "median_us", "p10_us", "p90_us"]
Case = tuple[str, tuple[int, ...], str]
OWN = {name: value for name, value in vars(kernels.plans).items() if name.isupper() and isinstance(value, int | tuple)}
FUNCTIONS = {"stages": kernels.plans.stages, "sweep_of": kernels.plans.sweep_of}


def crew_plans() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "own", {}
    for line, stages, programs in itertools.product((128, 256, 512), (1, 3, 4), (4, 8, 16)):
        many = {"CREW_THAT_SUMS": programs, "CREW_THAT_MAPS": programs}
        yield (
            f"line {line}, stages {stages}, programs {programs}",
            {"LINE_BYTES": line, "LINE_BYTES_OF_MAPS": line, **many, "stages": lambda *_, n=stages: n},
        )


def ring_plans() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "own", {}
    for warps, programs, size in itertools.product((2, 4, 8), (2, 3, 4), (4096, 8192, 16384)):
        shared = kernels.plans.card(torch.device("cuda", 0)).shared
        tiles = (shared // programs - kernels.plans.RING_BESIDE) // size
        names = {
            "RING_WARPS": warps,
            "RING_PROGRAMS": programs,
            "RING_BYTES": (size,),
            "RING_TILES": tiles,
        }
        yield f"warps {warps}, programs {programs}, bytes {size}", names


def sweep_plans() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "own", {}
    for wide, programs, size, ahead in itertools.product((64, 128, 256), (1, 2, 3), (8192, 16384), (2, 4, 6)):
        names = {
            "SWEEP_WIDTHS": ((1 << 62, wide),),
            "SWEEP_PROGRAMS": programs,
            "SWEEP_BYTES": size,
            "SWEEP_AHEAD": ahead,
        }
        yield f"wide {wide}, programs {programs}, bytes {size}, ahead {ahead}", names


def small_plans() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "own", {}
    for wide, programs, warps, room in itertools.product((32, 64), (1, 2), (4, 8), ("all", "needed")):
        names = {
            "SWEEP_WIDTHS": ((1 << 62, wide),),
            "sweep_of": partial(forced, programs, warps, room == "needed"),
        }
        yield f"wide {wide}, programs {programs}, warps {warps}, room {room}", names
    for programs, ahead in itertools.product((1, 2), (4, 7)):
        names = {
            "SWEEP_WIDTHS": ((1 << 62, 64),),
            "SWEEP_BYTES": 4096,
            "SWEEP_AHEAD": ahead,
            "SWEEP_AHEAD_ALONE": ahead,
            "sweep_of": partial(forced, programs, 4, False),
        }
        yield f"wide 64, programs {programs}, warps 4, bytes 4096, ahead {ahead}", names


def forced(programs: int, warps: int, needed: bool, *asked: Any) -> kernels.plans.Sweep | None:
    """So many programs on a processor, of so many warps; all tiles held in no more slots than there are tiles, if wanted."""
    plan = kernels.plans._sweep(*asked, programs, warps)
    if plan is None or plan.R or not needed:
        return plan
    tiles = -(-asked[0].rows // (plan.K * plan.B * plan.S))
    return plan._replace(H=max(tiles, plan.ahead))


PLANS = {"crew": crew_plans, "ring": ring_plans, "sweep": sweep_plans, "small": small_plans}
SHAPES = {"crew": CREW_SHAPES, "ring": RING_SHAPES, "sweep": SWEEP_SHAPES, "small": SMALL_SHAPES}


def adopt(plan: dict[str, Any]) -> None:
    """Plan like this from now on."""
    for name, value in {**OWN, **FUNCTIONS, **plan}.items():
        setattr(kernels.plans, name, value)
    kernels.plans.cut.cache_clear()
    kernels.launches.LAUNCHES = {}


def calls(case: Case) -> dict[str, Callable[[], object]]:
    study, shape, dtype = case
    layout = torch.contiguous_format if study == "ring" else torch.channels_last
    x, dz = (torch.randn(shape, device="cuda").to(DTYPES[dtype]).contiguous(memory_format=layout) for _ in range(2))
    weight, bias = torch.rand(shape[1], device="cuda") + 0.5, torch.randn(shape[1], device="cuda")
    rest = (1e-6, PHI, SLOPE)
    z = x.clone()
    invstd = kernels.normalize_batch_(z, weight, bias, None, None, None, 0.1, 1e-5, *rest)
    if study != "crew":
        return {
            "forward": lambda: kernels.normalize_batch_(x, weight, bias, None, None, None, 0.1, 1e-5, *rest),
            "backward": lambda: kernels.input_grad_batch(dz, z, weight, bias, invstd, *rest, "II"),
        }
    mean, _, m = kernels.moments(x)
    sums = kernels.sums(dz, z, weight, bias, *rest, "II")
    return {
        "moments": lambda: kernels.moments(x),
        "transform": lambda: kernels.normalize_(x, mean, invstd, weight, bias, *rest),
        "sums": lambda: kernels.sums(dz, z, weight, bias, *rest, "II"),
        "input_grad": lambda: kernels.input_grad(dz, z, weight, bias, invstd, *sums, m, *rest, "II"),
    }


def measured(case: Case, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Microseconds of every kernel under every plan that the card can run, by plan and kernel."""
    adopt({})
    run = calls(case)
    launches = {}
    for name, plan in PLANS[case[0]]():
        adopt(plan)
        try:
            for call in run.values():
                call()
            torch.cuda.synchronize()
            launches[name] = kernels.launches.LAUNCHES
        except Exception as error:
            print(*case, name, f"{type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
    adopt({})

    def under(name: str, call: Callable[[], object]) -> Callable[[], None]:
        def planned() -> None:
            kernels.launches.LAUNCHES = launches[name]
            call()

        return planned

    return device_times({(n, kernel): under(n, call) for n in launches for kernel, call in run.items()}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", nargs="+", default=list(PLANS), choices=PLANS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    cases = [(study, shape, dtype) for study in given.study for shape in SHAPES[study] for dtype in DTYPES]
    if given.case is not None:
        # Only to fill the compiler's cache on disk.
        measured(cases[given.case], 1)
        return
    again = [sys.executable, __file__, "--study", *given.study, "--case"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda i: subprocess.run([*again, str(i)]), range(len(cases))))
    per_byte = microseconds_per_byte()
    with gpu_file(given.out, f"plans-of-{'-'.join(given.study)}").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for case in cases:
            size = torch.Size(case[1]).numel() * DTYPES[case[2]].itemsize
            best: dict[str, tuple[float, str]] = {}
            own: dict[str, float] = {}
            for (name, kernel), us in measured(case, given.rounds).items():
                median, deciles = statistics.median(us), statistics.quantiles(us, n=10)
                figures = [f"{v:.1f}" for v in (PASSES[kernel] * size * per_byte, median, deciles[0], deciles[-1])]
                rows.writerow([case[0], "x".join(map(str, case[1])), case[2], kernel, name, *figures])
                best[kernel] = min(best.get(kernel, (median, name)), (median, name))
                own.setdefault(kernel, median)
            file.flush()
            for kernel, (median, name) in best.items():
                print(*case, kernel, f"own {own[kernel]:.1f}, best {median:.1f}: {name}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

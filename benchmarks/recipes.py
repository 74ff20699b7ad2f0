"""Training runs of a recipe side by side, each variant with several seeds: accuracy, speed and peak memory.

    python benchmarks/recipes.py --data FOLDER [--seeds 3] [--beside 3] [--out benchmarks/results]      # on a GPU

The folder is of the ImageNet layout; the recipe is ``imagenette``. First one run alone, with the share of time in which the GPU
was busy; then standard batch norm and in-place ABN, variants I and II, in bfloat16 and float32; then the paper's question of
Table 1: trained with ReLU or leaky ReLU, evaluated with either; then statistics over two processes against one, with a smaller
network. Runs go beside each other, so their speeds are not comparable; the first row's is.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from layer import gpu_file, gpu_name

COLUMNS = ["study", "variant", "evaluated", "dtype", "seed", "epochs", "top1", "images_per_second", "data_wait"]
COLUMNS += ["peak_gib", "gpu_busy", "gpu", "torch", "triton"]
CLI = ["-m", "inplace_abn.cli"]


def command(*arguments: str, ranks: int = 1) -> str:
    spread = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run([sys.executable, *spread, *CLI, *arguments], capture_output=True, text=True, timeout=550)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-1500:]}")
    return done.stdout


def settings(pairs: Iterable[str]) -> list[str]:
    return [part for pair in pairs for part in ("--set", pair)]


def run(data: str, folder: Path, changes: list[str], ranks: int = 1) -> dict[str, Any]:
    """Train; what the log says at the end, and typical speed and waiting."""
    command("train", "imagenette", "--data", data, "--out", str(folder), *settings(changes), ranks=ranks)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "lr" in line][1:]
    figures = {
        "top1": lines[-1]["top1"],
        "images_per_second": f"{statistics.median(s['images_per_second'] for s in steps):.0f}",
        "data_wait": f"{statistics.median(s['data_wait'] for s in steps):.3f}",
    }
    if "peak_bytes" in steps[-1]:
        figures["peak_gib"] = f"{steps[-1]['peak_bytes'] / 2**30:.2f}"
    return figures


def busy(data: str, changes: list[str]) -> float:
    """Share of time in which a kernel or copy ran, over 30 steps in the middle of a run. Profiling costs the host time."""
    from torch.profiler import ProfilerActivity, profile

    from inplace_abn.recipes import named, task_of
    from inplace_abn.recipes.config import override
    from inplace_abn.recipes.loop import Ranks, Run

    config = override(named("imagenette"), [f"data.path={data}", *changes])
    with tempfile.TemporaryDirectory() as folder:
        training = Run(config, task_of(config), Path(folder), False, Ranks(None), print)
        batches = iter(training.batches())
        for _ in range(40):
            training.one_step(batches)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(30):
                training.one_step(batches)
            torch.cuda.synchronize()
    spans = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns())
        for e in profiled.profiler.kineto_results.events()
        if "CUDA" in str(e.device_type())
    )
    covered, until = 0, spans[0][0]
    for start, end in spans:
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered / (until - spans[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--beside", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--set", action="append", default=[], help="more settings, for all runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--busy", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    common = [
        f"train.epochs={given.epochs}",
        f"train.evaluate_every={given.epochs}",
        "train.save_minutes=60",
        *given.set,
    ]
    if given.busy:
        print(json.dumps(busy(given.data, common)))
        return
    import triton

    where = {"epochs": given.epochs, "gpu": gpu_name(), "torch": torch.__version__, "triton": triton.__version__}
    with gpu_file(given.out, "imagenette").open("w", newline="") as file, tempfile.TemporaryDirectory() as scratch:
        rows = csv.DictWriter(file, COLUMNS)
        rows.writeheader()

        def note(**row: Any) -> None:
            rows.writerow({**where, **row})
            file.flush()
            print(row, flush=True)

        def trained(study: str, variant: str, dtype: str, seed: int, changes: list[str], ranks: int = 1) -> Path | None:
            folder = Path(scratch) / f"{study}-{variant}-{dtype}-{seed}".replace(" ", "-")
            every = [*common, f"train.dtype={dtype}", f"train.seed={seed}", *changes]
            try:
                figures = run(given.data, folder, every, ranks)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(error, file=sys.stderr, flush=True)
                return None
            note(study=study, variant=variant, dtype=dtype, seed=seed, evaluated="as trained", **figures)
            return folder

        trained("alone", "inplace", "bfloat16", 0, ["network.norm=inplace"])
        done = subprocess.run(
            [
                sys.executable,
                __file__,
                "--data",
                given.data,
                "--epochs",
                str(given.epochs),
                "--busy",
                *settings(given.set),
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(done.stderr[-1500:], file=sys.stderr)
        else:
            note(
                study="alone",
                variant="inplace",
                dtype="bfloat16",
                seed=0,
                gpu_busy=f"{float(done.stdout.splitlines()[-1]):.3f}",
            )
        seeds = range(given.seeds)
        with ThreadPoolExecutor(given.beside) as pool:
            relu = {
                seed: pool.submit(
                    trained,
                    "norm",
                    "standard, ReLU",
                    "bfloat16",
                    seed,
                    ["network.norm=standard", "network.activation=relu"],
                )
                for seed in seeds
            }
            norms = {
                (norm, dtype, seed): pool.submit(trained, "norm", norm, dtype, seed, [f"network.norm={norm}"])
                for dtype in ("bfloat16", "float32")
                for norm in ("standard", "inplace", "inplace-1")
                for seed in seeds
            }

            def evaluated(folder: Path | None, variant: str, activation: str, seed: int) -> None:
                if folder is None:
                    return
                scores = folder / f"{activation}.json"
                command("evaluate", str(folder), "--activation", activation, "--json", str(scores))
                note(
                    study="activation",
                    variant=variant,
                    dtype="bfloat16",
                    seed=seed,
                    evaluated=activation,
                    top1=json.loads(scores.read_text())["top1"],
                )

            for seed in seeds:
                for variant, wait in (("relu", relu[seed]), ("leaky_relu", norms["standard", "bfloat16", seed])):
                    for activation in ("relu", "leaky_relu"):
                        pool.submit(evaluated, wait.result(), variant, activation, seed)
            small = ["network.name=resnet18", "data.workers=4"]
            for seed in seeds:
                pool.submit(trained, "ranks", "one process", "bfloat16", seed, [*small, "network.norm=inplace"])
                pool.submit(trained, "ranks", "two processes", "bfloat16", seed, [*small, "network.norm=sync"], 2)


if __name__ == "__main__":
    main()

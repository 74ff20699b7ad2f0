"""Training runs of recipes, each variant with several seeds: scores, speed and peak memory.

    python benchmarks/recipes.py --study alone norm activation ranks --data imagenette=FOLDER       # on a GPU
    python benchmarks/recipes.py --study camvid --data camvid=FOLDER

alone: one run of ``imagenette`` by itself, and the share of time in which the GPU was busy. norm: standard batch norm and
in-place ABN, variants I and II, in bfloat16 and float32. activation: the paper's question of Table 1, trained with ReLU or leaky
ReLU, evaluated with either; its runs with leaky ReLU are those of norm. ranks: statistics over two processes against one, with a
smaller network. camvid: the columns of the paper's Table 3, standard, in place at the same settings, and in place with as many or
as large crops as standard batch norm's memory holds, scored on the test images. camvid-speed: a few epochs of each by itself.

Runs go beside each other (--beside), so their speeds are not comparable but for the studies alone and camvid-speed, or with
--beside 1. Rows of studies and seeds that are not run again stay in the file; --tables FILE prints what docs/recipes.md shows of
one.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from layer import gpu_file, gpu_name, rows_in

from inplace_abn.recipes import named, task_of

COLUMNS = [
    "study",
    "recipe",
    "variant",
    "evaluated",
    "dtype",
    "seed",
    "epochs",
    "score",
    "images_per_second",
    "data_wait",
]
COLUMNS += ["peak_gib", "gpu_busy", "settings", "gpu", "torch", "triton"]
CLI = ["-m", "inplace_abn.cli"]


@dataclass(frozen=True)
class Job:
    """A variant of a recipe; what else it is evaluated with, by name."""

    recipe: str
    variant: str
    changes: tuple[str, ...]
    dtype: str = "bfloat16"
    ranks: int = 1
    epochs: int = 0
    evaluations: dict[str, tuple[str, ...]] = field(default_factory=dict)


EITHER = {name: ("--activation", name) for name in ("relu", "leaky_relu")}
TEST = {"test": ("--set", "data.validation=test")}
TEST["test, three scales and mirrored"] = (*TEST["test"], "--scales", "0.75,1,1.25", "--flip")
SMALL = ("network.name=resnet18", "data.workers=4")
# Batches and crops in place have the peak of standard batch norm's 16 crops of 512², by `inplace_abn.planning.forecast`.
CAMVID = [
    Job("camvid", "standard", ("network.norm=standard",), evaluations=TEST),
    Job("camvid", "in place", ("network.norm=inplace",), evaluations=TEST),
    Job("camvid", "in place, more crops", ("network.norm=inplace", "train.batch=24"), evaluations=TEST),
    Job("camvid", "in place, larger crops", ("network.norm=inplace", "data.crop=640"), evaluations=TEST),
]
STANDARD = Job("imagenette", "standard", ("network.norm=standard",), evaluations=EITHER)
STUDIES = {
    "alone": [Job("imagenette", "inplace", ("network.norm=inplace",))],
    "norm": [
        STANDARD,
        *(Job("imagenette", norm, (f"network.norm={norm}",)) for norm in ("inplace", "inplace-1")),
        *(
            Job("imagenette", norm, (f"network.norm={norm}",), "float32")
            for norm in ("standard", "inplace", "inplace-1")
        ),
    ],
    "activation": [replace(STANDARD, variant="relu", changes=(*STANDARD.changes, "network.activation=relu"))],
    "ranks": [
        Job("imagenette", "one process", (*SMALL, "network.norm=inplace")),
        Job("imagenette", "two processes", (*SMALL, "network.norm=sync"), ranks=2),
    ],
    "camvid": CAMVID,
    "camvid-speed": [replace(job, epochs=5, evaluations={}) for job in CAMVID],
}
ONE_BY_ONE = ("alone", "camvid-speed")


def tables(path: Path) -> dict[str, str]:
    """By study, the Markdown table of its runs: scores of all seeds in their order, and their mean; speeds."""
    rows = rows_in(path)

    def table(head: str, of: dict[str, list[dict[str, str]]]) -> str:
        lines = [head, "|" + "---|" * head.strip("|").count("|") + "---|"]
        for name, own in of.items():
            if len({(r["epochs"], r["settings"]) for r in own}) > 1:
                raise ValueError(
                    f"{name}: runs of different settings are no seeds of one another; run them again alike"
                )
            scores = [100 * float(r["score"]) for r in sorted(own, key=lambda r: int(r["seed"]))]
            peaks = sorted({r["peak_gib"] for r in own if r["peak_gib"]})
            cells = [name, ", ".join(f"{score:.1f}" for score in scores), f"{statistics.mean(scores):.1f}"]
            cells += [" or ".join(peaks) + " GiB"] if "peak" in head else []
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def grouped(study: str, evaluated: Iterable[str], name: Callable[[dict[str, str]], str]) -> dict[str, Any]:
        # In the order of the study's jobs; rows lie in the order in which runs that went beside each other ended.
        jobs, views = [(job.variant, job.dtype) for job in STUDIES[study]], list(evaluated)
        own = [r for r in rows if r["study"] == study and r["evaluated"] in views and r["score"]]
        of: dict[str, list[dict[str, str]]] = {}
        for r in sorted(own, key=lambda r: (jobs.index((r["variant"], r["dtype"])), views.index(r["evaluated"]))):
            of.setdefault(name(r), []).append(r)
        return of

    alone = [r for r in rows if r["study"] == "camvid-speed"]
    speeds = [
        f"| {r['variant']} | {r['images_per_second']} | {100 * float(r['data_wait']):.1f} % | {r['peak_gib']} GiB |"
        for r in alone
    ]
    top1 = "top-1 of each seed, % | mean"
    exchanged = grouped("norm", EITHER, lambda r: f"leaky_relu | {r['evaluated']}")
    exchanged |= grouped("activation", EITHER, lambda r: f"relu | {r['evaluated']}")
    return {
        "norm": table(
            f"| norm | dtype | {top1} | peak |", grouped("norm", ["val"], lambda r: f"{r['variant']} | {r['dtype']}")
        ),
        "activation": table(f"| trained with | evaluated with | {top1} |", exchanged),
        "ranks": table(
            f"| statistics of | {top1} | peak of a process |", grouped("ranks", ["val"], lambda r: r["variant"])
        ),
        "camvid": table(
            "| crops | evaluated | mean IoU of each seed, % | mean |",
            grouped("camvid", TEST, lambda r: f"{r['variant']} | {r['evaluated']}"),
        ),
        "camvid-speed": "\n".join(["| crops | images/s | waiting for data | peak |", "|---|---|---|---|", *speeds]),
    }


def command(*arguments: str, ranks: int = 1) -> str:
    spread = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run([sys.executable, *spread, *CLI, *arguments], capture_output=True, text=True, timeout=590)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-1500:]}")
    return done.stdout


def assigned(pairs: Iterable[str]) -> list[str]:
    return [part for pair in pairs for part in ("--set", pair)]


def first_score(scores: dict[str, float]) -> float:
    return scores["top1"] if "top1" in scores else scores["miou"]


def train(job: Job, data: str, folder: Path, changes: list[str]) -> dict[str, Any]:
    """Train; what the log says at the end, and typical speed and waiting."""
    command("train", job.recipe, "--data", data, "--out", str(folder), *assigned(changes), ranks=job.ranks)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "lr" in line][1:]
    figures: dict[str, Any] = {
        "score": first_score(lines[-1]),
        "images_per_second": f"{statistics.median(s['images_per_second'] for s in steps):.0f}",
        "data_wait": f"{statistics.median(s['data_wait'] for s in steps):.3f}",
    }
    if "peak_bytes" in steps[-1]:
        figures["peak_gib"] = f"{steps[-1]['peak_bytes'] / 2**30:.2f}"
    return figures


def busy(job: Job, data: str, changes: list[str]) -> float:
    """Share of time in which a kernel or copy ran, over 30 steps in the middle of a run. Profiling costs the host time."""
    from torch.profiler import ProfilerActivity, profile

    from inplace_abn.recipes.config import override
    from inplace_abn.recipes.loop import Run
    from inplace_abn.recipes.processes import Ranks

    config = override(named(job.recipe), [f"data.path={data}", *changes])
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
    events = [e for e in profiled.profiler.kineto_results.events() if "CUDA" in str(e.device_type())]
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events)
    covered, until = 0, spans[0][0]
    for start, end in spans:
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered / (until - spans[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--data", action="append", default=[], metavar="RECIPE=FOLDER")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--missing", action="store_true", help="run only what the file does not have yet")
    parser.add_argument("--beside", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=0, help="the recipe's own if 0")
    parser.add_argument("--set", action="append", default=[], help="more settings, for all runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="print the tables of a file, and run nothing")
    parser.add_argument("--busy", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tables:
        print("\n\n".join(tables(given.tables).values()))
        return
    data = dict(pair.split("=", 1) for pair in given.data)
    missing = {job.recipe for study in given.study for job in STUDIES[study]} - data.keys()
    if missing and not given.busy:
        parser.error(f"these studies need --data of {', '.join(sorted(missing))}")
    if given.busy:
        (job,) = STUDIES["alone"]
        print(json.dumps(busy(job, data[job.recipe], [*given.set, *job.changes])))
        return
    import triton

    path = gpu_file(given.out, "recipes")
    known = rows_in(path)

    def rows_of(study: str, job: Job, seed: int) -> list[dict[str, str]]:
        key = (study, job.variant, job.dtype, str(seed))
        return [r for r in known if (r["study"], r["variant"], r["dtype"], r["seed"]) == key]

    runs = [
        (study, job, seed)
        for study in given.study
        for job in STUDIES[study]
        for seed in ([0] if study in ONE_BY_ONE else given.seeds)
    ]
    if given.missing:
        runs = [one for one in runs if not {"val", *one[1].evaluations} <= {r["evaluated"] for r in rows_of(*one)}]
    again = [row for one in runs for row in rows_of(*one)]
    kept = [row for row in known if row not in again]
    where = {"settings": " ".join(given.set), "gpu": gpu_name()}
    where |= {"torch": torch.__version__, "triton": triton.__version__}
    with path.open("w", newline="") as file, tempfile.TemporaryDirectory() as scratch:
        rows = csv.DictWriter(file, COLUMNS)
        rows.writeheader()
        rows.writerows(kept)

        def note(**row: Any) -> None:
            rows.writerow({**where, **row})
            file.flush()
            print(row, flush=True)

        def run(study: str, job: Job, seed: int) -> None:
            folder = Path(scratch) / f"{study}-{job.variant}-{job.dtype}-{seed}".replace(" ", "-")
            epochs = job.epochs or given.epochs or named(job.recipe).train.epochs
            changes = [f"train.epochs={epochs}", f"train.evaluate_every={epochs}", "train.save_minutes=60", *given.set]
            changes += [f"train.dtype={job.dtype}", f"train.seed={seed}", *job.changes]
            of = {"study": study, "recipe": job.recipe, "variant": job.variant, "dtype": job.dtype, "seed": seed}
            of["epochs"] = epochs
            try:
                note(**of, evaluated="val", **train(job, data[job.recipe], folder, changes))
                for name, options in job.evaluations.items():
                    scores = folder / f"{name}.json"
                    command("evaluate", str(folder), *options, "--json", str(scores))
                    note(**of, evaluated=name, score=first_score(json.loads(scores.read_text())))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(error, file=sys.stderr, flush=True)

        for one in runs:
            if one[0] in ONE_BY_ONE:
                run(*one)
        if "alone" in {study for study, _, _ in runs}:
            (job,) = STUDIES["alone"]
            busy_run = ["--busy", *assigned(given.set), *(part for pair in given.data for part in ("--data", pair))]
            done = subprocess.run([sys.executable, __file__, *busy_run], capture_output=True, text=True)
            print(done.stderr[-1500:], file=sys.stderr)
            if not done.returncode:
                share = f"{float(done.stdout.splitlines()[-1]):.3f}"
                note(study="alone", recipe=job.recipe, variant=job.variant, dtype=job.dtype, seed=0, gpu_busy=share)
        with ThreadPoolExecutor(given.beside) as pool:
            begun = [pool.submit(run, *one) for one in runs if one[0] not in ONE_BY_ONE]
        for future in begun:
            future.result()


if __name__ == "__main__":
    main()

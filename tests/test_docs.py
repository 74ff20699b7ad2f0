"""What README and docs say is what the code and the committed measurements say. (Their >>> examples run as doctests.)"""

from __future__ import annotations

import csv
import importlib
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulated import H200
from inplace_abn import ACTIVATIONS, guard

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
name = lambda path: path.name


def read(results: str) -> list[dict[str, str]]:
    with (ROOT / "benchmarks" / "results" / results).open(newline="") as file:
        return list(csv.DictReader(file))


def script(name: str) -> Any:
    """A benchmark as a module; they import each other."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_blocks_run(page, capsys):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(block, str(page), "exec"), {})


def test_the_readmes_table_is_the_committed_measurement():
    text = (ROOT / "README.md").read_text()
    rows = read("demo-cpu-torch2.13.0.csv")
    assert len(rows) == 2
    for r in rows:
        mib = [f"{int(r[k]) / 2**20:.1f} MiB" for k in ("kept_bytes", "peak_bytes")]
        scores = [f"{float(r[k]):.1%}" for k in ("pixel_accuracy", "mean_iou")]
        cells = [r["layer"], *mib, f"{float(r['median_ms']):.0f} ms", *scores]
        assert f"| {' | '.join(cells)} |" in text
    assert int(rows[1]["kept_bytes"]) <= 0.52 * int(rows[0]["kept_bytes"])


def test_the_notes_table_is_the_committed_measurement():
    text = (ROOT / "benchmarks" / "NOTES.md").read_text()
    for r in read("layer-cpu-torch2.13.0.csv"):
        spread = f"{r['median_ms']} ({r['p10_ms']}–{r['p90_ms']})"
        assert f"| {r['candidate']} | {r['dtype']} | {r['layout']} | {spread} | {r['ratio_of_medians']} |" in text


def span(found: list[float]) -> str:
    """From the least to the most."""
    return f"{min(found):.2f}–{max(found):.2f}"


def test_what_is_said_of_pages_was_measured():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    back, kept = (
        [
            [
                float(r["ratio"])
                for r in read("speed-cpu-torch2.13.0.csv")
                if (r["pages"], r["layout"]) == (pages, layout)
            ]
            for layout in ("contiguous_format", "channels_last")
        ]
        for pages in ("handed back", "kept")
    )
    assert {len(ratios) for ratios in back + kept} == {10}
    medians = [f"{statistics.median(ratios):.2f}" for ratios in back]
    for told in (
        f"it is {span(back[0])} in NCHW and {span(back[1])} in channels_last, in the median {medians[0]} and {medians[1]}.",
        f"it is {span(kept[0])} and {span(kept[1])}, of which {sum(ratio <= 1.3 for ratio in kept[1])} of 10 are within",
    ):
        assert told in notes, told


PLOT = script("plot")
mib_of, is_inner = PLOT.mib_of, PLOT.is_inner


def is_swept(case: tuple[str, ...]) -> bool:
    """Whether a case of a benchmark is swept over: channels innermost, or few pixels."""
    return is_inner(case) or case[0].endswith("x7x7") or (case[0].endswith("14x14") and case[1] != "float32")


def by_plan(file: str) -> dict[str, dict[tuple[str, ...], dict[str, float]]]:
    """Microseconds of every plan of every case of every study in a file."""
    studies: dict[str, dict[tuple[str, ...], dict[str, float]]] = {}
    for r in read(f"{file}-H200-torch2.11.0-triton3.6.0.csv"):
        case = tuple(r[k] for k in ("shape", "dtype", "layout", "direction"))
        studies.setdefault(r["study"], {}).setdefault(case, {})[r["plan"]] = float(r["median_us"])
    return studies


def own_ring(case: tuple[str, ...]) -> Any:
    """How the package holds a case in shared memory on an H200."""
    plans = pytest.importorskip("inplace_abn.kernels").plans
    n, c, h, w = map(int, case[0].split("x"))
    maps = 1 if case[3] == "forward" else 2
    place = plans.Layout(False, n, c, h * w, c * h * w, h * w)
    return plans.ring_of(place, 4 if case[1] == "float32" else 2, maps, maps, plans.Card(*H200))


def test_the_gpu_figures_are_the_committed_measurement(tmp_path):
    notes, readme = (ROOT / "benchmarks" / "NOTES.md").read_text(), (ROOT / "README.md").read_text()
    for r in read("demo-h200-torch2.11.0.csv"):
        assert f"{int(r['peak_bytes']) / 2**20:.1f} MiB | {r['median_ms']} ms |" in notes
    plot = PLOT
    rows = plot.read(ROOT / "benchmarks" / "results" / "layer-H200-torch2.11.0-triton3.6.0.csv")
    assert plot.table(rows) in notes and plot.over(rows, "ours", "bfloat16") == 1
    assert "floor / ours" in plot.summary(rows)
    for dtype in ("bfloat16", "float16", "float32"):
        for rival in ("compile", "eager"):
            assert f"{plot.over(rows, rival, dtype):.2f}" in notes
    assert plot.standing(rows) in notes
    speed = {
        (r["what"], r["megabytes"]): r["terabytes_per_second"]
        for r in read("bandwidth-H200-torch2.11.0-triton3.6.0.csv")
    }
    memory, both = speed["read 4", "1024"], speed["read and write to DRAM 4", "24"]
    quoted = [memory, both, speed["read 4", "24"], speed["write 4", "1024"], speed["copy", "1024"]]
    assert all(figure in notes for figure in [*quoted, speed["read and write to DRAM 4", "4"]])
    alone = 16 * 128 * 336**2 * 2 / 1e6 * (1 / float(memory) + 2 / float(both))
    again = next(
        float(r["median_us"])
        for r in read("variants-H200-torch2.11.0-triton3.6.0.csv")
        if [r[k] for k in ("shape", "dtype", "layout", "direction", "variant")]
        == ["16x128x336x336", "bfloat16", "NCHW", "forward", "one launch"]
    )
    assert f"takes {alone:.0f} µs" in notes and f"remaining {again - alone:.0f} µs of the {again}" in notes
    forward, backward = (plot.over_floor2(rows, direction) for direction in ("forward", "backward"))
    assert f"of floor2 {forward} are reached forward and\n{backward} backward" in notes
    aims = {case: aim for case in rows if (aim := plot.aim_of(case)) is not None}
    reached = {case: rows[case][floor] / rows[case]["ours"] for case, (floor, _, _) in aims.items()}
    missing = {case: ratio for case, ratio in reached.items() if ratio < aims[case][-1]}
    assert f"Of the {len(aims)} rows with an aim on a floor, {len(aims) - len(missing)} meet" in notes
    assert f"The {len(missing)} others have channels innermost" in notes and all(map(is_inner, missing))
    assert f"They reach {span(list(missing.values()))}." in notes
    every = [
        (dtype, direction) for dtype in ("bfloat16", "float32", "float16") for direction in ("forward", "backward")
    ]
    named = {(shape, *how) for shape in ("12x4096x97x97", "128x256x56x56") for how in every}
    named |= {("128x512x28x28", *how) for how in every if how[1] == "backward" or how[0] == "float32"}
    named |= {(shape, "float32", "backward") for shape in ("32x256x56x56", "128x1024x14x14")}
    assert {(case[0], case[1], case[3]) for case in missing} == named | {("64x64x112x112", "float32", "forward")}
    narrow = [case for case in missing if plot.widest_strip(case) <= 64]
    assert {case[0] for case in narrow} == {"128x256x56x56", "64x64x112x112"}
    assert f"for {len(narrow)} of them (128×256×56², 64×64×112²)" in notes
    assert f"For the other {len(missing) - len(narrow)} strips of 128 bytes" in notes
    # These spans are those of two studies, whose own tests compute them.
    of_strips, of_rounds = (
        re.search(told, notes)[1]
        for told in (r"Came: the best of 11 settings takes (\S+) of", r"the best number of rounds takes (\S+) of")
    )
    assert f"at their best take {of_strips} and {of_rounds} of the time of a sweep" in notes
    of_empty = {case: by["ours"] / (by["empty"] + by["floor"]) for case, by in rows.items() if "empty" in by}
    small, missed = (
        list(of_empty.values()),
        {case: ratio for case, ratio in of_empty.items() if ratio > plot.AIM_OF_SMALL},
    )
    assert len(missed) == 2 and all(is_inner(case) and case[3] == "forward" for case in missed)
    told = f"{len(small) - 2} of the {len(small)} rows meet the aim; forward with channels innermost does not, "
    assert told + f"with {min(missed.values()):.2f} and {max(missed.values()):.2f}" in notes
    us = [by["ours"] for by in rows.values() if "empty" in by]
    assert f"they take {min(small):.1f}–{max(small):.1f} times that, {min(us):.1f}–{max(us):.1f} µs" in notes
    assert all(plot.over(rows, rival, "bfloat16") >= aim for rival, aim in plot.AIMS_OF_RIVALS.items())
    assert f"{plot.over(rows, 'compile', 'bfloat16'):.2f} times as fast as `torch.compile` in bfloat16" in readme
    assert all(by["ours"] < min(by["eager"], by["compile"]) for by in rows.values())
    summed = plot.read(ROOT / "benchmarks" / "results" / "residual-H200-torch2.11.0-triton3.6.0.csv")
    assert plot.table(summed) in notes
    pairs = (
        tuple(f"{plot.over(summed, rival, dtype):.2f}" for rival in ("compile", "eager"))
        for dtype in ("bfloat16", "float32")
    )
    told = "In bfloat16 {} times as fast as `torch.compile` and {} times as eager, in float32 {} and {}."
    assert told.format(*(figure for pair in pairs for figure in pair)) in notes
    halves = [
        summed[shape, "float16", layout, direction]["ours"] / by["ours"]
        for (shape, dtype, layout, direction), by in summed.items()
        if dtype == "bfloat16"
    ]
    assert f"float16 takes {span(halves)} of bfloat16's time" in notes
    of_sums = notes.split("### With a sum")[1].split("\n### ")[0]
    for case, by in summed.items():
        if (ratio := by["ours"] / min(by["eager"], by["compile"])) > 1:
            line = next(line for line in of_sums.splitlines() if line.startswith(f"- {case[0]} {case[2]} {case[3]}: "))
            assert f"{ratio:.2f} in {case[1]}" in line
    by = rows["16x128x336x336", "bfloat16", "NCHW", "forward"]
    assert all(f"{by[impl]:.1f}" in readme for impl in ("eager", "compile", "ours"))
    plot.draw(rows, tmp_path / "layer.svg")
    assert "channels_last" in (tmp_path / "layer.svg").read_text()


def test_what_is_said_of_maps_held_in_shared_memory_was_measured():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    cases: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for r in read("ring-H200-torch2.11.0-triton3.6.0.csv"):
        cases.setdefault((r["shape"], r["dtype"], r["direction"]), []).append(r)
    best = {case: min(float(r["held_us"]) for r in rows) for case, rows in cases.items()}
    gains = [float(rows[0]["l2_us"]) / best[case] for case, rows in cases.items()]
    assert f"Came: {min(gains):.2f}–{max(gains):.2f} times as fast" in notes and f"{len(cases)} cases" in notes
    large = [float(rows[0]["floor_us"]) / best[case] for case, rows in cases.items() if mib_of(case) >= 98]
    assert f"{min(large):.2f}–{max(large):.2f} of the floor on maps of 98 MiB and more." in notes

    def of_best(warps: str, programs: str, tile: int) -> tuple[str, str]:
        """Time of the best setting of a kind over the best of all, at most and in the geometric mean."""
        ratios = []
        for case, rows in cases.items():
            vector = 8 if case[:2] == ("128x1024x14x14", "bfloat16") else 16
            kind = [warps, programs, str(tile // vector // (1 if case[2] == "forward" else 2))]
            names = ("warps", "programs_a_processor", "lines")
            mine = [float(r["held_us"]) for r in rows if [r[name] for name in names] == kind]
            ratios.append(min(mine) / best[case])
        return f"{max(ratios):.2f}", f"{statistics.geometric_mean(ratios):.2f}"

    most, mean = of_best("4", "3", 8192)
    assert f"within {most} of the best everywhere, {mean} in the mean" in notes
    for kind, name in (
        (("4", "2", 8192), "2 programs"),
        (("8", "2", 8192), "8 warps"),
        (("2", "6", 4096), "of 2 warps"),
    ):
        assert f"{name}: {' and '.join(of_best(*kind))}" in notes
    gained: dict[str, list[float]] = {"large": [], "small": [], "short": []}
    for r in read("held-H200-torch2.11.0-triton3.6.0.csv"):
        told = f"{r['held_us']} for {r['l2_us']}"
        mib = mib_of((r["shape"], r["dtype"]))
        if (r["shape"], r["direction"], r["residual"]) == ("16x128x336x336", "backward", "True"):
            # Left to L2.
            assert float(r["held_us"]) > float(r["l2_us"]) and told in notes
            continue
        if (r["shape"], r["direction"]) == ("256x256x14x14", "backward"):
            assert told in notes
        short = r["shape"].endswith("14x14") and r["dtype"] == "bfloat16"
        kind = "large" if mib >= 32 else "short" if short else "small"
        gained[kind].append(float(r["l2_us"]) / float(r["held_us"]))
    large, small, short = (f"{min(g):.1f}–{max(g):.1f}" for g in gained.values())
    assert (
        f"from 32 MiB on, {large} times" in notes
        and f"below, {small}, no gain" in notes
        and f"vectors for the other kernel, {short} (" in notes
    )
    crew = {
        tuple(r.values())[:3] + tuple(r.values())[5:8]: r["median_us"]
        for r in read("crew-H200-torch2.11.0-triton3.6.0.csv")
    }
    for shape, kernel, now, before in (
        ("128x512x28x28", "sums_kernel", ("64", "4", "4"), ("", "3", "8")),
        ("12x4096x97x97", "transform_kernel", ("64", "1", "16"), ("", "3", "4")),
        ("16x128x336x336", "input_grad_kernel", ("", "4", "16"), ("", "3", "8")),
    ):
        told = [crew[(shape, "bfloat16", kernel, *plan)] for plan in (now, before)]
        assert f"{told[0]} for {told[1]}" in notes or f"{told[0]} µs for {told[1]}" in notes


def test_what_is_said_of_sweeps_was_measured():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    cases: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for r in read("sweep-H200-torch2.11.0-triton3.6.0.csv"):
        case = tuple(r[k] for k in ("shape", "dtype", "layout", "residual"))
        cases.setdefault(case, {})[r["plan"]] = [float(r[k]) for k in ("forward_us", "backward_us")]
    plan = "held, {} bytes wide, {} programs, {} warps, tiles of {} bytes, {} ahead"

    def ratios(one: str, other: str, layout: str = "") -> str:
        """Range of the time of one plan over that of another, where both were measured."""
        both = [
            (by[one or chosen(case)], by[other or chosen(case)])
            for case, by in cases.items()
            if {one or chosen(case), other or chosen(case)} <= by.keys() and layout in case[2]
        ]
        found = [a / b for pair in both for a, b in zip(*pair, strict=True)]
        return f"{min(found):.2f}–{max(found):.2f}"

    def chosen(case: tuple[str, ...]) -> str:
        if case[2] == "NCHW":
            return "held, as planned"
        mib = mib_of(case)
        return plan.format(64 if mib <= 16 else 128 if mib <= 64 else 256, 2, 4, 8192, 6)

    assert f"Came: {ratios('not held', '', 'channels_last')} times as fast as what was there before" in notes
    assert f"Came: {ratios('not held', '', 'NCHW')} times as fast as from L2" in notes
    best = [
        by[chosen(case)][i] / min(us[i] for us in by.values())
        for case, by in cases.items()
        for i in (0, 1)
        if chosen(case) in by
    ]
    assert f"within {max(best):.2f} of the best of all settings everywhere" in notes
    two = plan.format(256, 2, 4, 8192, 6)
    others = (plan.format(256, *rest) for rest in ((3, 4, 8192, 5), (4, 4, 8192, 3), (1, 8, 16384, 6)))
    told = "three programs take {} of the time of two, four {}, one of eight warps {};"
    assert told.format(*(ratios(other, two) for other in others)) in notes
    assert f"(three for five: {ratios(*(plan.format(256, 3, 4, 8192, ahead) for ahead in (3, 5)))})" in notes
    assert f"leave L2 takes {ratios(two + ', stores evict_first', two)}." in notes
    assert f"from L2 take {ratios('all slabs at once, from L2', 'not held')} of the time" in notes
    strips: dict[tuple[str, ...], list[float]] = {}
    for r in read("strips-H200-torch2.11.0-triton3.6.0.csv"):
        if float(r["apart"]) < 0.01:
            gain = float(r["package_us"]) / float(r["held_us"])
            strips.setdefault((r["shape"], r["dtype"], r["direction"]), []).append(gain)
        else:
            assert (r["dtype"], r["strip_bytes"]) == ("bfloat16", "128")
    gains = [max(found) for found in strips.values()]
    assert f"Came: {min(gains):.2f}–{max(gains):.2f} times as fast as before" in notes
    assert f"{sum(g > 1 for g in gains)} of {len(gains)} cases gain" in notes
    of_kernels = {
        (r["kernel"], r["dtype"], r["shape"], r["plan"]): float(r["median_us"])
        for r in read("plans-of-crew-H200-torch2.11.0-triton3.6.0.csv")
    }
    for kernel, dtype, plan in (
        ("transform", "bfloat16", "line 256, stages 1, programs 16"),
        ("transform", "float32", "line 256, stages 1, programs 16"),
        ("input_grad", "bfloat16", "line 256, stages 4, programs 16"),
        ("input_grad", "float32", "line 256, stages 4, programs 16"),
        ("moments", "float32", "line 128, stages 1, programs 4"),
    ):
        of_own = [
            us / of_kernels[kernel, dtype, shape, "own"]
            for (*kind, shape, tried), us in of_kernels.items()
            if [*kind, tried] == [kernel, dtype, plan]
        ]
        assert f"{min(of_own):.2f}–{max(of_own):.2f}" in notes, (kernel, dtype)


def test_what_is_said_of_tiles_clocks_and_counters_was_measured():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    studies: dict[str, dict[tuple[str, ...], dict[str, float]]] = {}
    for r in read("tiles-H200-torch2.11.0-triton3.6.0.csv"):
        case = tuple(r[k] for k in ("shape", "dtype", "layout", "residual", "direction"))
        studies.setdefault(r["study"], {}).setdefault(case, {})[r["plan"]] = float(r["median_us"])

    def ratios(
        study: str, one: str, other: str, keep: Callable[[tuple[str, ...]], bool] = lambda case: True
    ) -> list[float]:
        """Time of one plan over that of another, where both were measured."""
        return [by[one] / by[other] for case, by in studies[study].items() if {one, other} <= by.keys() and keep(case)]

    early, rule = "slack 2, running statistics early", "slack 3 or 2 by the rule"
    large = studies["rings two"]["128x64x112x112", "float32", "NCHW", "False", "backward"]
    for told in (
        f"three for two takes {span(ratios('rings one', 'slack 3', early))} of the time",
        f"which takes {span(ratios('rings two', rule, early))} in all cases",
        f"backward in float32: {large[rule]} for {large[early]})",
        f"slack of four: {span(ratios('rings one', 'tiles of 4 KB, slack 4', early))}; two programs",
        f"two programs a processor: {span(ratios('rings one', '2 programs', early))}.",
        f"is the burden: {span(ratios('rings one', 'the same, 200 ns between looks', early))}.",
        f"not after: {span(ratios('rings two', early, 'slack 2'))}.",
    ):
        assert told in notes, told
    last, few, turned = "the last tiles held", "sums at once where few, {} ahead", "turned round, {} ahead"
    now = "turned round, 4 ahead, sums at once up to 4096"
    plain = ratios("sweeps one", "the first held, 6 ahead", last, lambda case: is_inner(case) and case[3] == "False")
    small = ratios(
        "sweeps one",
        few.format(3),
        "3 ahead, all sums in two steps",
        lambda case: is_inner(case) and mib_of(case) <= 16,
    )
    turning = [
        span(ratios("sweeps two", turned.format(4), few.format(4), lambda case, of=of: is_inner(case) == of))
        for of in (True, False)
    ]
    gained = [
        span(
            ratios(
                "sweeps two",
                last,
                now,
                lambda case, of=of: case[2] == of[0] and case[0].endswith(of[1]),
            )
        )
        for of in (("channels_last", ""), ("NCHW", "x7x7"), ("NCHW", "x14x14"))
    ]
    means = [statistics.geometric_mean(ratios("sweeps two", turned.format(n), turned.format(4))) for n in (3, 5, 6)]
    called = statistics.geometric_mean(ratios("sweeps three", "turned round, words called for", "turned round"))
    fourteen = [
        studies["sweeps two"]["128x1024x14x14", "bfloat16", "NCHW", "False", d] for d in ("forward", "backward")
    ]
    fold = {
        r["kernels"]: r["fold"]
        for r in read("phases-H200-torch2.11.0-triton3.6.0.csv")
        if [r[k] for k in ("cache", "dtype", "layout", "direction")] == ["cold", "bfloat16", "NCHW", "forward"]
    }
    for told in (
        f"for the others: {span(plain)} of the time",
        f"by some for all: {span(small)} up to 16 MiB",
        f"({fold['before']} cycles at 7×7 in bfloat16, now {fold['now']}): ",
        f"): {turning[0]} with channels innermost, {turning[1]} else",
        f"takes {gained[0]} times as long with channels innermost, {gained[1]} at 7×7",
        f"six take {', '.join(f'{mean:.2f}' for mean in means)} in the mean",
        f"first to leave L2: {span(ratios('sweeps one', '3 ahead, written first to leave L2', few.format(3)))}.",
        f"before they are needed: {called:.2f} in the mean",
        f"Came: {gained[2]} times as fast (128×1024×14² forward {fourteen[0][now]} for {fourteen[0][last]}, ",
        f"backward {fourteen[1][now]} for {fourteen[1][last]})",
    ):
        assert told in notes, told
    waits = read("waits-H200-torch2.11.0-triton3.6.0.csv")
    sums, copies = ([round(100 * float(r[f"waits_for_{what}"])) for r in waits] for what in ("sums", "copies"))
    others = [share for share, r in zip(copies, waits, strict=True) if not r["shape"].startswith("16x128x336")]
    assert f"waited {min(sums)} to {max(sums)} % of their time for the sums of others" in notes
    assert f"at most {max(others)} % for copies (16×128×336² alone, with one tile ahead, up to {max(copies)})" in notes
    # The copy's bandwidth: a floor is two passes over a map.
    per_byte = next(
        float(r["median_us"]) / (2 * 4 * math.prod(map(int, r["shape"].split("x"))))
        for r in read("layer-H200-torch2.11.0-triton3.6.0.csv")
        if [r[k] for k in ("shape", "dtype", "direction", "impl")] == ["16x128x336x336", "float32", "forward", "floor"]
    )
    counted: dict[tuple[str, str], list[float]] = {}
    moved: dict[tuple[str, str], list[float]] = {}
    now = "swept over, six tiles in registers"
    busy, active, issued = [], {now: [], "held in a ring": []}, []
    for r in read("counters-H200-torch2.11.0-triton3.6.0.csv"):
        if r["variant"] not in active:
            continue
        size = math.prod(map(int, r["shape"].split("x"))) * (4 if r["dtype"] == "float32" else 2)
        where = f"{size / 2**20:.0f} MiB" if r["layout"] == "channels_last" else r["variant"]
        counted.setdefault((where, r["direction"]), []).append(int(r["read_bytes"]) / size)
        moved.setdefault((where, r["direction"]), []).append((int(r["read_bytes"]) + int(r["written_bytes"])) / size)
        active[r["variant"]].append(float(r["warps_active_pct"]))
        issued.append(float(r["issue_active_pct"]))
        if r["variant"] == now and size >= 190 << 20:
            busy.append((int(r["read_bytes"]) + int(r["written_bytes"])) * per_byte / float(r["us"]))
    rings = counted["held in a ring", "forward"], counted["held in a ring", "backward"]
    assert f"{rings[0][0]:.2f} maps forward and {rings[1][0]:.2f} backward in all {sum(map(len, rings))} cases" in notes
    assert {f"{n:.2f}" for n in rings[0]} == {"1.00"} and {f"{n:.2f}" for n in rings[1]} == {"2.00"}

    def read_of(size: str, direction: str) -> str:
        found = sorted({f"{n:.2f}" for n in counted[size, direction]})
        return "–".join(dict.fromkeys((found[0], found[-1])))

    sizes = ("49 MiB", "98 MiB", "196 MiB", "392 MiB")
    assert ", ".join(f"{read_of(n, 'forward')} and {read_of(n, 'backward')} at {n}" for n in sizes) in notes
    # Passes that there must be, over those that there are.
    limits = [
        "–".join(dict.fromkeys(f"{least / n:.2f}" for n in (max(found), min(found))))
        for least, direction in ((2, "forward"), (3, "backward"))
        for found in (moved[size, direction] for size in sizes[1:])
    ]
    told = "there would be {} of the floor at 98 MiB, {} at 196 and {} at 392 forward, {}, {} and {} backward"
    assert told.format(*limits) in notes, limits
    exchange = next(
        float(r["exchange_us"])
        for r in read("phases-of-rounds-H200-torch2.11.0-triton3.6.0.csv")
        if (r["direction"], r["rounds"]) == ("backward", "1")
    )
    spare = 98 * 2**20 * per_byte * (3 / 0.7 - max(moved["98 MiB", "backward"]))
    assert f"backward at 98 leaves {spare:.0f} µs for all else, where the exchange takes {exchange:.1f}" in notes, spare
    # Tiles of 8 KB in all programs, of which there are two on a processor: 13 in shared memory, six in registers.
    tile = 2 * H200[0] * 8192 / 1e6
    served = [
        (most - n) * int(size.split()[0]) * 1.048576 - 19 * tile
        for most, direction in ((2, "forward"), (4, "backward"))
        for size in sizes[1:]
        for n in counted[size, direction]
    ]
    told = f"Shared memory keeps {13 * tile:.0f} MB of it, registers {6 * tile:.0f}, "
    assert told + f"L2 some {min(served):.0f} to {max(served):.0f} more" in notes, served
    assert f"Expected: {tile:.1f} MB more for each" in notes
    assert f"busy {100 * min(busy):.0f} to {100 * max(busy):.0f} % of the time" in notes
    swept, held = active.values()
    assert f"Warps are {min(swept):.0f} (sweeps) and {min(held):.0f}–{max(held):.0f} % (rings)" in notes
    assert f"{min(issued):.0f} to {max(issued):.0f} % of all cycles" in notes
    for r in read("phases-H200-torch2.11.0-triton3.6.0.csv"):
        if [r[k] for k in ("kernels", "dtype", "layout", "direction")] == [
            "now",
            "bfloat16",
            "channels_last",
            "forward",
        ]:
            if r["cache"] == "warm":
                assert f"with a warm cache takes {r['span_ns']} ns" in notes
                continue
            assert f"which was clocked to take {int(r['exchange']) / 1900:.1f} µs" in notes
            steps = "ask first_loads way_there fold exchange way_back finish".split()
            told = "{} cycles to ask for the first tiles and samples, {} until these are there, {} for the sums, "
            told += (
                "{} to add them up over threads, {} to exchange them, {} for the\ntransform and {} to count programs"
            )
            assert told.format(*(r[k] for k in steps)) in notes and f"of the {r['span_ns']} ns\nfrom" in notes


def test_what_is_said_of_latency_rounds_and_slots_was_measured():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()

    def small(case: tuple[str, ...]) -> bool:
        return mib_of(case) <= 16

    def small_inner(case: tuple[str, ...]) -> bool:
        return small(case) and is_inner(case)

    def outer_back(case: tuple[str, ...]) -> bool:
        return not is_inner(case) and case[3] == "backward"

    latency = by_plan("latency")

    def ratios(
        study: str, one: str, other: str, keep: Callable[[tuple[str, ...]], bool] = lambda case: True
    ) -> list[float]:
        """Time of one plan over that of another."""
        return [by[one] / by[other] for case, by in latency[study].items() if keep(case)]

    was, counted, held = "as it was", "counted without waiting", "and nothing copied where all is held"
    gathered, three, larger = "and gathered by channel", "and 3 ahead", "and tiles of 16 KB, 2 ahead"
    for told in (
        f"Came: {span(ratios('one', '8 warps', was, lambda case: small(case) and is_swept(case)))} of the time up to\n  16 MiB",
        f"({span(ratios('two', counted, was, small_inner))} up to 16 MiB with channels innermost)",
        f"copies none as zeros ({span(ratios('two', held, counted))})",
        f"({span(ratios('three', gathered, held, lambda case: not is_inner(case)))} with channels outermost;",
        f"three tiles ahead ({span(ratios('four', three, gathered))}, in the mean "
        f"{statistics.geometric_mean(ratios('four', three, gathered)):.2f}; "
        f"two: {span(ratios('four', 'and 2 ahead', gathered))}; "
        f"six: {span(ratios('three', 'and 6 ahead', gathered))})",
        f"two ahead ({span(ratios('four', larger, three, outer_back))} of that)",
        f"In all, {span(ratios('four', three, was, small))} of the time up to 16 MiB",
        f"behind the way there ({span(ratios('two', 'and one wait less', held))})",
        f"in a loop ({span(ratios('two', 'and first copies in a loop', held))})",
        f"behind the first tile ({span(ratios('three', 'and tiles asked for before samples', gathered))})",
        f"({span(ratios('two', 'and 3 programs, tiles of 4 KB', held))} and "
        f"{span(ratios('two', 'and 4 programs, tiles of 4 KB', held))})",
    ):
        assert told in notes, told
    counts = read("instructions-sm90-triton3.6.0.csv")
    first = [int(r["compared_with_all_channels"]) for r in counts]
    assert f"had {min(first)} to {max(first)} instructions" in notes
    forward, backward = (f"{r['gathered_by_channel']} for {r['compared_with_all_channels']}" for r in counts[:2])
    assert forward.replace(" for", " instructions for") in notes and backward in notes
    best: dict[tuple[str, ...], float] = {}
    settings = set()
    for cases in by_plan("rounds").values():
        for case, by in cases.items():
            for plan, us in by.items():
                if plan.startswith("rounds"):
                    settings.add(plan)
                    best[case] = min(us / by["sweeps"], best.get(case, math.inf))
    told = f"the best of {len(settings)} settings takes {span(list(best.values()))} of the time of sweeps, in {len(best)} cases, "
    assert told + f"of which {sum(ratio < 1 for ratio in best.values())} gain" in notes
    slots = by_plan("slots")
    late, between = (
        [by[plan] / by[was] for by in slots["two"].values()] for plan in ("late", "between load and store")
    )
    assert f"Came: {span(late)} and {span(between)} of the time with the same slack" in notes
    for case, words in (
        (("128x1024x14x14", "float32", "NCHW", "backward"), "backward in float32"),
        (("128x256x56x56", "float32", "NCHW residual", "backward"), "backward with a residual"),
    ):
        by = slots["two"][case]
        assert f"{words}: {by['late']} for {by[was]}" in notes
    copies: dict[tuple[str, str], dict[int, float]] = {}
    for r in read("stripcopy-H200-torch2.11.0-triton3.6.0.csv"):
        if r["direction"] == "copy":
            of_rows = copies.setdefault((r["rows"], r["row_bytes"]), {})
            wide, speed = int(r["strip_bytes"]), float(r["terabytes_per_second"])
            of_rows[wide] = max(speed, of_rows.get(wide, 0))
    strips = [
        span([by[wide] / by[int(row)] for (_, row), by in copies.items() if wide in by and wide < int(row)])
        for wide in (256, 128, 64)
    ]
    assert "reach {} of a whole row's bandwidth, of 128 bytes {}, of 64 bytes {}.".format(*strips) in notes
    # 32 rounds of two groups, each with a strip of 128 bytes, which are read and written.
    round_us = by_plan("rounds")["one"]["12x4096x97x97", "bfloat16", "channels_last", "forward"][
        "rounds, 4 warps, tiles of 4 KB"
    ]
    needed = 2 * 2 * 128 * 112908 / copies["112908", "8192"][128] / 1e6
    assert f"takes {round_us / 32:.0f} µs where its bytes need {needed:.0f} at the speed of such strips" in notes
    shares = read("waitshares-H200-torch2.11.0-triton3.6.0.csv")

    def percent(column: str, rows: list[dict[str, str]]) -> str:
        found = [round(100 * float(r[column])) for r in rows]
        return f"{min(found)} to {max(found)}"

    one_ahead = [r for r in shares if float(r["copies_median"]) > 0.2]
    for told in (
        f"{len(shares)} cases",
        f"a median of {percent('sums_median', shares)} % for sums",
        f"waits least has {percent('sums_of_luckiest_processor', shares)} %",
        f"waits most {percent('sums_of_unluckiest_processor', shares)}.",
        f"{percent('copies_median', one_ahead)} % more are waited for copies",
    ):
        assert told in notes, told


def test_what_is_said_of_both_tiles_first_was_measured():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    order = by_plan("order")

    def ratios(
        study: str, one: str, other: str, keep: Callable[[tuple[str, ...]], bool] = lambda case: True
    ) -> list[float]:
        """Time of one plan over that of another, where both were measured."""
        return [by[one] / by[other] for case, by in order[study].items() if {one, other} <= by.keys() and keep(case)]

    was, held, both = "as it was", "all held", "all held, samples in equal steps"
    slack = [ratios("rings", f"both tiles first, slack {n}", was) for n in (3, 4, 2)]
    small = ratios("sweeps", held, was, lambda case: mib_of(case) <= 8)
    for told in (
        f"{span(slack[0])} of the time with a slack of three, in the mean {statistics.geometric_mean(slack[0]):.2f}; "
        f"four {span(slack[1])}, two {span(slack[2])}",
        f"Came: {span(small)} of the time up to 8 MiB, in the mean {statistics.geometric_mean(small):.2f}.",
        f"samples in equal steps ({span(ratios('sweeps', both, held))} of that)",
        f"tiles of 4 KB ({span(ratios('sweeps', 'the same, tiles of 4 KB, 4 ahead', both))})",
        f"two tiles ahead ({span(ratios('sweeps', 'the same, 2 ahead', both))})",
    ):
        assert told in notes, told
    # Plans that were tried, over what was there in the same run; and among them those that the rule takes.
    tried: dict[tuple[str, ...], dict[tuple[int, ...], float]] = {}
    runs: dict[tuple[str, ...], dict[str, float]] = {}
    rows = read("plans-of-rings-H200-torch2.11.0-triton3.6.0.csv")
    for r in rows:
        if r["bytes"] == was:
            runs.setdefault(tuple(r[k] for k in ("shape", "dtype", "residual", "direction")), {})[r["run"]] = float(
                r["median_us"]
            )
    for r in rows:
        if r["bytes"] != was:
            case = tuple(r[k] for k in ("shape", "dtype", "residual", "direction"))
            plan = tuple(int(r[k]) for k in ("bytes", "T", "slack", "ahead", "S", "G"))
            # The second run had the likelier ones again.
            tried.setdefault(case, {})[plan] = float(r["median_us"]) / runs[case][r["run"]]
    gained = [min(by.values()) for by in tried.values()]
    assert f"{sum(map(len, tried.values()))} plans in {len(tried)} cases" in notes
    assert (
        f"Came: the best take {span(gained)} of the time, in the mean {statistics.geometric_mean(gained):.2f}" in notes
    )
    large = tried["16x128x336x336", "float32", "False", "backward"]
    told = [f"{large[4096, 9, slack, ahead, 396, 1]:.2f}" for slack, ahead in ((4, 5), (5, 4), (6, 3))]
    assert "takes {}, {} and {} of the time of before".format(*told) in notes
    plot = script("plot")
    results = ROOT / "benchmarks" / "results"
    now, before = (
        plot.read(results / f"{name}-H200-torch2.11.0-triton3.6.0.csv") for name in ("residual", "residual-before")
    )
    ways = [
        span([before[case]["ours"] / by["ours"] for case, by in now.items() if case[3] == way and is_swept(case)])
        for way in ("forward", "backward")
    ]
    assert "they took {} times as long forward and {} backward in a run before".format(*ways) in notes


def test_what_is_said_of_tiles_in_turn_was_measured():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    mean = statistics.geometric_mean
    parts: dict[tuple[str, ...], dict[str, float]] = {}
    for r in read("ringparts-H200-torch2.11.0-triton3.6.0.csv"):
        parts.setdefault((r["shape"], r["dtype"], r["direction"]), {})[r["variant"]] = float(r["median_us"])

    def part(one: str, other: str, keep: Callable[[str], bool] = lambda shape: True) -> list[float]:
        return [by[one] / by[other] for case, by in parts.items() if keep(case[0])]

    large = lambda shape: shape.endswith(("x336", "x112"))
    turns, rest = (part("interleaved", "own", keep) for keep in (large, lambda shape: not large(shape)))
    of_ring = ("bytes", "T", "slack", "ahead", "S", "G")
    Plan = tuple[str, ...]
    studies: dict[Plan, dict[Plan, dict[Plan, float]]] = {}
    for r in read("ringplans-H200-torch2.11.0-triton3.6.0.csv"):
        case = tuple(r[k] for k in ("run", "shape", "dtype", "residual", "direction"))
        plan = tuple(r[k] for k in ("programs", "warps", *of_ring))
        studies.setdefault(case, {}).setdefault(plan, {})[r["early"], r["relay"], r["few"]] = float(r["median_us"])
    relays, early, late, few, kinds, own = [], [], [], [], {}, []
    for case, by in studies.items():
        for plan, how in by.items():
            slack = int(plan[4]) * int(plan[2]) / 8192
            for (asked, relay, alone), us in how.items():
                if relay != "0" and (asked, "0", alone) in how:
                    relays.append(us / how[asked, "0", alone])
                if (asked, relay) == ("1", "0") and ("0", "0", alone) in how:
                    (early if slack >= 4 else late).append(us / how["0", "0", alone])
                if alone == "0":
                    few.append(us / how[asked, relay, "32"])
        if case[0] == "2":
            alike = {plan: how["0", "0", "32"] for plan, how in by.items()}
            for plan, us in alike.items():
                kind = kinds.setdefault(plan[:3], {})
                kind[case] = min(us / min(alike.values()), kind.get(case, math.inf))
        if case[0] != "1" and (case[0] == "3" or ("3", *case[1:]) not in studies) and case[3] == "False":
            # Of the last run, as the package plans now: with all words read once.
            ring = own_ring((case[1], case[2], "NCHW", case[4]))
            size = ring.lines * ring.V * (4 if case[2] == "float32" else 2) * (1 if case[4] == "forward" else 2)
            chosen = tuple(map(str, (size, ring.T, ring.lag - ring.T, ring.ahead, ring.S, ring.G)))
            # A rule that chooses others wants them measured.
            found = next(how for plan, how in by.items() if plan[1] == "4" and plan[2:] == chosen)
            us = min(us for (asked, _, _), us in found.items() if asked == str(ring.early))
            own.append(us / min(us for how in by.values() for us in how.values()))
    counts = "{}, {} and {}".format(*(sum(case[0] == run for case in studies) for run in "123"))
    of = lambda *kind: f"{mean(kinds[kind].values()):.2f}"
    for told in (
        f"Not to wait for sums that are not there takes {span(part('no waiting', 'own'))} of the time",
        f"not to read or write them at all {span(part('no words', 'own'))}",
        f"nor to add up {span(part('no sums', 'own'))}",
        f"Came: {span(turns)} of the time at 112² and 336², in the mean {mean(turns):.2f}, {span(rest)} elsewhere",
        f"{counts} cases in three runs, {sum(len(how) for by in studies.values() for how in by.values())} plans",
        f"Came: {span(relays)} of the time, worse",
        f"takes {span(early)} of the time where that slack is four large tiles or more, and {span(late)} else",
        f"for itself: {span(few)} without it, nothing",
        f"three programs with large tiles take {of('3', '4', '8192')} of the best one's time in the mean, with small ones "
        f"{of('3', '4', '4096')}; two {of('2', '4', '8192')} and "
        f"{of('2', '4', '4096')}, with tiles of 16 KB {of('2', '4', '16384')}, "
        f"of eight warps {of('2', '8', '8192')}; one of eight warps, in tiles of 16 KB, {of('1', '8', '16384')}",
        f"what it chooses takes {span(own)} of the best one's time, in the mean {mean(own):.2f}",
    ):
        assert told in notes, told


def test_what_is_said_of_tiles_in_registers_was_measured():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    studies = by_plan("registers")

    def ratios(study: str, one: str, other: str, least: float = 0, most: float = math.inf) -> list[float]:
        """Time of one plan over that of another, where both were measured, on maps of some size in MiB."""
        return [
            by[one] / by[other]
            for case, by in studies[study].items()
            if {one, other} <= by.keys() and least <= mib_of(case) < most
        ]

    def mean(found: list[float]) -> str:
        return f"{statistics.geometric_mean(found):.2f}"

    kept = [f"{n} tiles" for n in (4, 6, 8)]
    sizes = ((48, 97), (97, 190), (190, 400), (400, math.inf))
    means = [[mean(ratios("registers", plan, "none", *size)) for plan in kept] for size in sizes]
    told = "Came, with four, six and eight: {}, {} and {} of the time in the mean at 49 MiB, {}, {} and {} at 98 MiB, "
    told += "{} each at 196 and 392, {} beyond."
    assert all(len(set(found)) == 1 for found in means[2:]), means
    assert told.format(*means[0], *means[1], means[2][0], means[3][0]) in notes, means
    assert (
        f"Eight take {span(ratios('registers', kept[2], 'none'))}; six take {span(ratios('registers', kept[1], 'none'))},"
        in notes
    )
    # The first that is built and spills little.
    spills = read("spills-sm90-triton3.6.0.csv")
    chosen = {
        (r["activation"], r["direction"]): int(r["tiles"]) for r in reversed(spills) if int(r["spilled_bytes"]) <= 32
    }
    told = "built again with two tiles fewer, so that of {} kernels {} keep six, {} four and {} two."
    assert told.format(len(chosen), *(list(chosen.values()).count(n) for n in (6, 4, 2))) in notes, chosen
    plans = pytest.importorskip("inplace_abn.kernels").plans
    assert {name for name, _ in chosen} == set(ACTIVATIONS) and plans.SWEEP_SPILLS * 4 == 32
    more = [
        mean(ratios("stores and copies ahead", plan, "6 tiles"))
        for plan in ("7 tiles", "6 tiles, 4 ahead", "6 tiles, 2 ahead", "6 tiles, written first to leave L2")
    ]
    told = (
        "seven take {} in the mean, four copies ahead {}, two {}; what is written marked as the first to leave L2 {},"
    )
    assert told.format(*more) in notes, more
    before = "{} tiles of the next before an exchange"
    best, early = {}, {2: [], 4: []}
    for case, by in studies["rounds"].items():
        best[case] = min(us for plan, us in by.items() if plan.endswith("rounds")) / by["6 tiles"]
        for n, found in early.items():
            tried = [us for plan, us in by.items() if plan.endswith(before.format(n))]
            if tried:
                found.append(min(tried) / by["6 tiles"])
    gains = [ratio for ratio in best.values() if ratio < 1]
    told = f"takes {span(list(best.values()))} of the time of one, {len(gains)} of {len(best)} cases gain, "
    assert told + f"by {100 * (1 - statistics.geometric_mean(gains)):.0f} % in the mean of those" in notes
    for case, words in (
        (("12x4096x97x97", "float32", "channels_last", "forward"), "12×4096×97² forward"),
        (("128x1024x14x14", "float32", "channels_last", "backward"), "128×1024×14² backward"),
    ):
        by = studies["rounds"][case]
        assert f"{words} {min(by.values())} for {by['6 tiles']}" in notes
    assert f"takes room from those held: {span(early[2])} and {span(early[4])}." in notes, (
        span(early[2]),
        span(early[4]),
    )
    assert f"{sum(ratio < 0.96 for ratio in gains)} of these {len(gains)} gain more than 4 %" in notes
    floor = next(
        float(r["median_us"])
        for r in read("layer-H200-torch2.11.0-triton3.6.0.csv")
        if [r[k] for k in ("shape", "dtype", "layout", "direction", "impl")]
        == ["128x512x28x28", "float32", "channels_last", "forward", "floor"]
    )
    one = next(
        r
        for r in read("phases-of-rounds-H200-torch2.11.0-triton3.6.0.csv")
        if [r[k] for k in ("direction", "rounds", "next_before_exchange", "round")] == ["forward", "4", "0", "2"]
    )
    there = float(one["held_there_us"]) + float(one["others_there_us"])
    assert f"takes {float(one['whole_us']):.1f} µs where its bytes need {floor / 4:.1f}" in notes, floor / 4
    assert (
        f": {float(one['exchange_us']):.1f} for the exchange" in notes and f"and {there:.1f} for the way there" in notes
    )
    small = [
        span(ratios("widths", plan, "64 bytes", 0, 16.01))
        for plan in ("32 bytes", "16 bytes", "128 bytes", "32 bytes, tiles of 4 KB")
    ]
    told = "{} of the time, 16 bytes {}, 128 bytes {}, 32 bytes in tiles of 4 KB {}."
    assert told.format(*small) in notes, small


def over_own(
    study: dict[tuple[str, ...], dict[str, float]],
    which: Callable[[str], bool],
    keep: Callable[[tuple[str, ...]], bool],
    own: tuple[str, ...] = ("as it is", "as it is, again"),
) -> list[float]:
    """Times of some plans over the mean of those that are the package's own, case by case."""
    return [
        us / statistics.mean(by[name] for name in own)
        for case, by in study.items()
        for plan, us in by.items()
        if plan not in own and which(plan) and keep(case)
    ]


def test_what_is_said_of_hints_was_measured():
    notes, hinted = (ROOT / "benchmarks" / "NOTES.md").read_text(), by_plan("hints")
    narrow = hinted["widths of float32"]
    wide = [
        span(over_own(narrow, f"{n} bytes".__eq__, lambda case, d=d: case[3] == d, ("64 bytes",)))
        for n in (128, 256)
        for d in ("forward", "backward")
    ]
    assert "128 bytes for 64 take {} forward and {} backward, 256 bytes {} and {}. Nothing.".format(*wide) in notes

    def both_ways(which: Callable[[str], bool]) -> list[str]:
        return [span(over_own(hinted["hints"], which, lambda case, d=d: case[3] == d)) for d in ("forward", "backward")]

    copies = "{} tiles to stay, told with their copies".format
    more = [copies(n) for n in (16, 20, 26)]
    few, many = both_ways(copies(12).__eq__), both_ways(lambda plan: plan in more)
    before, sums = (
        both_ways(f"16 tiles to stay, told {when}".__eq__)
        for when in ("four tiles before their copies", "with their sums")
    )
    let_go = both_ways(lambda plan: "let go after use" in plan)
    for told in (
        f"12 tiles ({12 * 2 * H200[0] * 8192 / 1e6:.0f} MB) told with their copies take {few[0]} of the time "
        f"forward and {few[1]} backward; 16, 20 and 26 tiles {many[0]} forward, {many[1]} backward; told",
        f"four tiles before {before[0]} and {before[1]}, with their sums {sums[0]} and {sums[1]}; let go again by "
        f"`applypriority` after use, whatever else, {let_go[0]} and {let_go[1]}.",
    ):
        assert told in notes, told
    bytes_read: dict[tuple[str, str], dict[str, int]] = {}
    for r in read("hints-counters-H200-torch2.11.0-triton3.6.0.csv"):
        bytes_read.setdefault((r["shape"], r["direction"]), {})[r["plan"]] = int(r["read_bytes"])
    assert len(bytes_read) == 6
    assert all(abs(n / by["as it is"] - 1) < 0.03 for by in bytes_read.values() for n in by.values())
    maps = [bytes_read["64x64x112x112", "backward"][plan] / (2 * 64 * 64 * 112**2) for plan in ("as it is", more[0])]
    assert f"backward: {maps[0]:.2f} maps, and {maps[1]:.2f} with 16 tiles told" in notes


def test_what_is_said_of_words_was_measured():
    notes, spoken = (ROOT / "benchmarks" / "NOTES.md").read_text(), by_plan("words")
    one, two = spoken["words, first run"], spoken["words, second run"]
    is_ring = lambda case: not is_swept(case)
    least = lambda case: is_ring(case) and own_ring(case).S <= 32
    most = lambda case: is_ring(case) and own_ring(case).S > 32
    alone = "a thread waits for its words"
    rings, fewer, others, swept = (over_own(two, alone.__eq__, keep) for keep in (is_ring, least, most, is_swept))
    turned, spread = "both sums turned round at once", "γ and β spread over tiles before the exchange"
    together = f"{turned}, γ and β spread before, mean and invstd spread at once"
    without = span(over_own(one, "no exchange".__eq__, is_swept))
    neither = span(over_own(one, "neither exchange nor samples".__eq__, is_swept))
    for told in (
        f"Came, in rings: {span(rings)} of the time; {span(fewer)} up to",
        f"32 members of a channel, {statistics.mean(fewer):.2f} in the mean, and {span(others)} with more, "
        f"{statistics.mean(others):.2f} in the mean; so it is done up to 32 ",
        f"each with a wait of its own, {span(over_own(one, 'a thread waits for one word after another'.__eq__, is_ring))}.",
        f"half as many sectors are read: {span(over_own(one, 'words of a sum side by side'.__eq__, is_ring))}.",
        f"waiting alone takes {span(swept)}; both sums turned round and added up at once "
        f"{span(over_own(two, turned.__eq__, is_swept))};",
        f"tile before the exchange {span(over_own(two, spread.__eq__, is_swept))}; these together "
        f"{span(over_own(two, f'{alone}, {together}'.__eq__, is_swept))}.",
        f"the exchange {without}, samples as well {neither}.",
    ):
        assert told in notes, told
    (small,) = over_own(one, "no exchange".__eq__, ("32x2048x7x7", "bfloat16", "channels_last", "forward").__eq__)
    assert f"took {small:.2f} of its time there in bfloat16" in notes
    table = script("plot").read(ROOT / "benchmarks" / "results" / "layer-H200-torch2.11.0-triton3.6.0.csv")
    by = table["32x2048x7x7", "bfloat16", "channels_last", "forward"]
    # What is too much, of what the exchange takes.
    assert round(4 * (1 - 1.5 * (by["empty"] + by["floor"]) / by["ours"]) / (1 - small)) == 2
    assert "half of what the exchange takes would have to go for the aim" in notes


def test_what_is_said_of_clusters_was_measured():
    notes, tried = (ROOT / "benchmarks" / "NOTES.md").read_text(), by_plan("clusters")

    def over(study: str, direction: str, which: str, own: str = "words") -> str:
        return span(
            [
                us / by[own]
                for case, by in tried[study].items()
                for plan, us in by.items()
                if case[3] == direction and plan.startswith(which) and own in by
            ]
        )

    both = ("forward", "backward")
    all_of, fewer, half = "all members", "fewer members", "half the programs"
    pairs = [over(all_of, d, "clusters of 2") for d in both]
    two = [over(fewer, d, f"{how} of 2", "words of 4") for d in both for how in ("clusters", "words")]
    one = tried[half]["32x2048x7x7", "float32", "channels_last", "forward"]
    for told in (
        "{} of the time forward and {} backward. The card".format(*(over(all_of, d, "clusters") for d in both)),
        f"and these take {pairs[0][:4]} and {pairs[1][:4]}.",
        f"take {two[0][:4]} of the time of words among four forward, {two[2][:4]} backward "
        f"(words among two {two[1][:4]} and {two[3][:4]})",
        "four or eight warps, {} forward and {} backward.".format(*(over(half, d, "clusters") for d in both)),
        f"not cooperative takes {over(half, 'forward', 'words, not')} of the time",
        f"in float32 {one['one member, 6 ahead']:.2f} µs for {one['words, again']:.2f};",
    ):
        assert told in notes, told


def test_what_is_said_of_what_lies_between_the_ways_was_measured():
    notes, tried = (ROOT / "benchmarks" / "NOTES.md").read_text(), by_plan("between")
    small = lambda case: PLOT.mib_of(case) <= 16
    innermost = lambda direction: lambda case: is_inner(case) and case[3] == direction
    forward, backward, large_forward, large_backward = (
        lambda case, keep=innermost(direction), size=size: keep(case) and small(case) == size
        for size in (True, False)
        for direction in ("forward", "backward")
    )
    outermost, large = (
        (lambda case: not is_inner(case) and small(case)),
        (lambda case: is_inner(case) and not small(case)),
    )

    def over(study: str, one: str, other: str, keep: Callable[[tuple[str, ...]], bool] = lambda case: True) -> str:
        return span(
            [by[one] / by[other] for case, by in tried[study].items() if one in by and other in by and keep(case)]
        )

    at_once, apart, quick = "turned at once", "last tile apart", "as it was, quick"
    two, one, alone = "two programs", "one program", f"{at_once}, words waited for alone"
    plans = pytest.importorskip("inplace_abn.kernels").plans

    def swept(case: tuple[str, ...], *how: int) -> Any:
        """The package's own plan with channels innermost, or one of so many programs on a processor, of so many warps."""
        (n, c, h, w), maps = map(int, case[0].split("x")), 1 if case[3] == "forward" else 2
        place = plans.Layout(True, n * h * w, c, 1, c, 1)
        plan = plans._sweep if how else plans.sweep_of
        return plan(place, 4 if case[1] == "float32" else 2, maps, maps, plans.Card(*H200), *how)

    taken = lambda keep: lambda case: keep(case) and swept(case).warps == 8
    left = lambda case: is_inner(case) and small(case) and not taken(is_inner)(case)
    assert all(swept(case, 1, 8).S == 2 for case in tried["members"] if left(case))
    strips = [
        min(us for plan, us in by.items() if plan.startswith("strips")) / by["as it was"]
        for case, by in tried["registers"].items()
        if case[3] == "forward" and any(plan.startswith("strips") for plan in by)
    ]
    again = [
        min(us for plan, us in by.items() if plan.startswith("in registers")) / by[at_once]
        for by in tried["turns"].values()
        if any(plan.startswith("in registers") for plan in by)
    ]
    passes = tried["passes"]["32x2048x7x7", "bfloat16", "channels_last", "forward"]
    whole, strip = ([us for plan, us in passes.items() if plan.startswith(how)] for how in ("in place", "strips"))
    rings = tried["rings, two runs"]["32x256x56x56", "float32", "NCHW", "forward"]
    table = PLOT.read(ROOT / "benchmarks" / "results" / "layer-H200-torch2.11.0-triton3.6.0.csv")
    over_aim = [
        by["ours"] - PLOT.AIM_OF_SMALL * (by["empty"] + by["floor"])
        for case, by in table.items()
        if "empty" in by and innermost("forward")(case)
    ]
    for told in (
        "{} of the time of before on maps up to 16 MiB forward, {} backward, {} with channels outermost".format(
            *(
                over("steps", f"{apart}, samples in equal steps", "as it was", keep)
                for keep in (forward, backward, outermost)
            )
        ),
        f"turned at once {over('turns', at_once, 'as it was', forward)}, waiting alone {over('turns', alone, at_once, forward)}",
        f"samples in equal steps {over('turns', f'{at_once}, samples in equal steps', at_once, forward)}",
        f"Larger maps take {over('turns', at_once, 'as it was', large)}",
        f"forward {over('conversions', 'quick', 'slow', forward)}, but "
        f"{over('conversions', quick, 'as it was', large_forward)} on large",
        f"backward {over('conversions', 'quick', 'slow', backward)}, and {over('conversions', 'quick', 'slow', large_backward)}",
        f"the first copies {over('turns', f'{at_once}, samples behind the first copies', at_once, forward)}",
        f"instead of samples {over('own mean', 'mean of the first tile', 'samples', forward)}",
        f"added up apart {over('steps', apart, 'last tile with the others', forward)}",
        f"than there are {over('room', 'room needed', 'room all')}",
        f"as two numbers {over('grid', 'two numbers', 'one number', lambda case: is_inner(case) and small(case))}",
        f"forward {over('members', one, two, taken(forward))} of the time, backward {over('members', one, two, taken(backward))}",
        f"leaves two members {over('members', one, two, left)}",
        f"a sum forward {over('members, with a sum', one, two, forward)}",
        f"the best of its plans takes {span(strips)} of the time forward",
        f"what lies between turned at once, too, {span(again)} of that",
        f"in place takes {min(whole):.1f}–{max(whole):.1f} µs, and one that loads a strip of 32 bytes whole before it stores "
        f"any {min(strip):.1f}–{max(strip):.1f}, empty launches {passes['empty']:.1f}.",
        f"took {rings['samples in equal steps']:.1f} µs for {rings['as it is']:.1f})",
        f"is {min(over_aim):.2f} to {max(over_aim):.2f} µs from its aim",
    ):
        assert told in notes, told


def test_blocks_and_networks_are_the_committed_measurement(tmp_path):
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    plot = script("plot")
    blocks = plot.read_blocks(ROOT / "benchmarks" / "results" / "block-H200-torch2.11.0-triton3.6.0.csv")
    assert plot.block_table(blocks) in notes
    time = {name: [sum(by[name][:2]) for by in blocks.values()] for name in next(iter(blocks.values()))}
    for name in ("checkpoint", "checkpoint_xhat", "inplace_1", "inplace_2"):
        ratios = [mine / standard for mine, standard in zip(time[name], time["standard"], strict=True)]
        assert f"{name} {min(ratios):.2f}–{max(ratios):.2f}" in notes
    # What is said of them: in place is faster than standard and than checkpointing, on every block.
    for i in range(len(blocks)):
        assert time["inplace_1"][i] < min(time["standard"][i], time["checkpoint"][i])
        assert time["inplace_2"][i] < min(time["standard"][i], time["checkpoint_xhat"][i])
    plot.draw_blocks(blocks, tmp_path / "block.svg")
    assert "CONV4" in (tmp_path / "block.svg").read_text()
    for r in read("profile-H200-torch2.11.0-triton3.6.0.csv"):
        assert r["device_ms"] in notes and r["wall_ms"] in notes
    kernels = {r["kernel"]: r for r in read("kernels-H200-torch2.11.0-triton3.6.0.csv")}
    ours = {name: float(r["milliseconds"]) for name, r in kernels.items() if name.endswith("_kernel")}
    backward = sum(ours[name] for name in ("input_grad_kernel", "sums_kernel", "backward_kernel"))
    forward = sum(ours.values()) - backward
    assert f"take {forward + backward:.1f} (backward {backward:.1f}, forward {forward:.1f}" in notes
    assert f"{kernels['all']['milliseconds']} ms of kernels in {kernels['all']['launches']} launches" in notes
    before = {r["candidate"]: r["images_per_second"] for r in read("network-before-H200-torch2.11.0-triton3.6.0.csv")}
    assert f"has {before['in place']} in place and {before['in place, compile']} compiled in place" in notes
    plans = {
        (r["shape"], r["residual"], r["direction"], r["plan"]): r["median_us"]
        for r in read("plans-H200-torch2.11.0-triton3.6.0.csv")
    }
    fewer = "two launches, 4 programs a processor"
    for shape, residual, direction, first, second in (
        ("256x512x28x28", "False", "forward", "two launches", "planned before"),
        ("256x256x28x28", "False", "forward", "two launches", "planned before"),
        ("256x256x14x14", "False", "forward", "planned before", "two launches"),
        ("256x512x7x7", "False", "forward", "planned before", "two launches"),
        ("256x512x28x28", "False", "forward", fewer, "two launches"),
        ("256x1024x14x14", "False", "forward", fewer, "two launches"),
        ("256x512x28x28", "True", "backward", fewer, "two launches"),
    ):
        told = [plans[shape, residual, direction, plan] for plan in (first, second)]
        assert f"{told[0]} for {told[1]}" in notes or f"{told[0]} µs for {told[1]}" in notes
    for r in read("network-H200-torch2.11.0-triton3.6.0.csv"):
        assert f"| {r['images_per_second']} ({r['p10']}–{r['p90']}) | {r['peak_gib']} GiB |" in notes
        if r["candidate"] in ("standard", "compile", "in place", "in place, compile"):
            readme = (ROOT / "README.md").read_text()
            assert r["images_per_second"] in readme and r["peak_gib"] in readme


def test_the_numerics_are_the_committed_measurement():
    text = (ROOT / "docs" / "numerics.md").read_text()
    rows = read("numerics-cpu-torch2.13.0.csv")
    shown = [
        r for r in rows if r["dtype"] == "bfloat16" and r["beta"] in ("0.0", "0.5") and r["sigma_r"] in ("0.0", "1.0")
    ]
    keys = "gamma beta sigma_r estimate xhat dx dgamma dx_kept dgamma_kept dx_plain dgamma_plain decision".split()
    assert len(shown) == 24 and all(f"| {' | '.join(r[k] for k in keys)} |" in text for r in shown)
    for dtype in ("float16", "float32"):
        worst = max(float(r["dgamma"]) for r in rows if r["dtype"] == dtype and r["decision"] == "inverts")
        assert f"{worst:.1e}" in text
    assert f"above {guard.LIMIT}" in text and f"every {guard.EVERY} training" in text


def test_the_variants_are_the_committed_measurement():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    cases: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for r in read("variants-H200-torch2.11.0-triton3.6.0.csv"):
        cases.setdefault((r["shape"], r["dtype"], r["layout"], r["direction"]), {})[r["variant"]] = r
    compared = {case: by for case, by in cases.items() if {"one launch", "two launches"} <= by.keys()}
    assert len(compared) == 28
    for case, by in compared.items():
        columns = ["one launch", "two launches", "one launch, kept in registers"]
        medians = [by[variant]["median_us"] if variant in by else "–" for variant in columns]
        assert f"| {' | '.join([*case, by['one launch']['floor_us'], *medians])} |" in notes
    large = {case: by for case, by in cases.items() if case[2] == "NCHW" and not case[0].endswith(("x7", "x14"))}
    for variant, dtypes in (
        ("one launch", ("bfloat16", "float32")),
        ("one launch, kept in registers", ("bfloat16", "float32")),
        ("one launch, two tiles kept in registers", ("bfloat16",)),
    ):
        measured = [by[variant] for case, by in large.items() if variant in by and case[1] in dtypes]
        ratios = [float(r["floor_us"]) / float(r["median_us"]) for r in measured]
        assert (
            f"Came: {min(ratios):.2f}–{max(ratios):.2f}" in notes
            or f"came to {min(ratios):.2f}–{max(ratios):.2f}" in notes
        )
    for r in read("packed-H200-torch2.11.0-triton3.6.0.csv"):
        if int(r["row_bytes"]) <= 512:
            assert f" {r['forward_us']} + {r['backward_us']} |" in notes, r
    host = notes.split("\nHost time of a layer")[1].split("\nNext: ")[0]
    counted = read("counters-H200-torch2.11.0-triton3.6.0.csv")[1]
    moved = int(counted["read_bytes"]) + int(counted["written_bytes"])
    assert f"{int(counted['read_bytes']) / 1e6:.0f} MB read from memory" in notes and counted["us"] in notes
    assert f"{moved / float(counted['us']) / 1e6:.1f} TB/s" in notes
    for chain, name in (("1", "by itself"), ("20", "per layer of a chain of 20, each")):
        cells = [
            ", ".join(
                f"{float(r['forward_backward_us']):.0f}"
                for r in read("host-H200-torch2.11.0-triton3.6.0.csv")
                if (r["chain"], r["layer"]) == (chain, layer)
            )
            for layer in ("BatchNorm2d + LeakyReLU", "InPlaceABN")
        ]
        assert f"| {name}" in host and f"behind a multiplication | {' | '.join(cells)} |" in host

    def over_eager(file: str, column: str = "forward_backward_us", **chosen: str) -> list[float]:
        runs: dict[str, dict[str, float]] = {}
        for r in read(f"{file}-H200-torch2.11.0-triton3.6.0.csv"):
            if all(r[k] == v for k, v in chosen.items()):
                runs.setdefault(r["run"], {})[r["layer"]] = float(r[column])
        return [by["InPlaceABN"] / by["BatchNorm2d + LeakyReLU"] for by in runs.values()]

    def met(ratios: list[float]) -> int:
        return sum(ratio <= 1.3 for ratio in ratios)

    chain, alone = over_eager("host", chain="20"), over_eager("host", chain="1")
    now, then = (
        [over_eager("host-cores", launches=looks, cores=n) for n in ("16", "2", "1")]
        for looks in ("one look at pointers", "two")
    )
    assert f"{span(now[0])} on sixteen cores, {span(now[1])} on two, {span(now[2])} on one; " in host
    assert f"before, {span(then[0])}, {then[1][0]:.2f} and {then[2][0]:.2f}." in host and len(then[1] + then[2]) == 2
    chain_before, alone_before = over_eager("host-before", chain="20"), over_eager("host-before", chain="1")
    assert len(alone_before) == 20
    for told in (
        f"it is {span(chain)}: met by {met(chain)} of {len(chain)} runs. By itself it is {span(alone)}, "
        f"{statistics.median(alone):.2f} in the median: met by {met(alone)} of {len(alone)}.",
        f"by itself takes {span(over_eager('host', 'forward_us', chain='1'))} times eager's",
        f"have {span(chain_before)} in a chain, {met(chain_before)} of them within the aim, and {span(alone_before)} by itself, "
        f"{met(alone_before)} of them.",
    ):
        assert told in host, told

    def on_cpu(code: str, layer: str) -> list[str]:
        rows = [r for r in read("host-cpu-torch2.13.0.csv") if (r["code"], r["layer"]) == (code, layer)]
        return [f"{statistics.median(float(r[us]) for r in rows):.1f}" for us in ("forward_us", "backward_us")]

    (forward, backward), before = on_cpu("present", "InPlaceABN"), on_cpu("3890269", "InPlaceABN")
    assert f"a layer takes {forward} µs forward and {backward} backward, where it took {' and '.join(before)};" in host
    assert f"eager, with its arithmetic, {' and '.join(on_cpu('present', 'BatchNorm2d + LeakyReLU'))}." in host
    parts = {
        (r["chain"], r["candidate"]): r["forward_backward_us"]
        for r in read("hostparts-H200-torch2.11.0-triton3.6.0.csv")
    }
    for chain, names in (("1", ("the same with a cooperative launch each way", "InPlaceABN")), ("20", ("InPlaceABN",))):
        assert all(parts[chain, name] in notes for name in (*names, "BatchNorm2d + LeakyReLU"))


def test_trials_are_told_as_measured():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text().split("\nTrials, ")[1]
    for r in read("trials-H200-torch2.11.0-triton3.6.0.csv"):
        untold = "optim.lr=0.05", "optim.name=adamw", "optim.lr=0.01"
        if r["held_out"]:
            assert f"{100 * float(r['val']):.1f}" in notes, r
            continue
        colours_enlarged = "data.resize" in r["settings"] and "augment.colour" in r["settings"]
        if not r["settings"].startswith(untold) and not colours_enlarged:
            assert f"{100 * float(r['test'] or r['val']):.1f}" in notes, r


def test_conversion_is_the_committed_measurement():
    text = (ROOT / "docs" / "converting.md").read_text()
    conversion = script("conversion")
    path = ROOT / "benchmarks" / "results" / "conversion-cpu-torch2.13.0.csv"
    assert conversion.table(path) in text
    rows = read(path.name)
    assert {r["net"] for r in rows} == set(conversion.NAMES)
    assert sum(r["net"].startswith("timm:") for r in rows) >= 60
    for r in rows:
        # No norm without a line, and none made worse.
        assert int(r["exact_bytes"]) <= int(r["before_bytes"])
        left = sum(int(part.split("=")[1]) for part in r["left"].split())
        assert int(r["converted"]) + left == int(r["norms"])
    readme = (ROOT / "README.md").read_text()
    share = {r["net"]: f"{int(r['exact_bytes']) / int(r['before_bytes']):.2f}" for r in rows}
    assert f"ResNet-50 then keeps {share['torchvision:resnet50']}" in readme and f"[{len(rows)} networks]" in readme
    assert f"EfficientNet-B0 {share['torchvision:efficientnet_b0']}" in readme
    assert f"MobileNetV2 {share['torchvision:mobilenet_v2']}" in readme
    for r in read("converted-H200-torch2.11.0-triton3.6.0.csv"):
        if r["net"] == "torchvision:resnet50" and r["candidate"] in ("standard", "converted"):
            assert f"{r['peak_gib']} GiB and {r['images_per_second']}" in readme
        speed = f"{r['images_per_second']} ({r['p10']}–{r['p90']})"
        cells = [
            r["net"],
            r["candidate"],
            speed,
            f"{r['peak_gib']} GiB",
            r["forecast_gib"] and f"{r['forecast_gib']} GiB",
        ]
        assert f"| {' | '.join(cells)} |" in text
        if r["forecast_gib"]:
            assert float(r["forecast_gib"]) == pytest.approx(float(r["peak_gib"]), rel=0.1)


def test_the_compatibility_table_names_tests_that_exist():
    tests = {
        name for path in (ROOT / "tests").glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "compatibility.md").read_text()))
    assert named and named <= tests


def test_every_activation_is_described():
    text = (ROOT / "docs" / "which-layer.md").read_text()
    assert all(f"`{activation}`" in text for activation in ACTIVATIONS)


# Network, what is searched, what is fixed; the paper's batch or crop of a standard network per card (None: it does not fit), and
# in place: Tables 1, 3 and 4 divided by four cards.
PAPER = [
    ("resnext101", "batch", 224, 64, 128),
    ("resnext152", "batch", 224, None, 64),
    ("wide_resnet38", "batch", 224, None, 64),
    ("resnext101", "batch", 512, 4, 7),
    ("resnext101", "crop", 4, 512, 672),
    ("resnext101", "batch", 480, 4, 6),
    ("wide_resnet38_a2", "batch", 512, 5, 7),
    ("wide_resnet38_a2", "crop", 5, 512, 640),
    ("wide_resnet38_a2", "batch", 496, 5, 7),
    ("wide_resnet38_a2", "crop", 4, None, 712),
    ("wide_resnet38_a2", "crop", 3, None, 872),
    ("resnext152", "crop", 3, None, 680),
]


def test_what_fits_12_gigabytes_is_the_committed_measurement():
    text = (ROOT / "docs" / "models.md").read_text()
    found = {
        (r["net"], r["vary"], int(r["fixed"]), r["dtype"], r["norm"]): int(r["largest"])
        for r in read("capacity-H200-torch2.11.0-triton3.6.0.csv")
    }
    for net, vary, fixed, standard, in_place in PAPER:
        for dtype in ("float32", "bfloat16"):
            before, after = (found[net, vary, fixed, dtype, norm] for norm in ("standard", "in place"))
            power, square = (2, "²") if vary == "crop" else (1, "")
            more = (after / before) ** power - 1
            assert f"{before}{square} → {after}{square} (+{100 * more:.0f} %)" in text
            assert after >= in_place
            if dtype == "float32":
                # Standard networks have the paper's size, or do not fit; crops and their number gain what the paper gained.
                if standard is None:
                    assert before < in_place
                else:
                    assert before >= standard
                    assert fixed == 224 or more >= (in_place / standard) ** power - 1
    for r in read("steps-H200-torch2.11.0-triton3.6.0.csv"):
        assert f"{r['median_ms']} ms ({r['p10_ms']}–{r['p90_ms']}), {r['peak_gib']} GiB" in text


def test_training_runs_are_the_committed_measurement():
    text = (ROOT / "docs" / "recipes.md").read_text()
    recipes = script("recipes")
    path = ROOT / "benchmarks" / "results" / "recipes-H200-torch2.11.0-triton3.6.0.csv"
    assert all(table in text for table in recipes.tables(path).values())
    rows = read(path.name)
    alone = [r for r in rows if r["study"] == "alone"]
    assert f"trains {alone[0]['images_per_second']} images a second" in text
    assert f"{100 * float(alone[0]['data_wait']):.1f} % goes by waiting" in text
    assert f"busy for {100 * float(alone[1]['gpu_busy']):.0f} % of the time" in text
    peak = {r["variant"]: float(r["peak_gib"]) for r in rows if r["study"] == "camvid-speed"}
    assert f"at {peak['in place'] / peak['standard']:.2f} of its peak" in text
    beside = {
        (r["variant"], r["seed"]): r["images_per_second"]
        for r in rows
        if r["study"] == "camvid" and r["images_per_second"]
    }
    ours, standard = (f"{beside[norm, '0']} and {beside[norm, '1']}" for norm in ("in place", "standard"))
    assert f"{ours} for {standard} images a second" in text
    together = sum(int(speed) for (_, seed), speed in beside.items() if seed == "0")
    assert f"make {together} images a second together" in text
    # What is said of CamVid: as good in place, two points more with larger crops; and all are at the goal of 60.
    scores: dict[tuple[str, ...], list[float]] = {}
    for r in rows:
        if r["score"]:
            scores.setdefault((r["study"], r["variant"], r["dtype"], r["evaluated"]), []).append(float(r["score"]))
    miou = {name: statistics.mean(scores["camvid", name, "bfloat16", "test"]) for name in peak}
    assert miou["in place"] >= miou["standard"] and min(miou.values()) >= 0.60
    assert miou["in place, larger crops"] > miou["standard"] + 0.02
    # And of photographs: means of three seeds lie no further apart than seeds put them.
    norms = [own for (study, _, _, evaluated), own in scores.items() if (study, evaluated) == ("norm", "val")]
    assert len(norms) == 6 and all(len(own) == 3 for own in norms)
    deviation = 100 * statistics.mean(map(statistics.variance, norms)) ** 0.5
    means = [100 * statistics.mean(own) for own in norms]
    assert (
        f"deviate by {deviation:.2f} points" in text and f"lie {deviation * (2 / 3) ** 0.5:.2f} apart by chance" in text
    )
    assert f"any two of these settings do is {max(means) - min(means):.2f}." in text
    # The other activation costs a point or less.
    for study, variant, own, other in (
        ("norm", "standard", "leaky_relu", "relu"),
        ("activation", "relu", "relu", "leaky_relu"),
    ):
        with_own, with_other = (statistics.mean(scores[study, variant, "bfloat16", name]) for name in (own, other))
        assert with_own - with_other <= 0.01
    ours, standard, larger = (f"{100 * miou[name]:.1f}" for name in ("in place", "standard", "in place, larger crops"))
    readme = (ROOT / "README.md").read_text()
    assert f"{ours} % on the test images where standard batch norm has {standard}, at" in readme
    assert (
        f"at {peak['in place'] / peak['standard']:.2f} of its peak" in readme
        and f"at about its peak, {larger}." in readme
    )


def test_class_uniform_sampling_is_the_committed_measurement():
    text = (ROOT / "docs" / "recipes.md").read_text()
    rows = read("sampling-camvid.csv")
    for r in rows:
        figures = [r[k] for k in ("pixels_plain", "pixels_uniform", "crops_plain", "crops_uniform")]
        assert f"| {r['class']} | {' | '.join(figures)} |" in text
    rare = min(rows, key=lambda r: float(r["pixels_plain"]))
    assert float(rare["pixels_uniform"]) > 1.3 * float(rare["pixels_plain"])
    # Draws are of classes: none is left out, and none is drawn for more than four deviations beyond its share.
    drawn = [int(r["draws"]) for r in rows]
    share = sum(drawn) / len(drawn)
    assert sum(drawn) == int(rare["crops"]) and max(abs(d - share) for d in drawn) <= 4 * share**0.5

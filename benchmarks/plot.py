"""Figures and tables out of the CSVs of a GPU.

    python benchmarks/plot.py benchmarks/results/layer-H200-torch2.11.0-triton3.6.0.csv
    python benchmarks/plot.py benchmarks/results/block-H200-torch2.11.0-triton3.6.0.csv

Prints the table of NOTES.md and draws an SVG beside the CSV. Of layers: floor ÷ time of every implementation, where the aims
stand, and a summary (floor ratios, speed over the rivals). Of blocks: time over that of the standard strategy, as the paper's
Figure 4 has it.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from typing import Any

IMPLS = ("floor", "floor2", "eager", "compile", "ours")
Case = tuple[str, ...]
Rows = dict[Case, dict[str, float]]
# What floor ÷ ours is to be on maps of so many MiB and more.
AIMS = ((190, 0.8, "196 MiB and more"), (97, 0.7, "98 MiB"), (48, 0.6, "49 MiB"))
# What floor2 ÷ ours is to be instead, on large maps (in MiB) of which no strip of so many bytes of every row stays in the cache.
AIM_OF_TWO, LARGE, STRIP_BYTES, CACHE_BYTES = 0.9, 97, 32, 36 << 20
# What ours ÷ (an empty launch + the floor) is to be at the most on small maps, and what rivals ÷ ours in bfloat16.
AIM_OF_SMALL = 1.5
AIMS_OF_RIVALS = {"compile": 1.5, "eager": 2.5}


def read(path: Path) -> Rows:
    """Medians by (shape, dtype, layout, direction) and implementation."""
    rows: Rows = {}
    with path.open(newline="") as file:
        for r in csv.DictReader(file):
            rows.setdefault((r["shape"], r["dtype"], r["layout"], r["direction"]), {})[r["impl"]] = float(
                r["median_us"]
            )
    return rows


def table(rows: Rows) -> str:
    lines = [
        "| shape | dtype | layout | direction | floor | floor2 | eager | compile | ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join([*case, *(f'{by[impl]:.1f}' for impl in IMPLS)])} |" for case, by in rows.items()]
    return "\n".join(lines)


def over(rows: Rows, rival: str, dtype: str) -> float:
    """Geometric mean of rival ÷ ours over the rows of a dtype."""
    ratios = [math.log(by[rival] / by["ours"]) for case, by in rows.items() if case[1] == dtype]
    return math.exp(sum(ratios) / len(ratios))


def mib_of(case: Case) -> float:
    """Size of a case's map."""
    return math.prod(map(int, case[0].split("x"))) * (4 if case[1] == "float32" else 2) / 2**20


def is_inner(case: Case) -> bool:
    """Whether channels are innermost."""
    return case[2] == "channels_last"


def widest_strip(case: Case) -> int:
    """Of how many bytes, a power of two, strips of every row of what is read may be to stay in the cache."""
    images, _, *pixels = map(int, case[0].split("x"))
    most = CACHE_BYTES // (images * math.prod(pixels) * (1 if case[3] == "forward" else 2))
    return 1 << most.bit_length() - 1


def is_beyond_cache(case: Case) -> bool:
    """Whether two launches are the measure."""
    return is_inner(case) and mib_of(case) >= LARGE and widest_strip(case) < STRIP_BYTES


def aim_of(case: Case) -> tuple[str, str, float] | None:
    """What is to be how large, and the maps of which that is said; small maps have another measure."""
    if is_beyond_cache(case):
        return "floor2", f"no strip of {STRIP_BYTES} bytes stays in L2", AIM_OF_TWO
    return next((("floor", maps, aim) for least, aim, maps in AIMS if mib_of(case) >= least), None)


def standing(rows: Rows) -> str:
    """A table of the aims: what is reached, and by how many rows."""
    kinds: dict[tuple[str, ...], list[tuple[float, bool]]] = {}
    for case, by in rows.items():
        if (aimed := aim_of(case)) is not None:
            floor, maps, aim = aimed
            ratio = by[floor] / by["ours"]
            kinds.setdefault((f"{floor} ÷ ours", maps, *case[2:], f"≥ {aim}"), []).append((ratio, ratio >= aim))
        elif "empty" in by:
            ratio, kind = by["ours"] / (by["empty"] + by["floor"]), "ours ÷ (empty launch + floor)"
            met = ratio <= AIM_OF_SMALL
            kinds.setdefault((kind, "12 MB and less", *case[2:], f"≤ {AIM_OF_SMALL}"), []).append((ratio, met))
    lines = ["| measure | maps | layout | direction | aim | reached | rows that meet it |", "|---" * 7 + "|"]
    sizes = [maps for *_, maps in AIMS]
    # Largest maps first.
    for kind in sorted(kinds, key=lambda k: (k[0], k[2], sizes.index(k[1]) if k[1] in sizes else 0, k[3])):
        ratios = [ratio for ratio, _ in kinds[kind]]
        met = sum(met for _, met in kinds[kind])
        lines.append(f"| {' | '.join(kind)} | {min(ratios):.2f}–{max(ratios):.2f} | {met} of {len(ratios)} |")
    for rival, aim in AIMS_OF_RIVALS.items():
        mean = f"≥ {aim} | {over(rows, rival, 'bfloat16'):.2f}"
        faster = f"faster in {sum(by['ours'] < by[rival] for by in rows.values())} of {len(rows)}, all dtypes"
        lines.append(f"| {rival} ÷ ours | bfloat16, geometric mean | both | both | {mean} | {faster} |")
    return "\n".join(lines)


def over_floor2(rows: Rows, direction: str) -> str:
    """Range of floor2 ÷ ours over large maps with channels innermost."""
    ratios = [
        by["floor2"] / by["ours"]
        for case, by in rows.items()
        if is_inner(case) and mib_of(case) >= LARGE and case[3] == direction
    ]
    return f"{min(ratios):.2f}–{max(ratios):.2f}"


def summary(rows: Rows) -> str:
    lines = [
        f"{dtype}: {over(rows, 'compile', dtype):.2f} times as fast as torch.compile, {over(rows, 'eager', dtype):.2f} as eager"
        for dtype in dict.fromkeys(case[1] for case in rows)
    ]
    slower = [" ".join(case) for case, by in rows.items() if by["ours"] > min(by["eager"], by["compile"])]
    lines.append(f"slower than the better rival: {'; '.join(slower) or 'nowhere'}")
    lines += [f"{' '.join(case)}: floor / ours = {by['floor'] / by['ours']:.2f}" for case, by in rows.items()]
    return "\n".join(lines)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # Letters as text, not as outlines, and the same file every time.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "layer"})
    import matplotlib.pyplot as plt

    return plt


def draw(rows: Rows, path: Path) -> None:
    plt = _pyplot()
    kinds = list(dict.fromkeys(case[1:] for case in rows))
    high = -(-len(kinds) // 4)
    figure, axes = plt.subplots(high, 4, figsize=(16, 2.6 * high), squeeze=False)
    for axis, kind in zip(axes.flat, kinds, strict=False):
        shapes = [case[0] for case in rows if case[1:] == kind]
        by_shape = [rows[(shape, *kind)] for shape in shapes]
        for impl, colour in (("eager", "0.75"), ("compile", "0.5"), ("ours", "tab:blue")):
            axis.plot([by["floor"] / by[impl] for by in by_shape], "o-", color=colour, label=impl)
        axis.set(title=" ".join(kind), ylim=(0, 1), xticks=range(len(shapes)))
        axis.set_xticklabels(shapes, rotation=60, ha="right", fontsize=6)
        axis.set_ylabel("floor / time")
    axes.flat[0].legend(fontsize=7)
    for axis in list(axes.flat)[len(kinds) :]:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


Blocks = dict[tuple[str, ...], dict[str, tuple[float, float, float]]]


def read_blocks(path: Path) -> Blocks:
    """By (batch, dtype, layout, block) and strategy: microseconds forward, backward, and MiB kept."""
    found: dict[tuple[str, ...], dict[str, dict[str, float]]] = {}
    with path.open(newline="") as file:
        for r in csv.DictReader(file):
            case = (r["batch"], r["dtype"], r["layout"], r["block"])
            by = found.setdefault(case, {}).setdefault(r["strategy"], {})
            by[r["direction"]], by["kept"] = float(r["median_us"]), int(r["kept_bytes"]) / 2**20
    return {
        case: {name: (v["forward"], v["backward"], v["kept"]) for name, v in by.items()} for case, by in found.items()
    }


def block_table(blocks: Blocks) -> str:
    names = list(next(iter(blocks.values())))
    lines = [f"| batch | dtype | layout | block | {' | '.join(names)} |", "|---" * (4 + len(names)) + "|"]
    for case, by in blocks.items():
        cells = [f"{f:.0f} + {b:.0f} µs, {kept:.0f} MiB" for f, b, kept in by.values()]
        lines.append(f"| {' | '.join([*case, *cells])} |")
    return "\n".join(lines)


def draw_blocks(blocks: Blocks, path: Path) -> None:
    plt = _pyplot()
    kinds = list(dict.fromkeys(case[:3] for case in blocks))
    figure, axes = plt.subplots(1, len(kinds), figsize=(4 * len(kinds), 3.2), squeeze=False, sharey=True)
    for axis, kind in zip(axes.flat, kinds, strict=True):
        names = [case[3] for case in blocks if case[:3] == kind]
        strategies = [s for s in next(iter(blocks.values())) if s != "standard"]
        for i, strategy in enumerate(strategies):
            over = [
                100 * (sum(blocks[(*kind, n)][strategy][:2]) / sum(blocks[(*kind, n)]["standard"][:2]) - 1)
                for n in names
            ]
            axis.bar([j + 0.2 * i for j in range(len(names))], over, 0.2, label=strategy)
        axis.axhline(0, color="0.3", linewidth=0.8)
        axis.set(title=" ".join(kind), xticks=[j + 0.3 for j in range(len(names))])
        axis.set_xticklabels(names)
    axes.flat[0].set_ylabel("time over standard, %")
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    if given.results.name.startswith("block"):
        blocks = read_blocks(given.results)
        print(block_table(blocks))
        draw_blocks(blocks, given.results.with_suffix(".svg"))
        return
    rows = read(given.results)
    print(table(rows))
    print(standing(rows))
    print(summary(rows))
    draw(rows, given.results.with_suffix(".svg"))
    print(given.results.with_suffix(".svg"))


if __name__ == "__main__":
    main()

"""Figure and tables out of a layer CSV of a GPU.

    python benchmarks/plot.py benchmarks/results/layer-H200-torch2.11.0-triton3.6.0.csv

Prints the table of NOTES.md and a summary (floor ratios, speed over the rivals), and draws floor ÷ time of every implementation
into an SVG beside the CSV.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

IMPLS = ("floor", "floor2", "eager", "compile", "ours")
Rows = dict[tuple[str, ...], dict[str, float]]


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


def summary(rows: Rows) -> str:
    lines = [
        f"{dtype}: {over(rows, 'compile', dtype):.2f} times as fast as torch.compile, {over(rows, 'eager', dtype):.2f} as eager"
        for dtype in dict.fromkeys(case[1] for case in rows)
    ]
    slower = [" ".join(case) for case, by in rows.items() if by["ours"] > min(by["eager"], by["compile"])]
    lines.append(f"slower than the better rival: {'; '.join(slower) or 'nowhere'}")
    lines += [f"{' '.join(case)}: floor / ours = {by['floor'] / by['ours']:.2f}" for case, by in rows.items()]
    return "\n".join(lines)


def draw(rows: Rows, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    # Letters as text, not as outlines, and the same file every time.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "layer"})
    import matplotlib.pyplot as plt

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    rows = read(given.results)
    print(table(rows))
    print(summary(rows))
    draw(rows, given.results.with_suffix(".svg"))
    print(given.results.with_suffix(".svg"))


if __name__ == "__main__":
    main()

"""What conversion keeps, of every network with batch norm that torchvision has, and of many of timm's; on a CPU, in minutes.

    python benchmarks/conversion.py [--out benchmarks/results]

One row per network: its norms, how many were converted, and the bytes autograd keeps for a batch of 8 at the network's own image
size (224 by 224 where it has none) before and after, counted on the meta device, for exact and for leaky ReLU. Then the reasons
for which norms were left. The table of docs/converting.md is made from it by ``--table``.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import sys
from collections import Counter
from pathlib import Path

import torch

from inplace_abn import convert
from inplace_abn.cli import load

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from zoo import NAMES

COLUMNS = ["net", "size", "norms", "converted", "before_bytes", "exact_bytes", "leaky_bytes", "left"]
# Networks change with the packages that they come from.
PACKAGES = ["torch", "torchvision", "timm"]


def row(name: str) -> list[object]:
    model = load(name)
    size = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))[-1]
    size = 299 if name == "torchvision:inception_v3" else size
    example = torch.empty(8, 3, size, size, device="meta")
    exact = convert(model, example=example, dry_run=True)[1]
    leaky = convert(model, example=example, relu="leaky", dry_run=True)[1]
    left = Counter(line.reason.split(":")[0] for line in exact.lines if line.decision == "left")
    reasons = " ".join(f"{code}={many}" for code, many in sorted(left.items()))
    figures = [len(exact.lines), exact.converted, exact.before, exact.after, leaky.after]
    return [name, size, *figures, reasons, *map(importlib.metadata.version, PACKAGES)]


def table(path: Path) -> str:
    """As the docs show it."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    lines = ["| network | norms | converted | kept, exact | kept, leaky ReLU | left |", "|---|---|---|---|---|---|"]
    for r in rows:
        shares = [f"{int(r[k]) / int(r['before_bytes']):.2f}" for k in ("exact_bytes", "leaky_bytes")]
        left = r["left"].replace("=", " × ").replace(" ", ", ").replace(", ×, ", " × ") or "–"
        lines.append(f"| {r['net']} | {r['norms']} | {r['converted']} | {shares[0]} | {shares[1]} | {left} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--table", action="store_true", help="print the table of the committed file")
    given = parser.parse_args()
    path = given.out / f"conversion-cpu-torch{torch.__version__.split('+')[0]}.csv"
    if given.table:
        print(table(path), end="")
        return
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS + PACKAGES)
        for name in NAMES:
            rows.writerow(row(name))
            file.flush()
            print(name, flush=True)
    print(path)


if __name__ == "__main__":
    main()

"""What class-uniform sampling does to the classes of a data set: their share of the pixels, and of the crops that have them.

    python benchmarks/sampling.py --data FOLDER [--recipe camvid] [--out benchmarks/results]

One epoch of crops drawn plainly, and one drawn uniformly over the classes, by the recipe's own settings. Needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from torch import Tensor

from inplace_abn.recipes import named, pixels
from inplace_abn.recipes.config import override

COLUMNS = ["recipe", "class", "draws", "pixels_plain", "pixels_uniform", "crops_plain", "crops_uniform", "crops"]


def shares(samples: pixels.Pixels) -> tuple[Tensor, Tensor]:
    """Of the pixels that are not void, and of the crops, by class."""
    classes = len(samples.classes)
    counts = []
    for draw in samples.order(0, 0):
        label = samples[draw][1]
        assert isinstance(label, Tensor)
        counts.append(torch.bincount(label.flatten().long(), minlength=256)[:classes])
    each = torch.stack(counts)
    return each.sum(0) / each.sum(), (each > 0).float().mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--recipe", default="camvid")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    config = override(named(given.recipe), [f"data.path={given.data}", "data.cache=false"])
    plain = pixels.segmentation(config, "train")
    uniform = pixels.segmentation(override(config, ["data.uniform=true"]), "train")
    wanted = torch.bincount(torch.tensor([draw.wanted for draw in uniform.order(0, 0)]), minlength=len(plain.classes))
    columns = [shares(samples) for samples in (plain, uniform)]
    with (given.out / f"sampling-{given.recipe}.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for i, name in enumerate(plain.classes):
            figures = [
                f"{100 * float(part[i]):.2f}" for kind in range(2) for part in (columns[0][kind], columns[1][kind])
            ]
            rows.writerow([given.recipe, name, int(wanted[i]), *figures, len(plain)])
            print(name, int(wanted[i]), *figures)


if __name__ == "__main__":
    main()

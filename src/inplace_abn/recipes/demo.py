"""Train one network twice, with standard batch norm and with in-place ABN, and compare: memory, time, scores, pictures.

The recipe ``embedded-segment``, from the same initial weights and on the same batches. What autograd keeps is counted by
:func:`inplace_abn.saved_bytes`, the peak of a step by :func:`inplace_abn.memory.peak_bytes`.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..memory import peak_bytes, saved_bytes
from . import loop, named, storage
from .building import built, preparation
from .config import Config, override
from .evaluation import restored
from .pixels import Pixels
from .segmentation import Segmentation, coloured

__all__ = ["main"]

NORMS = {"standard": "BatchNorm2d + LeakyReLU", "inplace": "InPlaceABN"}


@dataclass
class Trained:
    """One network after its training, and what was measured."""

    name: str
    kept: int
    peak: int
    milliseconds: float
    losses: list[float]
    scores: dict[str, float]
    guess: Tensor


def measured(config: Config, samples: Pixels, device: torch.device) -> tuple[int, int]:
    """Bytes kept, and the peak of forward and backward, of an untrained network on the first batch."""
    task = Segmentation()
    model = built(config, task, len(samples.classes), device)
    draws = samples.order(0, 0)[: config.train.batch]
    images, labels = zip(*(samples[draw][:2] for draw in draws), strict=True)
    x, targets = preparation(config, device)(torch.stack(images)), torch.stack(labels).to(device)
    kept = saved_bytes(model, x).total
    return kept, peak_bytes(lambda: task.loss(config, model(x), targets).backward(), device)


def trained(norm: str, config: Config, device: torch.device, folder: Path) -> Trained:
    """Measure, train, and look at a scene that was not trained on."""
    config = override(config, [f"network.norm={norm}"])
    task = Segmentation()
    kept, peak = measured(config, task.samples(config, "train"), device)
    scores = loop.train(config, task, folder, device=device)
    config, model, _ = restored(folder, lambda config: task, device, lambda config: config)
    val = task.samples(config, "val")
    lines = [line for line in storage.lines(folder) if "lr" in line]
    seconds = [config.train.batch / line["images_per_second"] for line in lines]
    return Trained(
        NORMS[norm],
        kept,
        peak,
        1e3 * statistics.median(seconds),
        [line["loss"] for line in lines],
        scores,
        guess(config, model, val, device),
    )


@torch.no_grad()
def guess(config: Config, model: nn.Module, val: Pixels, device: torch.device) -> Tensor:
    """The prediction for the first scene."""
    image, label = val[val.order(0, 0)[0]][:2]
    assert image is not None and isinstance(label, Tensor)
    logits = model(preparation(config, device)(image[None]))
    return nn.functional.interpolate(logits, label.shape, mode="bilinear").argmax(1)[0].cpu()


def figure(runs: Sequence[Trained], val: Pixels, path: Path) -> None:
    """Bars of memory, curves of loss; and one scene, its labels, and what both networks make of it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    image, label = val[val.order(0, 0)[0]][:2]
    assert image is not None and isinstance(label, Tensor)
    fig, axes = plt.subplots(2, 4, figsize=(16, 6), layout="constrained")
    tints = ("tab:gray", "tab:orange")
    for ax, title, values, form in (
        (axes[0, 0], "kept for backward, MiB", [r.kept / 2**20 for r in runs], "%.1f"),
        (axes[0, 1], "peak of a training step, MiB", [r.peak / 2**20 for r in runs], "%.1f"),
        (axes[0, 2], "mean IoU, %", [100 * r.scores["miou"] for r in runs], "%.1f"),
    ):
        bars = ax.bar([r.name for r in runs], values, color=tints)
        ax.bar_label(bars, fmt=form)
        ax.set_title(title)
        ax.margins(y=0.15)
    for run, tint, style in zip(runs, tints, ("-", "--"), strict=True):
        axes[0, 3].plot(run.losses, style, color=tint, label=run.name)
    axes[0, 3].set(title="training loss", xlabel="line of the log", yscale="log")
    axes[0, 3].legend()
    shown = [("an unseen scene", image), ("its labels", coloured(label, val.labels))]
    shown += [(f"{run.name}: prediction", coloured(run.guess, val.labels)) for run in runs]
    for ax, (title, picture) in zip(axes[1], shown, strict=True):
        ax.imshow(picture.permute(1, 2, 0).numpy())
        ax.set_title(title)
        ax.axis("off")
    fig.savefig(path, dpi=110)
    plt.close(fig)


def write(runs: Sequence[Trained], device: torch.device, path: Path) -> None:
    """The table as CSV."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(
            ["layer", "kept_bytes", "peak_bytes", "median_ms", "pixel_accuracy", "mean_iou", "device", "torch"]
        )
        for run in runs:
            scores = (f"{run.scores['pixel_accuracy']:.4f}", f"{run.scores['miou']:.4f}")
            figures = [run.name, run.kept, run.peak, f"{run.milliseconds:.1f}", *scores]
            rows.writerow([*figures, device.type, torch.__version__])


def compare(config: Config, device: torch.device, folder: Path) -> list[Trained]:
    """Do all of it, showing progress, and print the table."""
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width of its own; the table wants about this much.
    console = Console() if sys.stdout.isatty() else Console(width=110)
    runs = []
    for norm, name in NORMS.items():
        console.print(f"{name}:", highlight=False)
        # What an earlier demonstration left.
        shutil.rmtree(folder / norm, ignore_errors=True)
        runs.append(trained(norm, config, device, folder / norm))
    val = Segmentation().samples(config, "val")
    title = (
        f"{len(val.classes)}-class segmentation of crops of {config.data.crop}² pixels, batch {config.train.batch}, "
    )
    table = Table(title=f"{title}{config.train.epochs} epochs, {device}")
    headings = ("layer", "kept for backward", "peak of a step", "time per step", "pixel accuracy", "mean IoU")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.kept / 2**20:.1f} MiB",
            f"{run.peak / 2**20:.1f} MiB",
            f"{run.milliseconds:.0f} ms",
            f"{run.scores['pixel_accuracy']:.1%}",
            f"{run.scores['miou']:.1%}",
        )
    console.print(table)
    means = "the allocator's own count" if device.type == "cuda" else "the profiler's record of torch's allocations"
    console.print(f"Peak: forward and backward, beyond parameters and data, by {means}.", highlight=False)
    figure(runs, val, folder / "comparison.png")
    write(runs, device, folder / "comparison.csv")
    console.print(f"Figure and numbers: {folder / 'comparison.png'}, {folder / 'comparison.csv'}", highlight=False)
    return runs


def main(arguments: list[str] | None = None) -> list[Trained]:
    """The command behind ./run."""
    parser = argparse.ArgumentParser(prog="./run", description=__doc__)
    parser.add_argument("--epochs", type=int, default=16, help="of each network")
    parser.add_argument("--scenes", type=int, default=320, help="scenes to train on; a quarter as many to test")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--height", type=int, default=64, help="of a scene, which is twice as wide")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs") / "demo", help="folder for the figure and the numbers")
    given = parser.parse_args(arguments)
    if given.scenes < max(4, given.batch) or given.batch < 1 or given.height < 8 or given.epochs < 1:
        parser.error("at least 4 scenes, a batch of them, an epoch, and a height of 8 are needed")
    changes = [f"train.epochs={given.epochs}", f"data.length={given.scenes}", f"train.batch={given.batch}"]
    changes += [f"data.resize={given.height}", f"data.crop={given.height}", "train.log_every=5"]
    given.out.mkdir(parents=True, exist_ok=True)
    return compare(override(named("embedded-segment"), changes), torch.device(given.device), given.out)


if __name__ == "__main__":
    main()

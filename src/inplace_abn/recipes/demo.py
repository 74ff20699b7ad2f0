"""Train one network twice, with standard batch norm and with in-place ABN, step by step in turn, and compare.

The same initial weights, the same batches. What autograd keeps is counted by :func:`inplace_abn.saved_bytes`, the peak of a
step by :func:`inplace_abn.memory.peak_bytes`.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import peak_bytes, saved_bytes
from ..modules import InPlaceABN
from .metrics import confusion, mean_iou, pixel_accuracy
from .scenes import CLASSES, COLOURS, VOID, StreetScenes

__all__ = ["main"]

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "BatchNorm2d + LeakyReLU": lambda c: nn.Sequential(nn.BatchNorm2d(c), nn.LeakyReLU(0.01, inplace=True)),
    "InPlaceABN": lambda c: InPlaceABN(c),
}


@dataclass
class Run:
    """One network on its way, and what was measured."""

    name: str
    network: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    kept: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    iou: float = 0.0


def network(norm_act: Callable[[int], nn.Module], width: int = 32) -> nn.Module:
    """Conv, norm, activation again and again at half resolution, with growing dilation; bilinear logits."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 5, 2, 2, bias=False), norm_act(width)]
    for dilation in (1, 1, 2, 2, 4, 4, 8, 1):
        layers += [nn.Conv2d(width, width, 3, 1, dilation, dilation, bias=False), norm_act(width)]
    layers += [nn.Conv2d(width, len(CLASSES), 1), nn.Upsample(scale_factor=2, mode="bilinear")]
    return nn.Sequential(*layers)


def start(name: str, steps: int, device: torch.device) -> Run:
    """The network with this norm, from the same weights whatever the norm."""
    torch.manual_seed(0)
    net = network(NORMS[name]).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 4e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=max(steps, 1) + 1)
    return Run(name, net, optimizer, schedule)


def loss_of(run: Run, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy over the pixels that are not void."""
    return F.cross_entropy(run.network(images), labels, ignore_index=VOID)


def step(run: Run, images: Tensor, labels: Tensor) -> None:
    """One training step, timed."""
    began = time.perf_counter()
    run.optimizer.zero_grad(set_to_none=True)
    loss = loss_of(run, images, labels)
    loss.backward()
    run.optimizer.step()
    run.schedule.step()
    run.losses.append(loss.item())  # waits for the device
    run.seconds.append(time.perf_counter() - began)


def measure(run: Run, images: Tensor, labels: Tensor) -> None:
    """Bytes kept, and the peak of forward and backward, before the first step."""
    run.kept = saved_bytes(run.network, images).total
    state = {k: v.clone() for k, v in run.network.state_dict().items()}
    run.peak = peak_bytes(lambda: loss_of(run, images, labels).backward(), images.device)
    run.network.load_state_dict(state)
    run.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def evaluate(run: Run, images: Tensor, labels: Tensor, batch: int) -> Tensor:
    """Score the network on scenes it has not seen; return its predictions."""
    run.network.eval()
    predictions = torch.cat([run.network(x).argmax(1) for x in images.split(batch)])
    counts = confusion(predictions.flatten().cpu(), labels.flatten().cpu(), len(CLASSES))
    run.accuracy, run.iou = pixel_accuracy(counts), mean_iou(counts)
    return predictions


def draw(
    length: int, size: tuple[int, int], seed: int, device: torch.device, tick: Callable[[], None]
) -> tuple[Tensor, Tensor]:
    """All scenes of a set as two tensors."""
    images, labels = [], []
    scenes = StreetScenes(length, size, seed)
    for i in range(length):
        image, label = scenes[i]
        images.append(image)
        labels.append(label)
        tick()
    return torch.stack(images).to(device), torch.stack(labels).to(device)


def figure(runs: list[Run], image: Tensor, label: Tensor, prediction: Tensor, path: Path) -> None:
    """Bars of memory, curves of loss, and one scene with its labels and the prediction."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    palette = torch.tensor([*COLOURS, *[(0, 0, 0)] * (VOID + 1 - len(COLOURS))], dtype=torch.uint8)
    fig, axes = plt.subplots(2, 3, figsize=(13, 6), layout="constrained")
    tints = ("tab:gray", "tab:orange")
    for ax, title, values in (
        (axes[0, 0], "kept for backward, MiB", [r.kept / 2**20 for r in runs]),
        (axes[0, 1], "peak of a training step, MiB", [r.peak / 2**20 for r in runs]),
    ):
        bars = ax.bar([r.name for r in runs], values, color=tints)
        ax.bar_label(bars, fmt="%.1f")
        ax.set_title(title)
        ax.margins(y=0.15)
    for run, tint, style in zip(runs, tints, ("-", "--"), strict=True):
        axes[0, 2].plot(run.losses, style, color=tint, label=run.name)
    axes[0, 2].set(title="training loss", xlabel="step", yscale="log")
    axes[0, 2].legend()
    shown = (image.cpu().movedim(0, 2), palette[label.cpu()], palette[prediction.cpu()])
    for ax, title, picture in zip(
        axes[1], ("an unseen scene", "its labels", f"{runs[-1].name}'s prediction"), shown, strict=True
    ):
        ax.imshow(picture.numpy())
        ax.set_title(title)
        ax.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def write(runs: list[Run], device: torch.device, path: Path) -> None:
    """The table as CSV."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(
            ["layer", "kept_bytes", "peak_bytes", "median_ms", "pixel_accuracy", "mean_iou", "device", "torch"]
        )
        for run in runs:
            milliseconds = 1e3 * statistics.median(run.seconds) if run.seconds else float("nan")
            scores = (f"{run.accuracy:.4f}", f"{run.iou:.4f}")
            rows.writerow(
                [run.name, run.kept, run.peak, f"{milliseconds:.1f}", *scores, device.type, torch.__version__]
            )


def compare(
    steps: int, scenes: int, batch: int, size: tuple[int, int], device: torch.device, folder: Path
) -> list[Run]:
    """Do all of it, showing progress, and print the table."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    # A pipe has no width of its own; the table wants about this much.
    console = Console() if sys.stdout.isatty() else Console(width=110)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        drawing = bar.add_task("drawing street scenes", total=scenes + scenes // 4)
        images, labels = draw(scenes, size, 1, device, lambda: bar.advance(drawing))
        test_images, test_labels = draw(scenes // 4, size, 2, device, lambda: bar.advance(drawing))
        runs = [start(name, steps, device) for name in NORMS]
        for run in runs:
            measure(run, images[:batch], labels[:batch])
        training = bar.add_task("training both networks", total=steps)
        order = torch.Generator().manual_seed(0)
        for i in range(steps):
            pick = torch.randint(scenes, (batch,), generator=order).to(device)
            # In turn, and taking turns to be first, so that the machine's moods are shared.
            for run in runs if i % 2 else runs[::-1]:
                step(run, images[pick], labels[pick])
            lately = ", ".join(f"{statistics.mean(r.losses[-20:]):.3f}" for r in runs)
            bar.update(training, advance=1, description=f"training both networks (loss {lately})")
    predictions = [evaluate(run, test_images, test_labels, batch) for run in runs]
    table = Table(
        title=f"{len(CLASSES)}-class segmentation of {size[0]}×{size[1]} scenes, batch {batch}, {steps} steps, {device}"
    )
    headings = ("layer", "kept for backward", "peak of a step", "time per step", "pixel accuracy", "mean IoU")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.kept / 2**20:.1f} MiB",
            f"{run.peak / 2**20:.1f} MiB",
            f"{statistics.median(run.seconds) * 1e3:.0f} ms" if run.seconds else "-",
            f"{run.accuracy:.1%}",
            f"{run.iou:.1%}",
        )
    console.print(table)
    means = "the allocator's own count" if device.type == "cuda" else "the profiler's record of torch's allocations"
    console.print(f"Peak: forward and backward, beyond parameters and data, by {means}.", highlight=False)
    figure(runs, test_images[0], test_labels[0], predictions[-1][0], folder / "comparison.png")
    write(runs, device, folder / "comparison.csv")
    console.print(f"Figure and numbers: {folder / 'comparison.png'}, {folder / 'comparison.csv'}", highlight=False)
    return runs


def main(arguments: list[str] | None = None) -> list[Run]:
    """The command behind ./run."""
    parser = argparse.ArgumentParser(prog="./run", description=__doc__)
    parser.add_argument("--steps", type=int, default=160, help="training steps of each network")
    parser.add_argument("--scenes", type=int, default=320, help="scenes to train on; a quarter as many to test")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--height", type=int, default=64, help="of a scene, which is twice as wide")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs") / "demo", help="folder for the figure and the numbers")
    given = parser.parse_args(arguments)
    if given.scenes < 4 or given.batch < 1 or given.height < 8:
        parser.error("at least 4 scenes, a batch of 1 and a height of 8 are needed")
    size = (given.height, 2 * given.height)
    return compare(given.steps, given.scenes, given.batch, size, torch.device(given.device), given.out)


if __name__ == "__main__":
    main()

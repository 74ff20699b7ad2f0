"""What a run needs of a device's memory, and what would make it need less; forecast without one."""

from __future__ import annotations

import dataclasses

import torch

from ..doctor import columns
from ..memory import readable
from ..planning import USABLE, forecast, largest
from .building import Task
from .config import Config, override

__all__ = ["advice", "largest_batch", "peak_bytes"]


def peak_bytes(config: Config, task: Task, classes: int, images: int) -> int:
    """The most bytes at once in a step of so many images on one rank."""
    network = dataclasses.replace(config.network, body="")
    with torch.device("meta"):
        model = task.build(dataclasses.replace(config, network=network), classes)
    crop = config.data.crop
    shape = (images, 3, crop, crop)
    states = 2 if config.optim.name == "adamw" else int(config.optim.momentum > 0)
    return forecast(model, shape, getattr(torch, config.train.dtype), states)[1]


def largest_batch(config: Config, task: Task, classes: int, memory: int) -> int | None:
    """The most images of a step on one rank that fit so many bytes, 8 % of which are left to the driver; None if not one does."""
    share = max(1, config.train.batch // (config.train.world_size * config.train.accumulate))
    return largest(lambda n: peak_bytes(config, task, classes, n), share, int(USABLE * memory), 1)


def advice(config: Config, task: Task, classes: int, memory: int, ranks: int) -> str:
    """A table of this run and cheaper ones: peak of a step, and the largest batch that fits."""
    train = config.train
    changes: list[tuple[str, ...]] = [()]
    if config.network.norm == "standard":
        changes.append(("network.norm=inplace",))
    if train.dtype == "float32":
        changes += [(*done, "train.dtype=bfloat16") for done in list(changes)]
    changes += [(*done, f"train.accumulate={2 * train.accumulate}") for done in (changes[0], changes[-1])]
    rows = []
    for change in changes:
        other = override(config, change)
        images = max(1, other.train.batch // (ranks * other.train.accumulate))
        peak = peak_bytes(other, task, classes, images)
        most = largest_batch(other, task, classes, memory)
        fits = "fits" if peak <= USABLE * memory else "does not fit"
        rows.append((" ".join(change) or "as it is", str(images), readable(peak), fits, str(most or "none")))
    head = ("--set", "images at once", "forecast peak", f"of {readable(memory)}", "largest batch of a rank")
    last = "Parts of a step (accumulate) have norms' statistics of their own, as smaller batches have."
    return "\n".join([*columns(head, rows), last])

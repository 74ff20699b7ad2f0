"""What a run needs of a device's memory, and what would make it need less; forecast without one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from ..doctor import columns
from ..memory import readable
from ..planning import USABLE, forecast, largest
from .building import Task
from .config import Config, override

__all__ = ["advice", "peaks"]


def peaks(config: Config, task: Task, classes: int) -> Callable[[int], int]:
    """Says the most bytes at once in a step of so many images on one rank."""
    network = dataclasses.replace(config.network, body="")
    with torch.device("meta"):
        model = task.build(dataclasses.replace(config, network=network), classes)
    dtype, crop = getattr(torch, config.train.dtype), config.data.crop
    states = 2 if config.optim.name == "adamw" else int(config.optim.momentum > 0)
    return functools.cache(lambda images: forecast(model, (images, 3, crop, crop), dtype, states)[1])


def advice(config: Config, task: Task, classes: int, memory: int, ranks: int) -> str:
    """A table of this run and cheaper ones: peak of a step, and the largest batch that fits."""
    usable = int(USABLE * memory)
    changes: list[tuple[str, ...]] = [()]
    if config.network.norm == "standard":
        changes.append(("network.norm=inplace",))
    if config.train.dtype == "float32":
        changes += [(*done, "train.dtype=bfloat16") for done in list(changes)]
    changes += [(*done, f"train.accumulate={2 * config.train.accumulate}") for done in (changes[0], changes[-1])]
    rows = []
    for change in changes:
        other = override(config, change)
        images = max(1, other.train.batch // (ranks * other.train.accumulate))
        peak_of = peaks(other, task, classes)
        most = largest(peak_of, images, usable, 1)
        fits = "fits" if peak_of(images) <= usable else "does not fit"
        rows.append((" ".join(change) or "as it is", str(images), readable(peak_of(images)), fits, str(most or "none")))
    head = ("--set", "images at once", "forecast peak", f"of {readable(memory)}", "largest batch of a rank")
    last = "Parts of a step (accumulate) have norms' statistics of their own, as smaller batches have."
    return "\n".join([*columns(head, rows), last])

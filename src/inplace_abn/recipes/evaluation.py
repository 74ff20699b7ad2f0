"""Scores and pictures of a network, and a run's network out of its folder."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Sampler

from . import storage
from .building import Task, autocast, built, preparation, settle, weights
from .config import Config, from_dict
from .data import Draw, Problem, Samples, loader
from .processes import Ranks

__all__ = ["evaluate", "picture", "restored"]


@torch.no_grad()
def evaluate(
    config: Config,
    task: Task,
    model: nn.Module,
    samples: Samples,
    ranks: Ranks,
    say: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """Scores of a model; every sample is looked at once, by one of the ranks. Of stacked views, the outputs' mean counts.

    What a person should know is told to ``say``, or printed. Files that cannot be read are left out; too many are an error.
    """
    mode, searching = model.training, torch.backends.cudnn.benchmark
    model.eval()
    # Every size would be searched anew.
    torch.backends.cudnn.benchmark = searching and samples.alike
    if ranks.count > 1:
        # The first rank's statistics are what is saved.
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
    prepare = preparation(config, ranks.device)
    tell = say or functools.partial(print, file=sys.stderr)
    batch = (config.train.evaluate_batch or config.train.batch // config.train.accumulate) // ranks.count or 1
    batch = batch if samples.alike else 1
    mine = list(samples.order(config.train.seed, 0))[ranks.rank :: ranks.count]
    shares = [mine[i : i + batch] for i in range(0, len(mine), batch)]
    classes = len(samples.classes)
    total = task.nothing(classes).to(ranks.device)
    problems = list[Problem]()
    for given in loader(samples, _Listed(shares), config.data.workers, ranks.device.type == "cuda"):
        images = given.images
        problems += given.problems
        if not len(images):
            continue
        views = images.shape[1] if images.dim() == 5 else 0
        with autocast(config, ranks.device):
            output = task.output(model, prepare(images.flatten(0, 1) if views else images), tell)
        output = output.float()
        if views:
            output = output.unflatten(0, (-1, views)).mean(1)
        total += task.counts(output, given.targets.to(ranks.device, non_blocking=True), classes)
    model.train(mode)
    torch.backends.cudnn.benchmark = searching
    problems = ranks.gathered(problems)
    for problem in problems if ranks.rank == 0 else []:
        tell(f"cannot read {problem.name}: {problem.cause}")
    if len(problems) > config.data.corrupt_share * len(samples):
        raise OSError(f"{len(problems)} of {len(samples)} files to evaluate cannot be read; is the data set whole?")
    return task.scores(ranks.total(total), samples.classes)


@torch.no_grad()
def picture(config: Config, task: Task, model: nn.Module, samples: Samples, device: torch.device) -> Tensor | None:
    """What the task has to show of a model."""
    mode, prepare = model.training, preparation(config, device)
    model.eval()

    def predict(images: Tensor) -> Tensor:
        with autocast(config, device):
            output = task.output(model, prepare(images), functools.partial(print, file=sys.stderr))
        return output.float().cpu()

    shown = task.picture(samples, predict)
    model.train(mode)
    return shown


class _Listed(Sampler[list[Draw]]):
    """Batches that are known."""

    def __init__(self, batches: list[list[Draw]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Draw]]:
        return iter(self.batches)


def restored(
    folder: Path, task_of: Callable[[Config], Task], device: torch.device, change: Callable[[Config], Config]
) -> tuple[Config, nn.Module, dict[str, Any]]:
    """A run's config, changed; its network with the weights of the last checkpoint, averaged if they are; that checkpoint."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} is not the folder of a run: it has no config.json")
    config = change(from_dict(json.loads((folder / "config.json").read_text())))
    found = storage.latest(folder)
    if found is None:
        raise ValueError(f"{folder} has no checkpoint yet")
    settle(config, device)
    task = task_of(config)
    # The weights that it started from may be gone.
    config = dataclasses.replace(config, network=dataclasses.replace(config.network, body=""))
    model = built(config, task, len(found[1]["classes"]), device)
    try:
        model.load_state_dict(weights(found[1]))
    except RuntimeError as error:
        raise ValueError(f"the weights of {folder} do not fit the network {config.network.name}: {error}") from error
    return config, model.eval(), found[1]

"""One training loop for every task: on a CPU, a GPU, or many with torchrun; stopped at any moment, it goes on where it was.

Nothing of a run is random but by its seed: the order, every sample's augmentation and the numbers that layers draw in a step are
functions of the seed and the step, so a checkpoint holds no random state, and a run that was killed and continued ends with the
same bits as one that was not. The learning rate is a function of the step as well.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ..doctor import guard_state, load_guard_state
from . import storage
from .building import Task, autocast, averaged, built, optimizer, preparation, rate, settle
from .config import FREE, Config, from_dict, settings, to_json
from .data import Batch, Order, loader, number
from .evaluation import evaluate, picture
from .log import REMEDY, Log
from .processes import Ranks, Signals, Stopped

__all__ = ["Run", "train"]


def train(
    config: Config,
    task: Task,
    folder: Path,
    *,
    resume: bool = False,
    device: torch.device | None = None,
    tell: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """Train as the config says, in this folder; return the scores of the last evaluation.

    Args:
        config: the recipe. A run that is continued keeps its own, but for what cannot change its result.
        task: what is trained.
        folder: for the config, the log and the checkpoints; must not hold a run already, unless it is continued.
        resume: go on from the folder's last checkpoint; from the beginning if there is none.
        device: None for a GPU where there is one.
        tell: gets lines of progress; None prints them, or a bar on a terminal.
    """
    with Ranks(device) as ranks, Signals() as signals:
        run = Run(config, task, folder, resume, ranks, tell)
        return run.finish(signals)


def opened(config: Config, folder: Path, resume: bool, ranks: Ranks) -> dict[str, Any] | None:
    """Make a run's folder, or find in it the state to go on from; the first rank looks, and its complaint is everyone's."""
    complaints = list[str]()
    if ranks.rank == 0:
        try:
            _make_or_check(config, folder, resume)
            storage.tidy(folder)
        except (ValueError, OSError, Warning) as error:
            complaints.append(str(error))
    for complaint in ranks.gathered(complaints):
        raise ValueError(complaint)
    found = storage.latest(folder) if resume else None
    steps = set(ranks.gathered([found[1]["step"] if found else 0]))
    if len(steps) > 1:
        raise ValueError(
            f"ranks find checkpoints of different steps in {folder}, {sorted(steps)}: they must see one disk"
        )
    return found[1] if found else None


def _make_or_check(config: Config, folder: Path, resume: bool) -> None:
    known = folder / "config.json"
    if not known.exists() or not resume:
        if known.exists() or storage.checkpoints(folder):
            raise ValueError(f"{folder} holds a run; continue it with --resume, or choose another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
        storage.write(known, to_json(config).encode())
        return
    was = from_dict(json.loads(known.read_text()))
    old, new = settings(was), settings(config)
    changed = [name for name in old if old[name][0] != new[name][0] and name not in FREE]
    if was.recipe != config.recipe:
        changed.insert(0, f"recipe ({was.recipe}, not {config.recipe})")
    if changed:
        raise ValueError(
            f"the run in {folder} was begun with other settings: {', '.join(changed)}; leave them as they were, or choose "
            "another folder with --out"
        )


class Run:
    """A network on its way: what :func:`train` does, step by step."""

    def __init__(
        self, config: Config, task: Task, folder: Path, resume: bool, ranks: Ranks, tell: Callable[[str], None] | None
    ) -> None:
        self.config, self.task, self.folder, self.ranks, self.device = config, task, folder, ranks, ranks.device
        settle(config, self.device)
        self.samples, self.val = task.samples(config, "train"), task.samples(config, "val")
        spread = {"rank": ranks.rank, "ranks": ranks.count, "parts": config.train.accumulate, "seed": config.train.seed}
        self.steps = config.train.epochs * (len(self.samples) // config.train.batch)
        self.order = Order(self.samples, config.train.batch, self.steps, **spread)
        self.per_epoch = self.order.per_epoch
        torch.manual_seed(number(config.train.seed, "weights"))
        self.model = built(config, task, len(self.samples.classes), self.device)
        self.optimizer = optimizer(self.model, config.optim)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.train.dtype == "float16")
        self.ema = averaged(self.model, config.optim.ema) if config.optim.ema else None
        # Only now, when there is nothing left to complain of: a folder is made, or the state in it taken over.
        state = opened(config, folder, resume, ranks)
        self.step = self.order.start = state["step"] if state else 0
        if state:
            self.restore(state)
        net: nn.Module = self.model
        if ranks.count > 1:
            net = DistributedDataParallel(net, device_ids=[self.device] if self.device.type == "cuda" else None)
        self.parallel = net
        self.net: Callable[[Tensor], Tensor] = torch.compile(net) if config.train.compile else net
        self.log = Log(self, resume, tell)

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint, all of it."""
        missing = {"model", "ema", "optimizer", "scaler", "guard", "step", "samples", "classes"} - state.keys()
        if missing:
            raise ValueError(f"the checkpoint lacks {sorted(missing)}; it was written by another version")
        if (state["samples"], state["classes"]) != (len(self.samples), list(self.samples.classes)):
            raise ValueError(
                f"the run was begun with {state['samples']} samples of {len(state['classes'])} classes, and there "
                f"are {len(self.samples)} of {len(self.samples.classes)} now: data.path is another data set"
            )
        self.model.load_state_dict(state["model"])
        load_guard_state(self.model, state["guard"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])

    def save(self) -> None:
        """Write a checkpoint; the first rank does, whose state is every rank's."""
        if self.ranks.rank:
            return
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise FloatingPointError(f"weights are not finite after step {self.step}, and not saved. {REMEDY}")
        state = {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict() if self.ema is not None else {},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "guard": guard_state(self.model),
            "step": self.step,
            "recipe": self.config.recipe,
            "samples": len(self.samples),
            "classes": list(self.samples.classes),
            "colours": [list(colour) for colour in getattr(getattr(self.samples, "labels", None), "colours", ())],
        }
        storage.save(self.folder, self.step, state, self.config.train.keep)

    def finish(self, signals: Signals) -> dict[str, float]:
        """Train to the end, saving and evaluating on the way."""
        config = self.config.train
        batches = iter(self.batches())
        scores: dict[str, float] = {}
        saved = time.monotonic()
        with self.log, _ended(batches):
            if self.step and self.due():
                # A checkpoint at an epoch's end is written before its evaluation.
                scores = self.evaluate(signals)
            while self.step < self.steps:
                self.one_step(batches)
                self.log.step(self.step)
                stopped = self.ranks.agreed(signals.got)
                if stopped or self.due() or time.monotonic() - saved >= 60 * config.save_minutes:
                    self.save()
                    saved = time.monotonic()
                if stopped:
                    raise self.stopped(stopped)
                if self.due():
                    scores = self.evaluate(signals)
        return scores

    def due(self) -> bool:
        """Whether an evaluation is, after this step."""
        epoch, inside = divmod(self.step, self.per_epoch)
        return inside == 0 and (epoch % self.config.train.evaluate_every == 0 or self.step == self.steps)

    def stopped(self, number_: int) -> Stopped:
        """What ends a run that is saved."""
        self.log.say(f"stopped by {signal.Signals(number_).name} after step {self.step}; --resume goes on from here")
        return Stopped(128 + number_)

    def batches(self) -> DataLoader[Any]:
        """This rank's shares of all steps that are left."""
        return loader(self.samples, self.order, self.config.data.workers, self.device.type == "cuda")

    def one_step(self, batches: Iterator[Batch]) -> None:
        """Forward, backward, and the optimizer's step."""
        config, parts = self.config, self.config.train.accumulate
        # What layers draw belongs to the step and the rank, not to what went before.
        torch.manual_seed(number(config.train.seed, "step", self.step, self.ranks.rank))
        for group in self.optimizer.param_groups:
            group["lr"] = rate(config.optim, self.step, self.per_epoch, self.steps)
        for part in range(parts):
            began = time.perf_counter()
            batch = next(batches)
            if not len(batch.images):
                raise OSError(f"none of a batch's files could be read, the first {batch.problems[0]}")
            self.log.waited += time.perf_counter() - began
            self.log.problems += batch.problems
            x, targets = self.prepare(batch.images), batch.targets.to(self.device, non_blocking=True)
            with self.alone() if part < parts - 1 else contextlib.nullcontext():
                with autocast(config, self.device):
                    loss = self.task.loss(config, self.net(x), targets) / parts
                self.scaler.scale(loss).backward()
            self.log.add(loss)
        if config.optim.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self.step += 1

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Gradients stay this rank's for now."""
        net = self.parallel
        return net.no_sync() if isinstance(net, DistributedDataParallel) else contextlib.nullcontext()

    @functools.cached_property
    def prepare(self) -> Callable[[Tensor], Tensor]:
        """Makes floats of images."""
        return preparation(self.config, self.device)

    def evaluate(self, signals: Signals) -> dict[str, float]:
        """Scores on the validation data, of the averaged weights if there are any. The state is saved."""
        model = self.ema.module if self.ema is not None else self.model
        began = time.perf_counter()
        with signals.at_once(self.stopped):
            scores = evaluate(self.config, self.task, model, self.val, self.ranks, self.log.say)
            self.log.scores(self.step // self.per_epoch, scores)
            if self.ranks.rank == 0:
                self.log.picture(picture(self.config, self.task, model, self.val, self.device))
        # What it took is not the steps'.
        self.log.at += time.perf_counter() - began
        return scores


@contextlib.contextmanager
def _ended(batches: Any) -> Iterator[None]:
    """After an error, end the workers; one that is stuck listens to nothing else."""
    try:
        yield
    except BaseException:
        if hasattr(batches, "_workers"):
            batches._shutdown_workers()
            for worker in batches._workers:
                worker.kill()
        raise

"""What is told of a run."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..memory import readable
from . import storage
from .data import Problem
from .files import write_png

if TYPE_CHECKING:
    from .loop import Run

__all__ = ["REMEDY", "Log"]

REMEDY = "A smaller optim.lr, a warm-up (optim.warmup) or clipping (optim.clip) may help"


class Log:
    """What is told of a run: a bar on a terminal and lines elsewhere, ``metrics.jsonl``, and TensorBoard. By the first rank."""

    def __init__(self, run: Run, resumed: bool, tell: Callable[[str], None] | None) -> None:
        self.run, self.first = run, run.ranks.rank == 0
        self.loss = torch.zeros((), device=run.device)
        self.waited, self.problems = 0.0, list[Problem]()
        self.bad: set[str] = set()
        self.since, self.at = run.step, time.perf_counter()
        self.bar: Any = None
        self.task: Any = None
        self.tell = tell
        self.board: Any = None
        if resumed and self.first:
            storage.forget_after(run.folder, run.step)
            self.bad = {line["bad_file"] for line in storage.lines(run.folder) if "bad_file" in line}

    def __enter__(self) -> Log:
        run = self.run
        if not self.first:
            return self
        if self.tell is None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task(run.config.recipe, total=run.steps, completed=run.step)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its own dependencies' deprecations
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)
        except ImportError:
            self.say("no TensorBoard here, so nothing is written for it: pip install tensorboard")
        if run.config.train.world_size != run.ranks.count and run.config.network.norm != "sync":
            self.say(
                f"{run.config.recipe} is meant for {run.config.train.world_size} ranks and runs on {run.ranks.count}: the "
                f"statistics of its norms are of {run.config.train.batch // run.ranks.count} images each, not "
                f"{run.config.train.batch // run.config.train.world_size}"
            )
        self.at = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self.board.close()

    def say(self, line: str) -> None:
        """A line, beside the bar if there is one."""
        if not self.first:
            return
        if self.tell is not None:
            self.tell(line)
        elif self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def add(self, loss: Tensor) -> None:
        """Part of a step's loss; stays on the device."""
        self.loss += loss.detach()

    def step(self, step: int) -> None:
        """After a step: a line, now and then."""
        run = self.run
        if self.bar is not None:
            self.bar.update(self.task, completed=step)
        if step % run.config.train.log_every and step != run.steps:
            return
        done = step - self.since
        loss = float(run.ranks.total(self.loss / (done * run.ranks.count)))
        seconds = time.perf_counter() - self.at
        line: dict[str, Any] = {
            "step": step,
            "epoch": step / run.per_epoch,
            "loss": loss,
            "lr": run.optimizer.param_groups[0]["lr"],
            "images_per_second": done * run.config.train.batch / seconds,
            "data_wait": self.waited / seconds,
        }
        if run.device.type == "cuda":
            line["peak_bytes"] = torch.cuda.max_memory_allocated(run.device)
        self.report_problems(step)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step}; the last checkpoint is from before. {REMEDY}")
        self.write(line)
        left = timedelta(seconds=round(seconds / done * (run.steps - step)))
        text = f"loss {loss:.4f}, {line['images_per_second']:.0f} images/s, data wait {line['data_wait']:.0%}"
        text += f", peak {readable(line['peak_bytes'])}" if "peak_bytes" in line else ""
        if self.bar is not None:
            self.bar.update(self.task, description=f"{run.config.recipe}: {text}")
        else:
            self.say(f"step {step}/{run.steps}, epoch {line['epoch']:.2f}, {text}, {left} left")
        self.loss.zero_()
        self.waited, self.since, self.at = 0.0, step, time.perf_counter()

    def scores(self, epoch: int, scores: dict[str, float]) -> None:
        """After an evaluation."""
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items() if not name.startswith("iou/"))
        self.say(f"after epoch {epoch}: {shown}")
        self.write({"step": self.run.step, "epoch": float(epoch), **scores})

    def picture(self, shown: Tensor | None) -> None:
        """``predictions.png``, and the same on the board."""
        if shown is not None:
            write_png(shown, self.run.folder / "predictions.png")
            if self.board is not None:
                self.board.add_image("predictions", shown, self.run.step)

    def write(self, line: dict[str, Any]) -> None:
        """A line of the log, its figures on the board, too."""
        if not self.first:
            return
        storage.append(self.run.folder, line)
        if self.board is not None:
            for name, value in line.items():
                if name != "step":
                    self.board.add_scalar(name, value, line["step"])

    def report_problems(self, step: int) -> None:
        """List what could not be read, once; stop if it is too much."""
        found, self.problems = self.run.ranks.gathered(self.problems), []
        for path, cause in found:
            if path not in self.bad:
                self.bad.add(path)
                self.say(f"cannot read {path}: {cause}")
                if self.first:
                    storage.append(self.run.folder, {"step": step, "bad_file": path, "cause": cause})
        allowed = self.run.config.data.corrupt_share * len(self.run.samples)
        if len(self.bad) > allowed:
            raise OSError(
                f"{len(self.bad)} of {len(self.run.samples)} files cannot be read, more than data.corrupt_share="
                f"{self.run.config.data.corrupt_share}; is the data set whole?"
            )

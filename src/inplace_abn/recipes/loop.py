"""One training loop for every task: on a CPU, a GPU, or many with torchrun; stopped at any moment, it goes on where it was.

Nothing of a run is random but by its seed: the order, every sample's augmentation and the numbers that layers draw in a step are
functions of the seed and the step, so a checkpoint holds no random state, and a run that was killed and continued ends with the
same bits as one that was not. The learning rate is a function of the step as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from .. import checkpoints
from ..activations import ACTIVATIONS
from ..doctor import guard_state, load_guard_state
from ..memory import readable
from ..models.residual import NormAct
from ..modules import ABN, InPlaceABN, InPlaceABNSync
from ..recompute import recompute
from ..training import param_groups
from . import storage
from .config import FREE, Config, Network, Optim, from_dict, settings, to_json
from .data import Batch, Draw, Order, Problem, Samples, loader, number, write_png

__all__ = ["Stopped", "Task", "evaluate", "norm_act", "picture", "rate", "restored", "train"]


class Task(Protocol):
    """What differs between classification and segmentation."""

    def build(self, config: Config, classes: int) -> nn.Module:
        """The network."""
        ...

    def samples(self, config: Config, split: str) -> Samples:
        """The data: "train" or "val"."""
        ...

    def loss(self, config: Config, output: Tensor, targets: Tensor) -> Tensor:
        """A mean over the batch."""
        ...

    def counts(self, output: Tensor, targets: Tensor, classes: int) -> Tensor:
        """What is added up over an evaluation."""
        ...

    def scores(self, counts: Tensor, classes: Sequence[str]) -> dict[str, float]:
        """What is read off the sum; the first is the one to look at."""
        ...

    def picture(self, samples: Any, predict: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Something to look at after an evaluation, uint8 of shape (3, H, W); ``predict`` gives outputs of uint8 images."""
        ...


REMEDY = "A smaller optim.lr, a warm-up (optim.warmup) or clipping (optim.clip) may help"


class Stopped(SystemExit):
    """The run was told to stop by a signal, and its state is saved; ends the process with 128 + the signal's number."""


def norm_act(network: Network) -> NormAct:
    """What makes a network's norms."""
    options = {"activation": network.activation, "activation_param": network.activation_param}
    make: dict[str, Any] = {
        "standard": ABN,
        "inplace": InPlaceABN,
        "inplace-1": functools.partial(InPlaceABN, variant="I"),
        "sync": InPlaceABNSync,
    }
    norm: NormAct = functools.partial(make[network.norm], **options)
    return norm


def start_body(body: nn.Module, network: Network) -> None:
    """Load what a body starts from, if anything: a run's folder or a classifier's file, whose classes are left out."""
    if not network.body:
        return
    path = Path(network.body)
    if not path.is_dir():
        scale: Any = network.body_scale or None
        checkpoints.load(body, path, scale, leave=("classifier.",))
        return
    found = storage.latest(path)
    if found is None:
        raise ValueError(f"network.body is {path}, which has no checkpoint")
    checkpoints.take(body, weights(found[1]), "signed", str(path), leave=("classifier.",))


def weights(state: dict[str, Any]) -> dict[str, Tensor]:
    """Those of a checkpoint that are evaluated: averaged ones if there are any."""
    average = {k.removeprefix("module."): v for k, v in state["ema"].items() if k != "n_averaged"}
    return average or state["model"]


def rate(optim: Optim, step: int, per_epoch: int, steps: int) -> float:
    """The learning rate of a step.

    >>> [round(rate(Optim(), 100 * epoch, 100, 9000), 9) for epoch in (0, 29, 30, 60)]
    [0.1, 0.1, 0.01, 0.001]
    """
    warm = optim.warmup * per_epoch
    if step < warm:
        return optim.lr * (step + 1) / warm
    if optim.schedule == "step":
        factor: float = optim.drop ** (step // per_epoch // max(optim.drop_every, 1))
        return optim.lr * factor
    if optim.schedule == "linear":
        return optim.lr + (optim.final_lr - optim.lr) * step / max(steps - 1, 1)
    if optim.schedule == "poly":
        factor = (1 - step / steps) ** optim.power
        return optim.lr * factor
    if optim.schedule == "cosine":
        return optim.final_lr + (optim.lr - optim.final_lr) * 0.5 * (1 + math.cos(math.pi * step / steps))
    return optim.lr


def world_size() -> int:
    """Processes of this run, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is."""
    return int(os.environ.get("RANK", "0"))


class Ranks:
    """The processes of a run: this one alone, or those that torchrun started."""

    def __init__(self, device: torch.device | None) -> None:
        self.count, self.rank = world_size(), rank()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {device}: there is no GPU here, or torch cannot use it")
        if device.type == "cuda" and device.index is None:
            # More processes than GPUs share them.
            device = torch.device("cuda", local % torch.cuda.device_count())
            torch.cuda.set_device(device)
        self.device = device
        self.control: Any = None
        self.own = False
        if self.count > 1:
            # Nccl wants a GPU for every rank of a machine.
            here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            nccl = device.type == "cuda" and here <= torch.cuda.device_count()
            if not dist.is_initialized():
                # Torchrun's store outlives a restart, and with it the addresses of processes that are gone.
                store, *_ = next(rendezvous("env://", timeout=timedelta(minutes=10)))
                store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
                backend = "nccl" if nccl else "gloo"
                dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.count)
                self.own = True
            # What ranks agree on must not wait for a GPU.
            self.control = dist.new_group(backend="gloo") if nccl else dist.group.WORLD

    def agreed(self, value: int) -> int:
        """The largest of all ranks' numbers."""
        if self.count == 1:
            return value
        most = torch.tensor(value)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.control)
        return int(most)

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks, on the CPU."""
        value = value.detach().cpu()
        if self.count > 1:
            dist.all_reduce(value, group=self.control)
        return value

    def gathered(self, value: list[Any]) -> list[Any]:
        """All ranks' lists, one after another."""
        if self.count == 1:
            return value
        every: list[Any] = [None] * self.count
        dist.all_gather_object(every, value, group=self.control)
        return [item for part in every for item in part]

    def leave(self) -> None:
        """Done with the others."""
        if self.own:
            dist.destroy_process_group()


class Signals:
    """Remembers a SIGTERM or SIGINT until a step is done; a second one ends the process at once."""

    def __init__(self) -> None:
        self.got, self.since = 0, 0.0
        self.stopped: Callable[[int], Stopped] | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        with contextlib.suppress(ValueError):  # not the main thread: signals are another's affair
            for number_ in (signal.SIGTERM, signal.SIGINT):
                self.before[number_] = signal.signal(number_, self._receive)
        return self

    def _receive(self, number_: int, frame: object) -> None:
        if self.got:
            # A scheduler's signal reaches a rank twice, from it and from torchrun; a person takes longer.
            if time.monotonic() - self.since > 3:
                os._exit(128 + number_)
            return
        self.got, self.since = number_, time.monotonic()
        if self.stopped is not None:
            raise self.stopped(number_)

    @contextlib.contextmanager
    def at_once(self, stopped: Callable[[int], Stopped]) -> Iterator[None]:
        """While there is nothing to save, a signal ends the run where it is."""
        if self.got:
            raise stopped(self.got)
        self.stopped = stopped
        try:
            yield
        finally:
            self.stopped = None

    def __exit__(self, *error: object) -> None:
        for number_, handler in self.before.items():
            signal.signal(number_, handler)


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
    ranks = Ranks(device)
    try:
        with Signals() as signals:
            run = Run(config, task, folder, resume, ranks, tell)
            return run.finish(signals)
    finally:
        ranks.leave()


def opened(config: Config, folder: Path, resume: bool, ranks: Ranks) -> dict[str, Any] | None:
    """Make a run's folder, or find in it the state to go on from; the first rank looks, and its complaint is everyone's."""
    complaints = list[str]()
    if ranks.rank == 0:
        try:
            _make_or_check(config, folder, resume)
            storage.tidy(folder)
        except (ValueError, OSError) as error:
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
        if (state.get("samples"), state.get("classes")) != (len(self.samples), list(self.samples.classes)):
            raise ValueError(
                f"the run was begun with {state.get('samples')} samples of {len(state.get('classes', []))} classes, and there "
                f"are {len(self.samples)} of {len(self.samples.classes)} now: data.path is another data set"
            )
        missing = {"model", "ema", "optimizer", "scaler", "guard", "step"} - state.keys()
        if missing:
            raise ValueError(f"the checkpoint lacks {sorted(missing)}; it was written by another version")
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


def settle(config: Config, device: torch.device) -> None:
    """How torch is to compute."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = device.type == "cuda" and not config.train.deterministic


def built(config: Config, task: Task, classes: int, device: torch.device) -> nn.Module:
    """The network on the device; where its activation cannot be inverted, told to compute it again."""
    model = task.build(config, classes).to(device)
    if config.network.norm != "standard" and ACTIVATIONS[config.network.activation].inverse is None:
        recompute(model)
    if config.train.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """As the config says."""
    learned: Any = list(model.parameters()) if optim.decay == "all" else param_groups(model, optim.weight_decay)
    if optim.name == "adamw":
        return torch.optim.AdamW(learned, optim.lr, weight_decay=optim.weight_decay)
    nesterov = optim.nesterov and optim.momentum > 0
    return torch.optim.SGD(learned, optim.lr, optim.momentum, weight_decay=optim.weight_decay, nesterov=nesterov)


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """An exponential average of weights and statistics."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Of the config's dtype."""
    dtype = getattr(torch, config.train.dtype)
    return torch.autocast(device.type, dtype, enabled=config.train.dtype != "float32")


def preparation(config: Config, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Makes of uint8 images, on the device, (image / 255 − mean) / std, channel by channel."""
    mean, std = (255 * torch.tensor(v, device=device).view(3, 1, 1) for v in (config.data.mean, config.data.std))
    form = torch.channels_last if config.train.channels_last else torch.contiguous_format

    def prepare(images: Tensor) -> Tensor:
        x = images.to(device, non_blocking=True).float().contiguous(memory_format=form)
        return x.sub_(mean).div_(std)

    return prepare


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

    Files that cannot be read are told to ``say``, or printed, and left out; too many are an error.
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
    batch = (config.train.evaluate_batch or config.train.batch // config.train.accumulate) // ranks.count or 1
    batch = batch if samples.alike else 1
    mine = list(samples.order(config.train.seed, 0))[ranks.rank :: ranks.count]
    shares = [mine[i : i + batch] for i in range(0, len(mine), batch)]
    classes = len(samples.classes)
    total: Tensor | None = None
    problems = list[Problem]()
    for given in loader(samples, _Listed(shares), config.data.workers, ranks.device.type == "cuda"):
        images = given.images
        problems += given.problems
        if not len(images):
            continue
        views = images.shape[1] if images.dim() == 5 else 0
        with autocast(config, ranks.device):
            output = model(prepare(images.flatten(0, 1) if views else images))
        output = output.float()
        if views:
            output = output.unflatten(0, (-1, views)).mean(1)
        counts = task.counts(output, given.targets.to(ranks.device, non_blocking=True), classes)
        total = counts if total is None else total + counts
    if total is None:
        total = torch.zeros_like(task.counts(torch.zeros(1, classes), torch.zeros(1, dtype=torch.long), classes))
    model.train(mode)
    torch.backends.cudnn.benchmark = searching
    problems = ranks.gathered(problems)
    tell = say or functools.partial(print, file=sys.stderr)
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
            output: Tensor = model(prepare(images))
        return output.float().cpu()

    shown = task.picture(samples, predict)
    model.train(mode)
    return shown


class _Listed(torch.utils.data.Sampler[list[Draw]]):
    """Batches that are known."""

    def __init__(self, batches: list[list[Draw]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Draw]]:
        return iter(self.batches)


def restored(
    folder: Path, task_of: Callable[[Config], Task], device: torch.device, change: Callable[[Config], Config]
) -> tuple[Config, nn.Module, Task]:
    """A run's config, changed; its network with the weights of the last checkpoint, averaged ones if there are any; its task."""
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
    return config, model.eval(), task


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
        with contextlib.suppress(ImportError):
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its own dependencies' deprecations
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)
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

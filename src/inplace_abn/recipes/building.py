"""What a config says in terms of torch: the network and what it starts from, the optimizer and its rate, how it is computed."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .. import checkpoints
from ..activations import ACTIVATIONS
from ..models.residual import NormAct
from ..modules import ABN, InPlaceABN, InPlaceABNSync
from ..recompute import recompute
from ..training import param_groups
from . import storage
from .config import Config, Network, Optim
from .data import Samples

__all__ = ["Task", "autocast", "averaged", "built", "norm_act", "optimizer", "preparation", "rate", "settle"]
__all__ += ["start_body", "weights"]


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

    def output(self, model: nn.Module, x: Tensor, say: Callable[[str], None]) -> Tensor:
        """What the network gives in an evaluation; ``say`` gets what a person should know of it."""
        ...

    def nothing(self, classes: int) -> Tensor:
        """The counts of no sample."""
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
        factor: float = optim.drop ** (step // per_epoch // optim.drop_every)
        return optim.lr * factor
    if optim.schedule == "linear":
        return optim.lr + (optim.final_lr - optim.lr) * step / max(steps - 1, 1)
    if optim.schedule == "poly":
        factor = (1 - step / steps) ** optim.power
        return optim.lr * factor
    if optim.schedule == "cosine":
        return optim.final_lr + (optim.lr - optim.final_lr) * 0.5 * (1 + math.cos(math.pi * step / steps))
    return optim.lr


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

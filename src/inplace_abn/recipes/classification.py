"""Image classification: the rows of the paper's Tables 1 and 2 by name, and recipes for real machines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import create
from . import labelled
from .building import norm_act, start_body
from .config import Augment, Config, Data, Network, Optim, Train
from .small import Small

__all__ = ["RECIPES", "Classification"]


class Classification:
    """One class per image."""

    def __init__(self, view: str = "centre") -> None:
        if view not in labelled.VIEWS:
            raise ValueError(f"view {view!r} is unknown; one of: {', '.join(labelled.VIEWS)}")
        self.view = view

    def build(self, config: Config, classes: int) -> nn.Module:
        """The network with as many classes."""
        make = Small if config.network.name == "small" else functools.partial(create, config.network.name)
        model: nn.Module = make(classes=classes, norm_act=norm_act(config.network))
        if config.network.body:
            features = make(classes=0, norm_act=norm_act(config.network))
            start_body(features, config.network)
            model.load_state_dict(features.state_dict(), strict=False)
        return model

    def samples(self, config: Config, split: str) -> labelled.Images:
        """The labelled images."""
        return labelled.classification(config, split, self.view)

    def loss(self, config: Config, output: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in float32."""
        return F.cross_entropy(output.float(), targets, label_smoothing=config.loss.smoothing)

    def output(self, model: nn.Module, x: Tensor, say: Callable[[str], None]) -> Tensor:
        """Logits."""
        logits: Tensor = model(x)
        return logits

    def nothing(self, classes: int) -> Tensor:
        """The counts of no image."""
        return torch.zeros(4, dtype=torch.double)

    def counts(self, output: Tensor, targets: Tensor, classes: int) -> Tensor:
        """Images, those whose class came first, those whose class was among the first five, and the summed loss."""
        best = output.topk(min(5, classes)).indices == targets[:, None]
        loss = F.cross_entropy(output, targets, reduction="sum")
        few = torch.tensor([float(len(targets))], device=output.device)
        return torch.cat([few, best[:, :1].sum().view(1), best.any(1).sum().view(1), loss.view(1)]).double()

    def scores(self, counts: Tensor, classes: Sequence[str]) -> dict[str, float]:
        """Shares of images, and the mean loss."""
        images, first, five, loss = counts.tolist()
        if not images:
            raise ValueError("there is nothing to evaluate: no image of the validation data could be read")
        return {"top1": first / images, "top5": five / images, "val_loss": loss / images}

    def picture(self, samples: labelled.Images, predict: Callable[[Tensor], Tensor]) -> None:
        """Nothing to look at."""


# The paper's protocol (§4.1): four cards; batch sizes are of all of them. The rate stays 0.1 at every batch size.
IMAGENET = Config(
    "",
    "classification",
    Network("resnext101"),
    Data("folder", workers=8),
    Augment(),
    optim=Optim(),
    train=Train(epochs=90, batch=256, world_size=4),
)


def _paper(name: str, network: str, norm: str, batch: int, activation: str = "leaky_relu") -> Config:
    optim = Optim(schedule="linear", final_lr=1e-6) if network.startswith("wide") else Optim()
    train = replace(IMAGENET.train, batch=batch)
    return replace(IMAGENET, recipe=name, network=Network(network, norm, activation), optim=optim, train=train)


def _small(name: str, network: Network, source: Data, augment: Augment, optim: Optim, train: Train) -> Config:
    return Config(name, "classification", network, source, augment, optim=optim, train=train)


_COSINE = Optim(lr=0.1, weight_decay=5e-4, decay="weights", schedule="cosine", warmup=1)

RECIPES: tuple[Config, ...] = (
    _paper("resnext101-stdbn-relu-256", "resnext101", "standard", 256, "relu"),
    _paper("resnext101-stdbn-256", "resnext101", "standard", 256),
    _paper("resnext101-inplace-512", "resnext101", "inplace", 512),
    _paper("resnext152-inplace-256", "resnext152", "inplace", 256),
    _paper("wide-resnet38-inplace-256", "wide_resnet38", "inplace", 256),
    _paper("resnext101-sync-256", "resnext101", "sync", 256),
    _small(
        "embedded-classify",
        Network("small"),
        Data("scenes", resize=48, crop=44, evaluate_resize=0, evaluate_crop=0, workers=0, cache=True, length=512),
        Augment(colour=0.0, lighting=0.0),
        Optim("adamw", lr=4e-3, weight_decay=1e-2, decay="weights", schedule="cosine", warmup=1),
        Train(epochs=12, batch=32, log_every=32, evaluate_every=4),
    ),
    _small(
        "imagenette",
        Network("wide_resnet38"),
        Data("folder", resize=0, crop=128, evaluate_resize=0, evaluate_crop=128, workers=12, cache=True),
        Augment(pad=8, colour=0.0, lighting=0.0),
        replace(_COSINE, lr=0.02),
        Train(epochs=16, batch=256, dtype="bfloat16", evaluate_every=4),
    ),
    _small(
        "fashion-mnist",
        Network("resnet18"),
        Data("idx", resize=0, crop=32, evaluate_resize=0, evaluate_crop=32, workers=4),
        Augment(pad=4, colour=0.0, lighting=0.0),
        _COSINE,
        Train(epochs=15, batch=128),
    ),
)

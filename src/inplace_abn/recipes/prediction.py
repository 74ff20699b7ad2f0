"""Labels for images that have none, by a run of one's own or by the released Vistas network."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checkpoints
from ..models import deeplabv3
from ..modules import InPlaceABN
from .building import preparation
from .classes import Classes, plain, vistas_classes
from .config import Config, Data
from .evaluation import restored
from .files import SUFFIXES, read_image
from .segmentation import Segmentation, predicted

__all__ = ["Predictor", "images_in", "load", "write"]

# Colours of Vistas' images, and the side that the released network was meant for.
VISTAS = Data("vistas", mean=(0.41738699, 0.45732192, 0.46886091), std=(0.25685097, 0.26509955, 0.29067996))
VISTAS_LONGEST = 2048


@dataclass
class Predictor:
    """A network with what goes in front of it and what its outputs mean."""

    model: nn.Module
    labels: Classes
    prepare: Callable[[Tensor], Tensor]
    longest: int = 0
    smallest: int = 0

    def __call__(
        self, path: Path, scales: Sequence[float], flip: bool, fusion: str, task: Segmentation
    ) -> tuple[Tensor, Tensor]:
        """Classes and confidences of an image file, at its own size; decided at the longest or smallest side that is given."""
        try:
            image = read_image(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        size = image.shape[1:]
        x = self.prepare(image[None])
        factor = self.longest / max(size) if self.longest else self.smallest / min(size) if self.smallest else 1
        if factor != 1:
            x = F.interpolate(x, [max(1, round(factor * side)) for side in size], mode="bilinear", antialias=True)
        tell = functools.partial(print, file=sys.stderr)
        classes, sure = predicted(lambda view: task.logits(self.model, view, tell), x, scales, flip, fusion)
        at = [F.interpolate(t[:, None].float(), size, mode="nearest-exact")[0, 0] for t in (classes, sure)]
        return at[0].to(torch.uint8).cpu(), at[1].cpu()


def load(source: Path, vistas: Path | None, device: torch.device) -> Predictor:
    """A run's network; or, with the config of Vistas, the released one."""
    if vistas is not None:
        labels = vistas_classes(vistas)
        model = deeplabv3("wide_resnet38_a2", len(labels.names), InPlaceABN, 8, pooling_size=(84, 84), upsample=False)
        checkpoints.load(model, source)
        prepare = preparation(Config("vistas", "segmentation", data=VISTAS), device)
        return Predictor(model.to(device).eval(), labels, prepare, VISTAS_LONGEST)
    config, network, state = restored(source, task_of, device, lambda config: config)
    labels = plain(state["classes"], [tuple(colour) for colour in state["colours"]])
    return Predictor(network, labels, preparation(config, device), smallest=config.data.evaluate_resize)


def task_of(config: Config) -> Segmentation:
    """Segmentation, or an error."""
    if config.task != "segmentation":
        raise ValueError(f"this is a run of {config.task}; prediction is of segmentation")
    return Segmentation()


def images_in(path: Path) -> list[Path]:
    """An image, or those in a folder."""
    found = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    if not found or not found[0].is_file():
        raise ValueError(f"no images in {path}; known are {' '.join(SUFFIXES)}")
    return found


def write(stem: Path, classes: Tensor, sure: Tensor, output: str, labels: Classes) -> None:
    """``NAME.png`` with the classes, of a palette or plain; for "prob", ``NAME_prob.png`` with confidences of 0 to 255."""
    from PIL import Image

    size = (classes.shape[1], classes.shape[0])
    picture = Image.frombytes("P" if output == "palette" else "L", size, classes.contiguous().numpy().tobytes())
    if output == "palette":
        picture.putpalette([part for colour in labels.colours for part in colour])
    picture.save(stem.with_name(f"{stem.name}.png"))
    if output == "prob":
        confidence = (255 * sure).round().to(torch.uint8).contiguous()
        Image.frombytes("L", size, confidence.numpy().tobytes()).save(stem.with_name(f"{stem.name}_prob.png"))

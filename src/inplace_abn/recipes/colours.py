"""Images in other colours and under other lights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..outside import torchvision
from .config import Augment

__all__ = ["recolouring"]

# Principal components of the colours of ImageNet (Krizhevsky et al.): standard deviations and directions, for RGB in [0, 1].
LIGHT = torch.tensor([0.2175, 0.0188, 0.0045])
DIRECTIONS = torch.tensor([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


def recolouring(augment: Augment) -> list[Callable[[Tensor], Tensor]]:
    """What to do to a uint8 image, in turn: saturation, brightness and contrast, then the light; nothing where they are 0."""
    steps: list[Callable[[Tensor], Tensor]] = []
    if augment.colour:
        steps.append(torchvision("transforms.v2").ColorJitter(augment.colour, augment.colour, augment.colour))
    if augment.lighting:
        steps.append(functools.partial(lit, spread=augment.lighting))
    return steps


def lit(image: Tensor, spread: float) -> Tensor:
    """A uint8 image under another light: moved along the principal colours of ImageNet."""
    shift = DIRECTIONS @ (spread * torch.randn(3) * LIGHT)
    return (image + (255 * shift).view(3, 1, 1)).round_().clamp_(0, 255).to(torch.uint8)

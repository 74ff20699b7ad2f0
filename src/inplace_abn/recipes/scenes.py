"""Embedded data: street scenes with pixel labels, drawn on the fly, the same on every machine.

Sky, buildings with windows, a road in perspective with sidewalks and markings, trees, cars, people, poles, and now and then the
bonnet of the car that carries the camera (void). Colours, light, haze, shadows, blur and noise vary from scene to scene so that
no class is known by its colour: a small network does not get all pixels right.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CLASSES", "COLOURS", "KINDS", "VOID", "scene"]

CLASSES = ("sky", "building", "road", "sidewalk", "vegetation", "car", "person", "pole")
# One colour per class, to show labels with.
COLOURS = (
    (70, 130, 180),
    (70, 70, 70),
    (128, 64, 128),
    (244, 35, 232),
    (107, 142, 35),
    (0, 0, 142),
    (220, 20, 60),
    (250, 170, 30),
)
VOID = 255
# Kinds of scenes: trees, poles, people or cars stand about, mostly.
KINDS = ("avenue", "signs", "crowd", "traffic")


def scene(
    index: int, size: tuple[int, int] = (64, 128), seed: int = 0, kind: str | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one scene: things further away first, nearer ones over them. Of a kind, three of four things are that kind's.

    An image of shape (3, H, W) in [0, 1] and labels of shape (H, W), always the same for an index and a seed.

    >>> image, label = scene(3)
    >>> image.shape, label.shape
    (torch.Size([3, 64, 128]), torch.Size([64, 128]))
    """
    canvas = _Canvas(size, torch.Generator().manual_seed(seed * 1_000_003 + index))
    horizon = canvas.number(0.35, 0.55)
    canvas.sky(horizon)
    canvas.buildings(horizon)
    canvas.ground(horizon)
    for depth in sorted(canvas.number(0.05, 1.0) for _ in range(canvas.count(5, 10))):
        mostly = kind is not None and canvas.number(0, 1) < 0.75
        canvas.thing(horizon, depth, KINDS.index(kind) if mostly and kind is not None else canvas.count(0, 3))
    if canvas.number(0, 1) < 0.3:
        canvas.bonnet()
    return canvas.photograph(), canvas.label


class _Canvas:
    """An image and its labels, with a random source of its own. Coordinates run from 0 to 1 downwards and rightwards."""

    def __init__(self, size: tuple[int, int], source: torch.Generator) -> None:
        self.source = source
        height, width = size
        self.v = ((torch.arange(height) + 0.5) / height).view(-1, 1).expand(size)
        self.u = ((torch.arange(width) + 0.5) / width).view(1, -1).expand(size)
        self.aspect = width / height
        self.image = torch.zeros(3, *size)
        self.label = torch.full(size, VOID, dtype=torch.long)

    def number(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.source))

    def count(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.source))

    def colour(self, red: float, green: float, blue: float, spread: float) -> Tensor:
        base = torch.tensor([red, green, blue]) + spread * (torch.rand(3, generator=self.source) - 0.5)
        return base.clamp(0.02, 0.98).view(3, 1, 1)

    def paint(self, where: Tensor, name: str, colour: Tensor, grain: float) -> None:
        """Set a class and a colour, with grain of the class's own roughness."""
        noise = grain * (torch.rand(self.label.shape, generator=self.source) - 0.5)
        self.image = torch.where(where, colour + noise, self.image)
        self.label = torch.where(where, CLASSES.index(name), self.label)

    def sky(self, horizon: float) -> None:
        haze = (self.v / horizon).clamp(0, 1)
        blue, pale = self.colour(0.45, 0.6, 0.85, 0.4), self.colour(0.75, 0.78, 0.8, 0.3)
        self.paint(self.v < 2, "sky", blue * (1 - haze) + pale * haze, 0.03)
        for _ in range(self.count(0, 3)):
            u, v, r = self.number(0, 1), self.number(0, horizon), self.number(0.05, 0.2)
            cloud = ((self.u - u) / r) ** 2 + ((self.v - v) / (0.4 * r)) ** 2 < 1
            self.paint(cloud, "sky", self.colour(0.85, 0.85, 0.87, 0.2), 0.04)

    def buildings(self, horizon: float) -> None:
        left = self.number(-0.1, 0.05)
        while left < 1:
            width = self.number(0.08, 0.3)
            top = horizon * self.number(0.1, 0.95)
            if self.number(0, 1) < 0.8:
                inside = (self.u >= left) & (self.u < left + width) & (self.v >= top)
                self.paint(inside, "building", self.colour(0.5, 0.45, 0.42, 0.6), 0.06)
                across, down = self.number(20, 45), self.number(14, 30)
                panes = ((self.u * across) % 1 < 0.5) & ((self.v * down) % 1 < 0.55)
                self.paint(inside & panes, "building", self.colour(0.35, 0.4, 0.5, 0.6), 0.05)
            left += width * self.number(0.9, 1.2)

    def ground(self, horizon: float) -> None:
        depth = ((self.v - horizon) / (1 - horizon)).clamp(0, 1)
        below = self.v >= horizon
        self.paint(below, "sidewalk", self.colour(0.52, 0.5, 0.48, 0.25), 0.1)
        if self.number(0, 1) < 0.5:
            verge = below & (self.u > self.number(0.6, 0.9) + 0.2 * depth)
            self.paint(verge, "vegetation", self.colour(0.35, 0.45, 0.25, 0.25), 0.2)
        centre, narrow, wide = self.number(0.35, 0.65), self.number(0.02, 0.1), self.number(0.35, 0.7)
        off = (self.u - centre) / (narrow + wide * depth)
        self.paint(below & (off.abs() < 1), "road", self.colour(0.42, 0.42, 0.44, 0.25), 0.08)
        dashes = (off.abs() < 0.04) & ((3 / (depth + 0.08)) % 1 < 0.5)
        self.paint(below & dashes, "road", self.colour(0.8, 0.8, 0.75, 0.2), 0.05)

    def thing(self, horizon: float, depth: float, kind: int) -> None:
        """A tree (0), pole, person or car (3) whose foot stands on the ground at this depth (0 far, 1 near)."""
        foot = horizon + (1 - horizon) * (0.08 + 0.8 * depth)
        size = 0.06 + 0.5 * depth
        u = self.number(0, 1)
        if kind == 0:
            height, crown = size * self.number(0.9, 1.6), size * self.number(0.25, 0.5)
            trunk = (
                ((self.u - u).abs() < 0.012 + 0.03 * depth / self.aspect) & (self.v < foot) & (self.v > foot - height)
            )
            self.paint(trunk, "vegetation", self.colour(0.35, 0.28, 0.2, 0.2), 0.1)
            ragged = 1 + 0.5 * (torch.rand(self.label.shape, generator=self.source) - 0.5)
            round_ = ((self.u - u) * self.aspect / crown) ** 2 + ((self.v - foot + height) / crown) ** 2
            self.paint(round_ < ragged, "vegetation", self.colour(0.3, 0.42, 0.22, 0.3), 0.25)
        elif kind == 1:
            half = (0.01 + 0.02 * depth) / self.aspect + 0.003
            height = size * self.number(1.2, 2.2)
            rod = ((self.u - u).abs() < half) & (self.v < foot) & (self.v > foot - height)
            sign = ((self.u - u).abs() < 3 * half) & ((self.v - foot + height).abs() < 3 * half * self.aspect)
            self.paint(rod, "pole", self.colour(0.45, 0.45, 0.45, 0.4), 0.04)
            self.paint(sign, "pole", self.colour(0.6, 0.5, 0.4, 0.8), 0.04)
        elif kind == 2:
            height, half = 0.55 * size, 0.11 * size / self.aspect
            body = ((self.u - u) / half) ** 2 + ((self.v - foot + 0.4 * height) / (0.42 * height)) ** 2 < 1
            head = ((self.u - u) / (0.6 * half)) ** 2 + ((self.v - foot + 0.9 * height) / (0.12 * height)) ** 2 < 1
            self.paint(body, "person", self.colour(0.45, 0.4, 0.4, 0.9), 0.06)
            self.paint(head, "person", self.colour(0.6, 0.5, 0.42, 0.5), 0.04)
        else:
            height, half = 0.4 * size, 0.42 * size / self.aspect
            colour = self.colour(0.45, 0.45, 0.47, 0.9)
            low = ((self.u - u).abs() < half) & (self.v < foot) & (self.v > foot - 0.6 * height)
            high = ((self.u - u).abs() < 0.65 * half) & (self.v < foot - 0.5 * height) & (self.v > foot - height)
            self.paint(low | high, "car", colour, 0.04)
            glass = (
                ((self.u - u).abs() < 0.55 * half) & (self.v < foot - 0.55 * height) & (self.v > foot - 0.92 * height)
            )
            self.paint(glass, "car", self.colour(0.3, 0.35, 0.4, 0.3), 0.04)
            wheels = (
                (((self.u - u).abs() - 0.65 * half).abs() < 0.18 * half)
                & (self.v < foot + 0.02)
                & (self.v > foot - 0.2 * height)
            )
            self.paint(wheels, "car", self.colour(0.12, 0.12, 0.12, 0.1), 0.05)

    def bonnet(self) -> None:
        where = self.v > 1 - self.number(0.03, 0.1) + 0.25 * (self.u - 0.5) ** 2
        self.image = torch.where(where, self.colour(0.3, 0.3, 0.32, 0.5), self.image)
        self.label = torch.where(where, VOID, self.label)

    def photograph(self) -> Tensor:
        """Light, a shadow, haze, blur and noise."""
        image = self.image
        slope, at = self.number(-1.5, 1.5), self.number(0, 1)
        image = torch.where(self.u + slope * (self.v - 0.7) < at, image * self.number(0.6, 1.0), image)
        haze = self.number(0, 0.3)
        image = image * (1 - haze) + haze * self.colour(0.6, 0.62, 0.65, 0.2)
        image = image * self.number(0.5, 1.2) * self.colour(1, 1, 1, 0.15)
        blurred = torch.nn.functional.avg_pool2d(image[None], 3, 1, 1, count_include_pad=False)[0]
        image = torch.lerp(image, blurred, self.number(0, 1))
        image = image + self.number(0.01, 0.07) * torch.randn(image.shape, generator=self.source)
        return image.clamp(0, 1)

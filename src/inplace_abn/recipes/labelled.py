"""Images with a class each: ImageNet's folders, MNIST's files, embedded scenes; how they are varied and looked at."""

from __future__ import annotations

import functools
import gzip
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..outside import torchvision
from .config import Config
from .data import Draw, Problem, all_of, found, permuted, root_of, seeded
from .files import SUFFIXES, read_image
from .scenes import KINDS, scene

__all__ = ["VIEWS", "Images", "classification"]

# Principal components of the colours of ImageNet (Krizhevsky et al.): standard deviations and directions, for RGB in [0, 1].
LIGHT = torch.tensor([0.2175, 0.0188, 0.0045])
DIRECTIONS = torch.tensor([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


# A way to get an image, and its class.
Item = tuple[Callable[[], Tensor], int]


class Images:
    """Labelled images, varied for training or cut for evaluation; what cannot be read is treated as the config says.

    Args:
        items: a way to get each image, and its class.
        names: what to call the items in messages.
        classes: names of the classes.
        config: of the run.
        view: None for training; else what makes of an image the one that is evaluated, or several stacked.
    """

    def __init__(
        self,
        items: Sequence[Item],
        names: Sequence[str],
        classes: Sequence[str],
        config: Config,
        view: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.items, self.names, self.classes, self.config = items, names, classes, config
        self.view = view if view is not None else augmentation(config)
        self.training = view is None
        self.alike = config.data.evaluate_crop > 0 or config.data.kind == "scenes"
        self.cache: list[Tensor | Problem] | None = None
        if config.data.cache and self.training:
            self.cache = all_of(self._read, len(items), config)

    def __len__(self) -> int:
        return len(self.items)

    def order(self, seed: int, epoch: int) -> Sequence[Draw]:
        """All once, shuffled in training."""
        return permuted(len(self), seed, epoch) if self.training else [Draw(i, 0) for i in range(len(self))]

    def _read(self, index: int) -> Tensor | Problem:
        if self.cache is not None:
            return self.cache[index]
        try:
            return self.items[index][0]()
        except (OSError, ValueError) as error:
            return Problem(self.names[index], str(error) or type(error).__name__)

    def __getitem__(self, draw: Draw) -> tuple[Tensor | None, int, list[Problem]]:
        index, image, problems = found(draw, self._read, len(self), self.config, self.training)
        if image is None:
            return None, -1, problems
        with seeded(draw.seed):
            return self.view(image), self.items[index][1], problems


def augmentation(config: Config) -> Callable[[Tensor], Tensor]:
    """How a training image is made of a decoded one."""
    v2 = torchvision("transforms.v2")
    data, augment = config.data, config.augment
    steps: list[Any] = []
    if augment.crop == "resized":
        steps.append(v2.RandomResizedCrop(data.crop, antialias=True))
    else:
        if data.resize:
            steps.append(v2.Resize(data.resize, antialias=True))
        steps.append(v2.RandomCrop(data.crop, padding=augment.pad or None, pad_if_needed=True))
    if augment.flip:
        steps.append(v2.RandomHorizontalFlip())
    if augment.colour:
        steps.append(v2.ColorJitter(augment.colour, augment.colour, augment.colour))
    if augment.lighting:
        steps.append(functools.partial(lit, spread=augment.lighting))
    composed: Callable[[Tensor], Tensor] = v2.Compose(steps)
    return composed


def lit(image: Tensor, spread: float) -> Tensor:
    """A uint8 image under another light: moved along the principal colours of ImageNet."""
    shift = DIRECTIONS @ (spread * torch.randn(3) * LIGHT)
    return (image + (255 * shift).view(3, 1, 1)).round_().clamp_(0, 255).to(torch.uint8)


def centre(config: Config, resize: int | None = None, crop: int | None = None) -> Callable[[Tensor], Tensor]:
    """The view of an evaluation: smallest side to ``resize``, then the centre, both as the config says unless given."""
    v2 = torchvision("transforms.v2")
    resize = config.data.evaluate_resize if resize is None else resize
    crop = config.data.evaluate_crop if crop is None else crop
    steps = [v2.Resize(resize, antialias=True)] if resize else []
    composed: Callable[[Tensor], Tensor] = v2.Compose(
        [*steps, *([v2.CenterCrop(crop)] if crop else [])] or [v2.Identity()]
    )
    return composed


def ten(config: Config) -> Callable[[Tensor], Tensor]:
    """Four corners and the centre, and their mirror images, stacked."""
    v2 = torchvision("transforms.v2")
    if not config.data.evaluate_resize or config.data.evaluate_resize < config.data.evaluate_crop:
        raise ValueError(
            f"ten crops of {config.data.evaluate_crop}² need an image that is larger: set data.evaluate_resize and "
            "data.evaluate_crop"
        )
    cut = [v2.Resize(config.data.evaluate_resize, antialias=True), v2.TenCrop(config.data.evaluate_crop), _stacked]
    composed: Callable[[Tensor], Tensor] = v2.Compose(cut)
    return composed


def _stacked(views: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(views))


# Ways to look at an image in an evaluation: the config's own; the paper's ten crops; its larger centre, smallest side 320.
VIEWS: dict[str, Callable[[Config], Callable[[Tensor], Tensor]]] = {
    "centre": centre,
    "ten": ten,
    "320": lambda config: centre(config, 320, 320),
}


def classification(config: Config, split: str, view: str = "centre") -> Images:
    """The data set of a classification recipe: split "train" or "val"."""
    if config.data.kind == "scenes":
        # Drawn at the size they are wanted in.
        return _scene_kinds(config, split, None if split == "train" else centre(config, 0, 0))
    look = None if split == "train" else VIEWS[view](config)
    root = root_of(config)
    if config.data.kind == "idx":
        return _idx(root, config, split, look)
    return _folder(root, config, "train" if split == "train" else config.data.validation, look)


def _folder(root: Path, config: Config, split: str, look: Any) -> Images:
    """The ImageNet layout: split/class/image."""
    classes = _classes(root / "train")
    items, paths = list[Item](), list[Path]()
    if split != "train" and _classes(root / split) != classes:
        odd = sorted(set(_classes(root / split)) ^ set(classes))
        raise ValueError(f"{root / 'train'} and {root / split} differ in classes: {', '.join(odd[:5])}")
    for label, name in enumerate(classes):
        found = sorted(p for p in (root / split / name).rglob("*") if p.suffix.lower() in SUFFIXES)
        if not found and split == "train":
            raise ValueError(f"no images in {root / split / name}; known are {' '.join(SUFFIXES)}")
        for path in found:
            paths.append(path)
            items.append((functools.partial(read_image, path), label))
    return Images(items, [str(path) for path in paths], classes, config, look)


def _classes(folder: Path) -> list[str]:
    found = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    if not found:
        raise ValueError(f"no folders of classes in {folder}; the layout is {folder.name}/CLASS/image.jpg")
    return found


def _idx(root: Path, config: Config, split: str, look: Any) -> Images:
    """MNIST's layout: one file of images, one of labels, as idx, compressed or not."""
    stem = "train" if split == "train" else "t10k"
    images, labels = (_read_idx(root, f"{stem}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images but {len(labels)} labels in {root}")
    items: list[Item] = [(functools.partial(_gray, images, i), int(label)) for i, label in enumerate(labels)]
    names = [f"{stem} image {i}" for i in range(len(items))]
    return Images(items, names, [str(i) for i in range(int(labels.max()) + 1)], config, look)


def _gray(images: Tensor, index: int) -> Tensor:
    return images[index].expand(3, -1, -1)


def _read_idx(root: Path, name: str) -> Tensor:
    for path in (root / name, root / f"{name}.gz"):
        if path.exists():
            try:
                raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            except (EOFError, zlib.error) as error:
                raise ValueError(f"{path} is damaged: {error}") from error
            break
    else:
        raise ValueError(f"neither {name} nor {name}.gz is in {root}")
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes")
    sizes = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    data = torch.frombuffer(bytearray(raw[4 + 4 * raw[3] :]), dtype=torch.uint8)
    if data.numel() != torch.Size(sizes).numel():
        raise ValueError(f"{path} says {sizes} but holds {data.numel()} bytes")
    return data.view(sizes)


def _scene_kinds(config: Config, split: str, look: Any) -> Images:
    """Embedded scenes, by what there is most of in them."""
    length = config.data.length if split == "train" else config.data.length // 4
    size = (config.data.resize, config.data.resize)
    seed = 1 if split == "train" else 2
    items: list[Item] = [(functools.partial(_drawn, i, size, seed), i % len(KINDS)) for i in range(length)]
    return Images(items, [f"scene {i}" for i in range(length)], KINDS, config, look)


def _drawn(index: int, size: tuple[int, int], seed: int) -> Tensor:
    image, _ = scene(index, size, seed, KINDS[index % len(KINDS)])
    return (255 * image).round_().to(torch.uint8)

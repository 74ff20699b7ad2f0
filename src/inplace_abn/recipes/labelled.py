"""Images with a class each: ImageNet's folders, MNIST's files, embedded scenes; how they are varied and looked at."""

from __future__ import annotations

import functools
import gzip
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..outside import torchvision
from .colours import recolouring
from .config import Config
from .data import Draw, Permuted, Problem, all_of, found, root_of, seeded
from .files import SUFFIXES, Paths, images_below, read_image
from .scenes import KINDS, scene

__all__ = ["VIEWS", "Images", "classification"]


class Images:
    """Labelled images, varied for training or cut for evaluation; what cannot be read is treated as the config says.

    Args:
        names: what to call the images in messages.
        read: gives the image of an index.
        labels: the class of every image.
        classes: names of the classes.
        config: of the run.
        view: None for training; else what makes of an image the one that is evaluated, or several stacked.
    """

    def __init__(
        self,
        names: Sequence[str],
        read: Callable[[int], Tensor],
        labels: Sequence[int],
        classes: Sequence[str],
        config: Config,
        view: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.names, self.read, self.labels, self.classes, self.config = names, read, labels, classes, config
        self.view = view if view is not None else augmentation(config)
        self.training = view is None
        self.alike = config.data.evaluate_crop > 0 or config.data.kind == "scenes"
        self.cache: list[Tensor | Problem] | None = None
        if config.data.cache and self.training:
            self.cache = all_of(self._get, len(names), config)

    def __len__(self) -> int:
        return len(self.names)

    def order(self, seed: int, epoch: int) -> Sequence[Draw]:
        """All once, shuffled in training."""
        return Permuted(len(self), seed, epoch) if self.training else [Draw(i, 0) for i in range(len(self))]

    def _get(self, index: int) -> Tensor | Problem:
        if self.cache is not None:
            return self.cache[index]
        try:
            return self.read(index)
        except (OSError, ValueError) as error:
            return Problem(self.names[index], str(error) or type(error).__name__)

    def __getitem__(self, draw: Draw) -> tuple[Tensor | None, int, list[Problem]]:
        index, image, problems = found(draw, self._get, len(self), self.config, self.training)
        if image is None:
            return None, -1, problems
        with seeded(draw.seed):
            return self.view(image), self.labels[index], problems


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
    composed: Callable[[Tensor], Tensor] = v2.Compose([*steps, *recolouring(augment)])
    return composed


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
    if split != "train" and _classes(root / split) != classes:
        odd = sorted(set(_classes(root / split)) ^ set(classes))
        raise ValueError(f"{root / 'train'} and {root / split} differ in classes: {', '.join(odd[:5])}")
    labels = array("q")

    def listed() -> Iterator[str]:
        for label, name in enumerate(classes):
            found = images_below(root / split / name)
            if not found and split == "train":
                raise ValueError(f"no images in {root / split / name}; known are {' '.join(SUFFIXES)}")
            labels.extend([label] * len(found))
            yield from map(str, found)

    paths = Paths(listed())
    return Images(paths, functools.partial(_opened, paths), labels, classes, config, look)


def _opened(paths: Paths, index: int) -> Tensor:
    return read_image(Path(paths[index]))


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
    names = [f"{stem} image {i}" for i in range(len(labels))]
    classes = [str(i) for i in range(int(labels.max()) + 1)]
    return Images(names, functools.partial(_gray, images), labels.tolist(), classes, config, look)


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
    labels = [i % len(KINDS) for i in range(length)]
    read = functools.partial(_drawn, size=size, seed=seed)
    return Images([f"scene {i}" for i in range(length)], read, labels, KINDS, config, look)


def _drawn(index: int, size: tuple[int, int], seed: int) -> Tensor:
    image, _ = scene(index, size, seed, KINDS[index % len(KINDS)])
    return (255 * image).round_().to(torch.uint8)

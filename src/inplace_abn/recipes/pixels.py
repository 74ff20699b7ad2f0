"""Images with a class for every pixel: Cityscapes, COCO-Stuff, Mapillary Vistas, folders of one's own, and embedded scenes.

Every set checks itself: pairs when it is listed, sizes and values when a file is read, before any kernel sees them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import storage
from .classes import CAMVID, CITYSCAPES, COCO_STUFF, Classes, hues, plain, vistas_classes
from .colours import recolouring
from .config import Config
from .data import Draw, Permuted, Problem, all_of, found, number, root_of, seeded
from .files import Paths, decoded, images_below, read_image
from .scenes import CLASSES, COLOURS, VOID, scene

__all__ = ["Pixels", "segmentation"]


def segmentation(config: Config, split: str) -> Pixels:
    """The data set of a segmentation recipe: split "train", or "val" for the part that is evaluated."""
    data, training = config.data, split == "train"
    part = "train" if training else data.validation
    if data.kind == "scenes":
        length = data.length if training else data.length // 4
        size, seed = (data.resize, 2 * data.resize), 1 if training else 2
        read = functools.partial(_drawn, size=size, seed=seed)
        titles = [f"scene {i}" for i in range(length)]
        return Pixels(titles, read, plain(CLASSES, COLOURS), config, training, f"scenes {size} {seed} {length}")
    root = root_of(config)
    listing: dict[str, Callable[[Path, str], tuple[list[tuple[Path, Path]], Classes]]] = {
        "pairs": _pairs,
        "camvid": lambda root, part: (_matched(root / part / "images", root / part / "labels", str.lower), CAMVID),
        "cityscapes": _cityscapes,
        "coco-stuff": _coco_stuff,
        "vistas": _vistas,
    }
    pairs, classes = listing[data.kind](root, part)
    images, labels = Paths(str(image) for image, _ in pairs), Paths(str(label) for _, label in pairs)
    read = functools.partial(_read_pair, images, labels, classes)
    identity = "\n".join(f"{label} {label.stat().st_size}" for _, label in pairs)
    return Pixels(images, read, classes, config, training, identity)


def _matched(images: Path, labels: Path, key: Callable[[str], str]) -> list[tuple[Path, Path]]:
    """Pairs of the files in two folders whose names agree but for the suffix, or whatever ``key`` leaves of them."""
    sides = []
    for folder in (images, labels):
        files = images_below(folder)
        sides.append({key(str(p.relative_to(folder).with_suffix(""))): p for p in files})
        if len(sides[-1]) < len(files):
            raise ValueError(f"{folder} has files that differ in their suffix alone")
    if not sides[0]:
        raise ValueError(f"no images in {images}")
    for mine, other, folder in ((sides[0], sides[1], labels), (sides[1], sides[0], images)):
        lonely = sorted(mine.keys() - other.keys())
        if lonely:
            listed = ", ".join(str(mine[name]) for name in lonely[:5])
            raise ValueError(f"{len(lonely)} files have no partner in {folder}: {listed}")
    return [(sides[0][name], sides[1][name]) for name in sorted(sides[0])]


def _pairs(root: Path, part: str) -> tuple[list[tuple[Path, Path]], Classes]:
    """``part/images``, ``part/labels``, and ``classes.json``: {"classes": [{"name": …, "colour": [r, g, b]}, …], "void": […]}."""
    path = root / "classes.json"
    try:
        content = json.loads(path.read_text())
        names = [str(one["name"]) for one in content["classes"]]
        given = [one.get("colour") for one in content["classes"]]
        void = [int(value) for value in content.get("void", [VOID])]
    except FileNotFoundError:
        raise ValueError(
            f'{path} is missing; it says {{"classes": [{{"name": "sky", "colour": [70, 130, 180]}}, …]}}'
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} cannot be understood: {type(error).__name__}: {error}") from error
    if not names or len(names) > VOID:
        raise ValueError(f"{path} has {len(names)} classes; 1 to {VOID} can be told apart")
    wrong = [value for value in void if not len(names) <= value <= 255]
    if wrong:
        raise ValueError(f"{path}: void {wrong} are values of classes, or not bytes")
    colours = [tuple(c) if c else hue for c, hue in zip(given, hues(len(names)), strict=True)]
    if any(len(c) != 3 or not all(isinstance(v, int) and 0 <= v <= 255 for v in c) for c in colours):
        raise ValueError(f"{path}: a colour is three numbers from 0 to 255")
    return _matched(root / part / "images", root / part / "labels", str.lower), plain(names, colours, void)


def _cityscapes(root: Path, part: str) -> tuple[list[tuple[Path, Path]], Classes]:
    """``leftImg8bit/part/city/*_leftImg8bit.png`` and ``gtFine/part/city/*_gtFine_labelIds.png``."""
    images = root / "leftImg8bit" / part
    found = sorted(images.rglob("*_leftImg8bit.png"))
    if not found:
        raise ValueError(f"no *_leftImg8bit.png in {images}; the layout is the official one, leftImg8bit and gtFine")
    pairs = [
        (
            path,
            root / "gtFine" / part / path.parent.name / path.name.replace("_leftImg8bit", "_gtFine_labelIds"),
        )
        for path in found
    ]
    return _existing(pairs), CITYSCAPES


def _existing(pairs: list[tuple[Path, Path]]) -> list[tuple[Path, Path]]:
    missing = [path for pair in pairs for path in pair if not path.is_file()]
    if missing:
        raise ValueError(f"{len(missing)} files are missing: {', '.join(map(str, missing[:5]))}")
    return pairs


def _coco_stuff(root: Path, part: str) -> tuple[list[tuple[Path, Path]], Classes]:
    """``train2017/*.jpg``, ``stuff_train2017_pixelmaps/*.png``; ``train.txt`` lists the images of the task, if it is there."""
    images, labels = root / f"{part}2017", root / f"stuff_{part}2017_pixelmaps"
    listed = root / f"{part}.txt"
    names = listed.read_text().split() if listed.exists() else sorted(p.stem for p in labels.glob("*.png"))
    for name in names:
        if "/" in name or "\\" in name or name.startswith("."):
            raise ValueError(f"{listed}: {name!r} is not the name of a file in {images}")
    if not names:
        raise ValueError(f"no pixel maps in {labels}")
    stems = [Path(name).stem for name in names]
    return _existing([(images / f"{stem}.jpg", labels / f"{stem}.png") for stem in stems]), COCO_STUFF


def _vistas(root: Path, part: str) -> tuple[list[tuple[Path, Path]], Classes]:
    """``training/images``, ``training/labels`` (or ``training/v1.2/labels``) and the set's ``config.json``."""
    part = {"train": "training", "val": "validation"}.get(part, part)
    candidates = [root / name for name in ("config.json", "config_v1.2.json")]
    labels = vistas_classes(next((candidate for candidate in candidates if candidate.is_file()), candidates[0]))
    folder = root / part / "labels"
    folder = folder if folder.is_dir() else root / part / "v1.2" / "labels"
    return _matched(root / part / "images", folder, str), labels


def _drawn(index: int, size: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    image, label = scene(index, size, seed)
    return (255 * image).round_().to(torch.uint8), label.to(torch.uint8)


def _read_pair(images: Paths, labels: Paths, classes: Classes, index: int) -> tuple[Tensor, Tensor]:
    image, label = Path(images[index]), Path(labels[index])
    picture, values = read_image(image), read_label(label)
    if picture.shape[1:] != values.shape:
        sizes = ["×".join(map(str, reversed(t.shape[-2:]))) for t in (picture, values)]
        raise Fault(f"{image} has {sizes[0]} pixels, but its label {label} {sizes[1]}")
    return picture, understood(values, classes.table(), label, len(classes.names))


class Fault(Exception):
    """A data set that is wrong, rather than a file that cannot be read."""


def read_label(path: Path) -> Tensor:
    """The values of a label file, uint8 of shape (H, W); of a palette image, its indices."""
    with decoded(path) as file:
        mode, size = file.mode, (file.height, file.width)
        raw = bytearray(file.tobytes()) if mode in ("L", "P") else None
    if raw is None:
        raise Fault(f"{path} is of mode {mode}; labels have one channel of 8 bits, a class in every pixel")
    return torch.frombuffer(raw, dtype=torch.uint8).view(size)


def understood(values: Tensor, table: Tensor, path: Path, classes: int) -> Tensor:
    """Classes in place of values; a value without a meaning is an error."""
    labels = table[values.long()]
    if (labels < 0).any():
        odd = sorted(set(values[labels < 0].tolist()))
        hint = ""
        if classes in odd:
            hint = f"; are classes counted from 1 there? They are 0 to {classes - 1}"
        raise Fault(
            f"{path} has pixels of value {', '.join(map(str, odd[:5]))}, which is none of its {classes} classes nor void{hint}"
        )
    return labels.to(torch.uint8)


class Pixels:
    """Images and labels of pixels: random crops for training, whole for evaluation.

    Args:
        names: what to call the samples in messages.
        read: gives image and label of an index.
        labels: classes and colours.
        config: of the run.
        training: whether to crop.
        identity: what the labels are, for the index of classes that is kept between runs.
    """

    def __init__(
        self,
        names: Sequence[str],
        read: Callable[[int], tuple[Tensor, Tensor]],
        labels: Classes,
        config: Config,
        training: bool,
        identity: str,
    ) -> None:
        self.length, self.read, self.names, self.labels = len(names), read, names, labels
        self.config, self.training, self.identity = config, training, identity
        self.classes = labels.names
        self.alike = config.data.kind in ("scenes", "camvid", "cityscapes")
        self.recolouring = recolouring(config.augment) if training else []
        self.cache: list[Any] | None = None
        if config.data.cache and training:
            self.cache = all_of(self._get, self.length, config)
        self.images_of = self._index() if training and config.data.uniform else None

    def __len__(self) -> int:
        return self.length

    def order(self, seed: int, epoch: int) -> Sequence[Draw]:
        """All once, shuffled; or as many draws, each of a class first and then of an image that has it."""
        if not self.training:
            return [Draw(i, 0) for i in range(self.length)]
        if self.images_of is None:
            return Permuted(self.length, seed, epoch)
        generator = torch.Generator().manual_seed(number(seed, "uniform", epoch))
        there = [label for label, images in enumerate(self.images_of) if images]
        draws = []
        for place in range(self.length):
            label = there[int(torch.randint(len(there), (), generator=generator))]
            images = self.images_of[label]
            image = images[int(torch.randint(len(images), (), generator=generator))]
            # An image may be drawn several times: its place, too, tells its augmentations apart.
            draws.append(Draw(image, number(seed, epoch, image, place), label))
        return draws

    def _get(self, index: int) -> tuple[Tensor, Tensor] | Problem:
        if self.cache is not None:
            sample: tuple[Tensor, Tensor] | Problem = self.cache[index]
            return sample
        try:
            return self.read(index)
        except Fault as fault:
            raise ValueError(str(fault)) from fault
        except (OSError, ValueError) as error:
            return Problem(self.names[index], str(error) or type(error).__name__)

    def _index(self) -> list[list[int]]:
        """The images that have each class; looked up once and kept in the user's cache."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inplace_abn"
        digest = hashlib.sha256(f"{len(self.classes)}\n{self.identity}".encode()).hexdigest()[:16]
        path = cache / f"classes-{digest}.json"
        if path.is_file():
            known: list[list[int]] = json.loads(path.read_text())
            if len(known) == len(self.classes):
                return known
        present = all_of(self._present, self.length, self.config)
        images_of = [[i for i, labels in enumerate(present) if label in labels] for label in range(len(self.classes))]
        try:
            cache.mkdir(parents=True, exist_ok=True)
            storage.write(path, json.dumps(images_of).encode())
        except OSError:
            pass  # It is computed again next time.
        return images_of

    def _present(self, index: int) -> set[int]:
        sample = self._get(index)
        return set() if isinstance(sample, Problem) else set(sample[1].unique().tolist()) - {VOID}

    def __getitem__(self, draw: Draw) -> tuple[Tensor | None, Tensor | int, list[Problem]]:
        _, sample, problems = found(draw, self._get, self.length, self.config, self.training)
        if sample is None:
            return None, -1, problems
        image, label = sample
        if not self.training:
            return self.as_seen(image), label, problems
        with seeded(draw.seed):
            return *self.crop(image, label, draw.wanted), problems

    def as_seen(self, image: Tensor) -> Tensor:
        """An image that is evaluated, its smallest side as the config says; results have the size of its label."""
        sides, smallest = image.shape[1:], self.config.data.evaluate_resize
        if not smallest or self.config.data.kind == "scenes":
            return image
        return resampled(image, [round(side * smallest / min(sides)) for side in sides])

    def crop(self, image: Tensor, label: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
        """A window of random scale and place, mirrored and coloured at random, of the crop's size; void and mean colour outside.

        A scale s and a crop of C pixels is a window of C/s pixels of the image, of which ``data.resize`` is another scale. If a
        class is wanted, the window holds one of its pixels.
        """
        augment, side = self.config.augment, self.config.data.crop
        scale = augment.scale_low + (augment.scale_high - augment.scale_low) * float(torch.rand(()))
        if self.config.data.resize and self.config.data.kind != "scenes":
            scale *= self.config.data.resize / min(label.shape)
        window = max(1, round(side / scale))
        top, left = self._place(label, wanted, window)
        rows, columns = slice(max(top, 0), top + window), slice(max(left, 0), left + window)
        image, label = image[:, rows, columns], label[rows, columns]
        below, right = window - label.shape[0] - max(-top, 0), window - label.shape[1] - max(-left, 0)
        mirrored = augment.flip and bool(torch.rand(()) < 0.5)
        # Before it is padded, so that what is outside stays the mean colour, and enlarged, which would make it cost more.
        for step in self.recolouring:
            image = step(image)
        if (below, right, min(top, 0), min(left, 0)) != (0, 0, 0, 0):
            edges = [max(-left, 0), right, max(-top, 0), below]
            mean = (255 * torch.tensor(self.config.data.mean)).round().view(3, 1, 1)
            image = (F.pad(image.float() - mean, edges) + mean).to(torch.uint8)
            label = F.pad(label, edges, value=VOID)
        if window != side:
            image = resampled(image, (side, side))
            label = F.interpolate(label[None, None], (side, side), mode="nearest-exact")[0, 0]
        if mirrored:
            image, label = image.flip(-1), label.flip(-1)
        return image.contiguous(), label.contiguous()

    def _place(self, label: Tensor, wanted: int, window: int) -> tuple[int, int]:
        """Top and left of a window: inside of the image if it fits, else around it."""
        at = None
        if wanted >= 0:
            there = (label == wanted).nonzero()
            if len(there):
                at = there[int(torch.randint(len(there), ()))].tolist()
        place = []
        for axis, length in enumerate(label.shape):
            low, high = min(0, length - window), max(0, length - window)
            if at is not None:
                low, high = max(low, at[axis] - window + 1), min(high, at[axis])
            place.append(int(torch.randint(low, high + 1, ())))
        return place[0], place[1]


def resampled(image: Tensor, size: Sequence[int]) -> Tensor:
    """A uint8 image (3, H, W) in another size."""
    if image.shape[1:] == torch.Size(size):
        return image
    return F.interpolate(image[None], tuple(size), mode="bilinear", antialias=True)[0]

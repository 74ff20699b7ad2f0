"""Samples in an order that depends on the seed and the epoch alone, whatever the ranks, workers and restarts.

A sampler hands :class:`Draw` s to a data set: which sample, and the seed of its augmentation, a hash of the run's seed, the epoch
and the sample. So no random state is stored, and a run that goes on in the middle of an epoch sees what an uninterrupted one
would.

Images travel as uint8; the loop makes floats of them on the device.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import signal
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from ..outside import torchvision
from .config import Config
from .scenes import KINDS, scene

__all__ = ["Batch", "Draw", "Order", "Problem", "Samples", "classification", "loader", "read_image", "write_png"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
# Principal components of the colours of ImageNet (Krizhevsky et al.): standard deviations and directions, for RGB in [0, 1].
LIGHT = torch.tensor([0.2175, 0.0188, 0.0045])
DIRECTIONS = torch.tensor([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


class Draw(NamedTuple):
    """Which sample, the seed of its augmentation, and the class it was drawn for (-1: none)."""

    sample: int
    seed: int
    wanted: int = -1


class Batch(NamedTuple):
    """What a step takes: uint8 images (N, 3, H, W), targets, and what could not be read: (path, cause)."""

    images: Tensor
    targets: Tensor
    problems: list[Problem]


class Problem(NamedTuple):
    """What could not be read, and why."""

    name: str
    cause: str


class Samples(Protocol):
    """A data set of a recipe."""

    classes: Sequence[str]
    # Whether the images of an evaluation have one size; else they are looked at one by one.
    alike: bool

    def __len__(self) -> int:
        """Samples of an epoch."""
        ...

    def __getitem__(self, draw: Draw) -> Any:
        """Image, target and problems; None in place of the image where there is none."""
        ...

    def order(self, seed: int, epoch: int) -> Sequence[Draw]:
        """The draws of an epoch."""
        ...


def number(*parts: int | str) -> int:
    """A seed out of anything: 63 bits of a hash."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers on the CPU from this seed; afterwards they go on as if nothing had been."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def permuted(length: int, seed: int, epoch: int) -> list[Draw]:
    """All samples once, shuffled."""
    generator = torch.Generator().manual_seed(number(seed, "order", epoch))
    indices: list[int] = torch.randperm(length, generator=generator).tolist()
    return [Draw(index, number(seed, epoch, index)) for index in indices]


class Order(Sampler[list[Draw]]):
    """Batches of this rank from a step on to the last, epoch after epoch; what is left over at an epoch's end is not used.

    A step's samples are those at its place in the epoch's order; its parts and the ranks take them one share after the other.

    Args:
        samples: the data set.
        batch: samples of a step, over all ranks and parts.
        steps: where to end.
        start: the first step.
        rank, ranks, parts: how a step is shared; parts are computed one after another by each rank.
        seed: of the order.
    """

    def __init__(
        self,
        samples: Samples,
        batch: int,
        steps: int,
        start: int = 0,
        rank: int = 0,
        ranks: int = 1,
        parts: int = 1,
        seed: int = 0,
    ) -> None:
        if batch % (ranks * parts):
            raise ValueError(
                f"train.batch is {batch}, which {ranks} ranks and {parts} parts cannot share equally; take a multiple of "
                f"{ranks * parts}"
            )
        if len(samples) < batch:
            raise ValueError(
                f"train.batch is {batch}, but there are {len(samples)} samples to train on; take fewer at a time"
            )
        self.samples, self.batch, self.steps, self.start = samples, batch, steps, start
        self.rank, self.ranks, self.parts, self.seed = rank, ranks, parts, seed

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return len(self.samples) // self.batch

    def __len__(self) -> int:
        return (self.steps - self.start) * self.parts

    def __iter__(self) -> Iterator[list[Draw]]:
        share = self.batch // (self.ranks * self.parts)
        known, order = -1, list[Draw]()
        for step in range(self.start, self.steps):
            epoch, offset = divmod(step, self.per_epoch)
            if epoch != known:
                known, order = epoch, list(self.samples.order(self.seed, epoch))
            for part in range(self.parts):
                first = offset * self.batch + (part * self.ranks + self.rank) * share
                yield order[first : first + share]


def loader(samples: Samples, batches: Sampler[list[Draw]], workers: int, pin: bool) -> DataLoader[Any]:
    """Batches read by so many processes. The order and the samples do not depend on how many."""
    dataset: Any = samples
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin,
        persistent_workers=workers > 0,
        worker_init_fn=_deaf,
        # One that reads a slow disk is given time.
        timeout=300 if workers else 0,
    )


def _deaf(worker: int) -> None:
    """Workers leave it to the process that started them what a signal means."""
    for number_ in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number_, signal.SIG_IGN)


def collate(samples: list[Any]) -> Batch:
    """One batch of samples, without those that have no image; empty if none has."""
    problems = [problem for *_, found in samples for problem in found]
    there = [(image, target) for image, target, _ in samples if image is not None]
    if not there:
        return Batch(torch.empty(0), torch.empty(0), problems)
    images, targets = zip(*there, strict=True)
    return Batch(torch.stack(images), torch.stack([torch.as_tensor(target) for target in targets]), problems)


def read_image(path: Path) -> Tensor:
    """An image file as uint8 of shape (3, H, W): upright, its first frame, colours and 16 bits as RGB of 8.

    Raises OSError or ValueError if any of it cannot be decoded.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            # Decodes all of it now; opening reads only the head.
            file.load()
            picture = ImageOps.exif_transpose(file)
            if picture.mode.startswith("I") or picture.mode == "F":
                wide = torch.frombuffer(bytearray(picture.convert("I").tobytes()), dtype=torch.int32)
                gray = (wide.clamp(0, 65535) // 257).to(torch.uint8).view(1, picture.height, picture.width)
                return gray.expand(3, -1, -1).contiguous()
            picture = picture.convert("RGB")
            pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
            return pixels.view(picture.height, picture.width, 3).permute(2, 0, 1).contiguous()
    except (OSError, ValueError):
        raise
    except Exception as error:
        # Decoders raise what they like on a damaged file: SyntaxError, struct.error, DecompressionBombError, …
        raise ValueError(f"{type(error).__name__}: {error}") from error


def all_of(read: Callable[[int], Any], length: int, config: Config) -> list[Any]:
    """Every sample, read by several threads; scenes are drawn by one, whose small steps would be in each other's way."""
    with ThreadPoolExecutor(1 if config.data.kind == "scenes" else None) as pool:
        return list(pool.map(read, range(length)))


def write_png(image: Tensor, path: Path) -> None:
    """A uint8 image of shape (3, H, W) as a file."""
    from PIL import Image

    pixels = image.permute(1, 2, 0).contiguous().cpu()
    Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), pixels.numpy().tobytes()).save(path, "PNG")


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


def found(
    draw: Draw, read: Callable[[int], Any], length: int, config: Config, training: bool
) -> tuple[int, Any, list[Problem]]:
    """A sample, its index, and what could not be read before it was found; None for the sample where it is to be left out."""
    index, problems = draw.sample, list[Problem]()
    while isinstance(sample := read(index), Problem):
        if config.data.corrupt == "raise":
            raise OSError(
                f"{sample.name} cannot be read: {sample.cause}; data.corrupt=replace or skip goes on without it"
            )
        problems.append(sample)
        # An evaluation without it, rather than with another one twice.
        if config.data.corrupt == "skip" or not training:
            return index, None, problems
        if len(problems) > 100:
            raise OSError(f"100 files in a row cannot be read, last {sample.name}: {sample.cause}")
        # Another sample with its own label, the same one whenever this draw is made.
        index = number(draw.seed, "instead", len(problems)) % length
    return index, sample, problems


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
    if not config.data.path:
        raise ValueError(f"{config.recipe} needs data: --data FOLDER")
    root = Path(config.data.path)
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}")
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

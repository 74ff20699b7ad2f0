"""Samples in an order that depends on the seed and the epoch alone, whatever the ranks, workers and restarts.

A sampler hands :class:`Draw` s to a data set: which sample, and the seed of its augmentation, a hash of the run's seed, the epoch
and the sample. So no random state is stored, and a run that goes on in the middle of an epoch sees what an uninterrupted one
would.

Images travel as uint8; the loop makes floats of them on the device.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from .config import Config

__all__ = [
    "Batch",
    "Draw",
    "Order",
    "Permuted",
    "Problem",
    "Samples",
    "all_of",
    "found",
    "loader",
    "number",
    "root_of",
    "seeded",
]


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


class Permuted(Sequence[Draw]):
    """All samples once, shuffled. Draws are made when they are asked for: ImageNet has a million, and most steps come later."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        generator = torch.Generator().manual_seed(number(seed, "order", epoch))
        self.indices = torch.randperm(length, generator=generator)
        self.seed, self.epoch = seed, epoch

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, place: int) -> Draw: ...

    @overload
    def __getitem__(self, place: slice) -> list[Draw]: ...

    def __getitem__(self, place: int | slice) -> Draw | list[Draw]:
        if isinstance(place, slice):
            return [Draw(index, number(self.seed, self.epoch, index)) for index in self.indices[place].tolist()]
        index = int(self.indices[place])
        return Draw(index, number(self.seed, self.epoch, index))


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
        known = -1
        order: Sequence[Draw] = ()
        for step in range(self.start, self.steps):
            epoch, offset = divmod(step, self.per_epoch)
            if epoch != known:
                known, order = epoch, self.samples.order(self.seed, epoch)
            for part in range(self.parts):
                first = offset * self.batch + (part * self.ranks + self.rank) * share
                yield list(order[first : first + share])


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


def all_of(read: Callable[[int], Any], length: int, config: Config) -> list[Any]:
    """Every sample, read by several threads; scenes are drawn by one, whose small steps would be in each other's way."""
    with ThreadPoolExecutor(1 if config.data.kind == "scenes" else None) as pool:
        return list(pool.map(read, range(length)))


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


def root_of(config: Config) -> Path:
    """The folder of the data, which is there."""
    if not config.data.path:
        raise ValueError(f"{config.recipe} needs data: --data FOLDER")
    root = Path(config.data.path)
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}")
    return root

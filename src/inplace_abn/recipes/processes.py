"""The processes of a run, and the signals that reach them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

__all__ = ["Ranks", "Signals", "Stopped", "own_device", "rank", "world_size"]


class Stopped(SystemExit):
    """The run was told to stop by a signal, and its state is saved; ends the process with 128 + the signal's number."""


def world_size() -> int:
    """Processes of this run, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is; the first where there is one, whatever an environment has left over."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def own_device(device: torch.device | None) -> torch.device:
    """This process's share of a kind of device; None for a GPU where there is one."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device}: there is no GPU here, or torch cannot use it")
    if device.type == "cuda" and device.index is None:
        # More processes than GPUs share them.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


class Ranks:
    """The processes of a run: this one alone, or those that torchrun started; ``with`` them, as they are to part."""

    def __init__(self, device: torch.device | None) -> None:
        self.count, self.rank = world_size(), rank()
        self.device = device = own_device(device)
        self.control: Any = None
        self.own = False
        if self.count > 1:
            # Nccl wants a GPU for every rank of a machine.
            here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            nccl = device.type == "cuda" and here <= torch.cuda.device_count()
            if not dist.is_initialized():
                # Torchrun's store outlives a restart, and with it the addresses of processes that are gone.
                store, *_ = next(rendezvous("env://", timeout=timedelta(minutes=10)))
                store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
                backend = "nccl" if nccl else "gloo"
                dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.count)
                self.own = True
            # What ranks agree on must not wait for a GPU.
            self.control = dist.new_group(backend="gloo") if nccl else dist.group.WORLD

    def agreed(self, value: int) -> int:
        """The largest of all ranks' numbers."""
        if self.count == 1:
            return value
        most = torch.tensor(value)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.control)
        return int(most)

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks, on the CPU."""
        value = value.detach().cpu()
        if self.count > 1:
            dist.all_reduce(value, group=self.control)
        return value

    def gathered(self, value: list[Any]) -> list[Any]:
        """All ranks' lists, one after another."""
        if self.count == 1:
            return value
        every: list[Any] = [None] * self.count
        dist.all_gather_object(every, value, group=self.control)
        return [item for part in every for item in part]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        if self.own:
            dist.destroy_process_group()
            # Gloo's threads outlive this. One that lets go of its last tensor while Python shuts down ends the process with
            # SIGABRT, as was seen on a busy machine: it wants Python's lock, which it can have now.
            time.sleep(0.5)


class Signals:
    """Remembers a SIGTERM or SIGINT until a step is done; a second one ends the process at once."""

    def __init__(self) -> None:
        self.got, self.since = 0, 0.0
        self.stopped: Callable[[int], Stopped] | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        with contextlib.suppress(ValueError):  # not the main thread: signals are another's affair
            for number_ in (signal.SIGTERM, signal.SIGINT):
                self.before[number_] = signal.signal(number_, self._receive)
        return self

    def _receive(self, number_: int, frame: object) -> None:
        if self.got:
            # A scheduler's signal reaches a rank twice, from it and from torchrun; a person takes longer.
            if time.monotonic() - self.since > 3:
                os._exit(128 + number_)
            return
        self.got, self.since = number_, time.monotonic()
        if self.stopped is not None:
            raise self.stopped(number_)

    @contextlib.contextmanager
    def at_once(self, stopped: Callable[[int], Stopped]) -> Iterator[None]:
        """While there is nothing to save, a signal ends the run where it is."""
        if self.got:
            raise stopped(self.got)
        self.stopped = stopped
        try:
            yield
        finally:
            self.stopped = None

    def __exit__(self, *error: object) -> None:
        for number_, handler in self.before.items():
            signal.signal(number_, handler)

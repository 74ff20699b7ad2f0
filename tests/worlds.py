"""Several ranks on this machine, over gloo, under a watchdog."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Children fork from a server that has imported torch and started no threads.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch.distributed", "inplace_abn", "worlds"])


# Of the process groups; tests may choose others.
BACKEND = "gloo"
LEVEL = "OFF"


def _rank(
    rank: int, world: int, folder: str, patience: float, backend: str, level: str, work: Any, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    meet = f"file://{folder}/meet"
    dist.init_process_group(backend, meet, timedelta(seconds=patience), rank=rank, world_size=world)
    result = work(rank, world, *args)
    torch.save(result, Path(folder, f"{rank}.part"))
    Path(folder, f"{rank}.part").rename(Path(folder, f"{rank}.pt"))
    # A process group torn down while others still talk makes them fail.
    dist.barrier()
    dist.destroy_process_group()


def start(world: int, folder: str, patience: float, work: Any, *args: Any) -> list[Any]:
    processes = [
        context.Process(target=_rank, args=(rank, world, folder, patience, BACKEND, LEVEL, work, args), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes


def run(world: int, work: Any, *args: Any, seconds: float = 120) -> list[Any]:
    """What work(rank, world, *args) returns on every rank; an error if one of them fails, or hangs."""
    with tempfile.TemporaryDirectory() as folder:
        processes = start(world, folder, seconds, work, *args)
        deadline = time.monotonic() + seconds
        try:
            while any(p.is_alive() for p in processes):
                assert time.monotonic() < deadline, f"{world} ranks hang after {seconds} s"
                assert not any(p.exitcode for p in processes), "a rank failed; its error is above"
                time.sleep(0.02)
        finally:
            for p in processes:
                p.kill()
        assert not any(p.exitcode for p in processes), "a rank failed; its error is above"
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(world)]

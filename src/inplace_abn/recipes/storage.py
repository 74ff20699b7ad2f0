"""A run's folder: ``config.json``, ``metrics.jsonl``, and checkpoints that are whole or not there.

A checkpoint is written under a temporary name, flushed to the disk and renamed, so that a kill at any moment leaves the one
before it. Its name holds its step and the beginning of its SHA-256, ``step-00001200-9f86d081884c7d65.pt``: what the disk
gives back is compared with it before anything is loaded, by ``torch.load(weights_only=True)``, which runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import IO, Any

import torch

__all__ = ["append", "checkpoints", "forget_after", "latest", "lines", "load", "save", "tidy", "write"]

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")


def write(path: Path, content: bytes) -> None:
    """The whole content under this name, or an error and what was there before."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    # The new name is on the disk only once its folder is.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint of this step, then remove all but the newest ``keep``."""
    part = folder / f"step-{step:08d}.pt.part"
    try:
        with part.open("w+b") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:
                # What torch makes of a write that fails.
                raise OSError(f"{part.name} could not be written: {error}") from error
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            path = folder / f"step-{step:08d}-{_digest(file)}.pt"
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    _flush_folder(folder)
    older = [old for old in checkpoints(folder) if _step(old) < step]
    for old in older[keep - 1 :]:
        old.unlink(missing_ok=True)
    return path


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()[:16]


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    found = [path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name)]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


def tidy(folder: Path) -> None:
    """Remove what a killed save left, and put damaged checkpoints newer than the last whole one out of the way."""
    for part in folder.glob("step-*.pt.part"):
        part.unlink(missing_ok=True)
    for path in checkpoints(folder):
        try:
            _verify(path)
            return
        except (ValueError, OSError) as error:
            path.rename(path.with_suffix(".damaged"))
            warnings.warn(f"{error}; the run goes on from the one before it, or from its beginning", stacklevel=2)


def load(path: Path) -> dict[str, Any]:
    """The state in a checkpoint; ValueError if it is not what was written."""
    _verify(path)
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _verify(path: Path) -> None:
    match = NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint, step-NUMBER-CHECKSUM.pt")
    with path.open("rb") as file:
        digest = _digest(file)
    if digest != match[2]:
        raise ValueError(f"{path} is damaged: its checksum is {digest}")


def latest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole, and its state; a damaged one is passed over with a warning."""
    for path in checkpoints(folder):
        try:
            return path, load(path)
        except (ValueError, OSError) as error:
            warnings.warn(f"{error}; it is passed over for the one before it, if there is one", stacklevel=2)
    return None


def append(folder: Path, line: dict[str, Any]) -> None:
    """A line of ``metrics.jsonl``."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``, but for one that a kill cut short."""
    path, found = folder / "metrics.jsonl", list[dict[str, Any]]()
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def forget_after(folder: Path, step: int) -> None:
    """Drop what ``metrics.jsonl`` says about later steps, and the scores at this one: they will be computed again."""
    kept = [
        line
        for line in lines(folder)
        if line["step"] < step or (line["step"] == step and ("lr" in line or "bad_file" in line))
    ]
    write(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept).encode())

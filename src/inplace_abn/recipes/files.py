"""Images in and out of files."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

__all__ = ["SUFFIXES", "Paths", "decoded", "images_below", "read_image", "write_png"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")


class Paths(Sequence[str]):
    """Many paths in one piece of memory. A list of a million strings would be copied by every worker that looks at it."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.bytes, self.ends = bytearray(), array("q")
        for path in paths:
            self.bytes += os.fsencode(path)
            self.ends.append(len(self.bytes))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        return os.fsdecode(bytes(self.bytes[self.ends[index - 1] if index else 0 : self.ends[index]]))


def images_below(folder: Path) -> list[Path]:
    """The image files in a folder and in those inside of it, sorted; none if there is no folder."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES) if folder.is_dir() else []


@contextlib.contextmanager
def decoded(path: Path) -> Iterator[Any]:
    """The picture in a file, all of it decoded; OSError or ValueError if that is not possible."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            # Opening reads only the head.
            file.load()
            yield file
    except (OSError, ValueError):
        raise
    except Exception as error:
        # Decoders raise what they like on a damaged file: SyntaxError, struct.error, DecompressionBombError, …
        raise ValueError(f"{type(error).__name__}: {error}") from error


def read_image(path: Path) -> Tensor:
    """An image file as uint8 of shape (3, H, W): upright, its first frame, colours and 16 bits as RGB of 8.

    Raises OSError or ValueError if any of it cannot be decoded.
    """
    from PIL import ImageOps

    with decoded(path) as file:
        picture = ImageOps.exif_transpose(file)
        if picture.mode.startswith("I") or picture.mode == "F":
            wide = torch.frombuffer(bytearray(picture.convert("I").tobytes()), dtype=torch.int32)
            gray = (wide.clamp(0, 65535) // 257).to(torch.uint8).view(1, picture.height, picture.width)
            return gray.expand(3, -1, -1).contiguous()
        picture = picture.convert("RGB")
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return pixels.view(picture.height, picture.width, 3).permute(2, 0, 1).contiguous()


def write_png(image: Tensor, path: Path) -> None:
    """A uint8 image of shape (3, H, W) as a file."""
    from PIL import Image

    pixels = image.permute(1, 2, 0).contiguous().cpu()
    Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), pixels.numpy().tobytes()).save(path, "PNG")

"""State dicts in: files of ``nn.BatchNorm`` networks, and those released with the original library.

The original trained its networks with the scale |w| + eps, and its files look like any other; so whoever loads a file says
which scale its weights mean, unless it is one of the released ones, which are known by their checksum.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .modules import ABN

__all__ = ["load", "read", "take"]

Scale = Literal["signed", "abs+eps"]

# MD5 of the released files.
RELEASED: dict[str, Scale] = {
    "448438885986d14db5e870b95f814f91": "signed",  # ResNeXt-101, standard batch norm
    "3b7a221cbc076410eb12c8dd361b7e4e": "abs+eps",  # ResNeXt-101, batch 512
    "2c8d572587961ed74611d534c5b2e9ce": "abs+eps",  # ResNeXt-152
    "1c085ab70b789cc1d6c1594f7a761007": "abs+eps",  # WideResNet-38
    "0a85a21847b15e5a242e17bf3b753849": "abs+eps",  # ResNeXt-101, synchronised
    "0b413d67b725619441d0646d663865bf": "abs+eps",  # DenseNet-264
    "2522ca639f7fdfd7c0089ba1f5f6c2e8": "abs+eps",  # ResNet-50, synchronised
    "61515c1484911c3cc753d405131e1dda": "abs+eps",  # ResNet-34, synchronised
    "1552ae0f3d610108df702135f56bd27b": "abs+eps",  # ResNet-101, synchronised
    "913f78486a34aa1577a7cd295e8a33bb": "abs+eps",  # WideResNet-38 with DeepLabV3, Vistas
}


def read(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name: ``.safetensors``, or what ``torch.save`` wrote; no code in it is run.

    A state dict may lie under "state_dict", in parts (body, head, cls) whose names go in front, and under the ``module.`` of
    a parallel wrapper, which is dropped.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise ImportError(f"{path.name} needs the safetensors package: pip install safetensors") from error
        return dict(load_file(path))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path.name} holds more than tensors, and reading it could run code, so it is refused. Where you trust it, read it "
            f"by torch.load(..., weights_only=False) and save its state dict alone. Torch says: {reason}"
        ) from error
    tensors = _flat(content.get("state_dict", content) if isinstance(content, Mapping) else content, "", path)
    if tensors and all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): v for name, v in tensors.items()}
    return tensors


def _flat(part: Any, prefix: str, path: Path) -> dict[str, Tensor]:
    if isinstance(part, Tensor):
        return {prefix[:-1]: part}
    if not isinstance(part, Mapping):
        raise ValueError(
            f"{path.name}: {prefix[:-1] or 'its content'} is a {type(part).__name__}, not a state dict of tensors"
        )
    found: dict[str, Tensor] = {}
    for name, inner in part.items():
        found |= _flat(inner, f"{prefix}{name}.", path)
    return found


def load(model: nn.Module, path: str | Path, scale: Scale | None = None, *, leave: tuple[str, ...] = ()) -> None:
    """Load a file into the model: all of it, or nothing and an error that lists what does not fit.

    Args:
        model: with layers of this package, torch's batch norms, or both.
        path: see :func:`read`.
        scale: what the norms' weights mean: "signed", γ = w, as torch and this package train; or "abs+eps", γ = |w| + eps, as the
            original's in-place layers do. None serves the files released with the original, known by their MD5.
        leave: beginnings of names to leave out: ``("classifier.",)`` loads a classifier's file into a network of features.
    """
    path = Path(path)
    if scale is None:
        scale = RELEASED.get(hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest())
    if scale not in ("signed", "abs+eps"):
        raise ValueError(
            f'{path.name} is none of the released files, and scale is {scale!r}: say scale="signed" for weights trained with '
            'torch\'s batch norm or this package, scale="abs+eps" for the in-place layers of the original'
        )
    take(model, read(path), scale, path.name, leave=leave)


def take(
    model: nn.Module, tensors: Mapping[str, Tensor], scale: Scale, source: str, *, leave: tuple[str, ...] = ()
) -> None:
    """Load tensors by name as :func:`load` does; ``source`` is what messages call them."""
    own = model.state_dict()
    # Files from before July 2018 have a batch norm of their own inside each layer.
    tensors = {n if n in own else n.replace(".bn.", "."): v for n, v in tensors.items() if not n.startswith(leave)}
    norms = {
        f"{name}.weight" if name else "weight": m
        for name, m in model.named_modules()
        if isinstance(m, (ABN, nn.modules.batchnorm._NormBase)) and m.weight is not None
    }
    wrong = [f"missing: {n}" for n in own if n not in tensors and not n.endswith("num_batches_tracked")]
    wrong += [f"not in the model: {n}" for n in tensors if n not in own]
    wrong += [
        f"{n} has shape {tuple(v.shape)}, the model's {tuple(own[n].shape)}"
        for n, v in tensors.items()
        if n in own and v.shape != own[n].shape
    ]
    if wrong:
        shown = "\n  ".join(wrong[:20]) + (f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise ValueError(f"{source} does not fit the model, which was left as it is:\n  {shown}")
    if scale == "abs+eps":
        tensors |= {n: tensors[n].abs() + m.eps for n, m in norms.items()}
    for name, counter in own.items():
        if name.endswith("num_batches_tracked"):
            tensors.setdefault(name, torch.zeros_like(counter))
    model.load_state_dict(tensors)

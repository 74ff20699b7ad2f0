"""Torchvision, be its compiled operators for another build of torch than the one that is here."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

__all__ = ["torchvision"]

# Kept, or the names would go with it.
_OPERATORS: list[torch.library.Library] = []


def torchvision(room: str = "") -> Any:
    """The package, or a module of it: models and transforms need none of the compiled operators.

    The ordinary wheel beside a CPU build of torch fails on import, for want of two operators' names; they are given to it.
    """
    name = f"torchvision.{room}" if room else "torchvision"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install 'inplace_abn[train]'") from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _OPERATORS.append(torch.library.Library("torchvision", "DEF"))
        for operator in ("nms", "qnms"):
            _OPERATORS[-1].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == "torchvision"]:
            del sys.modules[loaded]
        return importlib.import_module(name)

"""Data, metrics and training runs built on the layers, by name. Needs the ``train`` extra."""

from __future__ import annotations

from collections.abc import Sequence

from . import classification, segmentation
from .building import Task
from .classification import Classification
from .config import Config
from .segmentation import Segmentation

__all__ = ["named", "names", "task_of"]

_RECIPES = {config.recipe: config for config in (*classification.RECIPES, *segmentation.RECIPES)}


def names() -> list[str]:
    """All recipes.

    >>> "resnext101-inplace-512" in names()
    True
    """
    return list(_RECIPES)


def named(name: str) -> Config:
    """The config of a recipe; ValueError lists them if there is none of this name."""
    if name not in _RECIPES:
        raise ValueError(f"recipe {name!r} is unknown; one of: {', '.join(names())}")
    return _RECIPES[name]


def task_of(config: Config, view: str = "centre", scales: Sequence[float] = (1.0,), flip: bool = False) -> Task:
    """What the config trains for, and how an evaluation looks at images: by ``view`` in classification, else by the rest."""
    if config.task == "classification":
        if flip or tuple(scales) != (1.0,):
            raise ValueError("this is a run of classification, which has --view; scales and --flip are of segmentation")
        return Classification(view)
    if view != "centre":
        raise ValueError(
            f"this is a run of segmentation, which has --scales and --flip; view {view!r} is of classification"
        )
    return Segmentation(scales=scales, flip=flip)

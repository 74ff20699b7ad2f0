"""Data, metrics and training runs built on the layers, by name. Needs the ``train`` extra."""

from __future__ import annotations

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


def task_of(config: Config, view: str = "centre") -> Task:
    """What the config trains for; ``view`` is how images are looked at in an evaluation of classification."""
    return Classification(view) if config.task == "classification" else Segmentation()

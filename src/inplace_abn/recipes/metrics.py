"""Counts of a segmentation, and what is read off them."""

from __future__ import annotations

import torch
from torch import Tensor

from .scenes import VOID

__all__ = ["confusion", "ious", "mean_iou", "pixel_accuracy"]


def confusion(prediction: Tensor, label: Tensor, classes: int) -> Tensor:
    """Pixels by true class (row) and predicted class (column); void pixels are left out.

    >>> confusion(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, 255]), 2)
    tensor([[1, 1],
            [0, 1]])
    """
    known = label != VOID
    pairs = label[known] * classes + prediction[known]
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def pixel_accuracy(counts: Tensor) -> float:
    """Share of pixels given their true class."""
    return float(counts.diagonal().sum() / counts.sum())


def ious(counts: Tensor) -> Tensor:
    """Intersection over union of every class; NaN for one that occurs neither in labels nor in predictions."""
    union = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return counts.diagonal() / torch.where(union > 0, union, torch.nan)


def mean_iou(counts: Tensor) -> float:
    """Mean over the classes that occur, in labels or predictions, of intersection over union.

    >>> mean_iou(torch.tensor([[1, 1], [0, 1]]))
    0.5
    """
    return float(ious(counts).nanmean())

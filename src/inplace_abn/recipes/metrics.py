"""Counts of a segmentation, and what is read off them."""

from __future__ import annotations

import torch
from torch import Tensor

from .scenes import VOID

__all__ = ["confusion", "mean_iou", "pixel_accuracy"]


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


def mean_iou(counts: Tensor) -> float:
    """Mean over the classes that occur of intersection over union; 1 where prediction and label agree everywhere.

    >>> mean_iou(torch.tensor([[1, 1], [0, 1]]))
    0.5
    """
    union = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return float((counts.diagonal()[union > 0] / union[union > 0]).mean())

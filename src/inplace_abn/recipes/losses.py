"""Cross-entropy of upsampled logits over the hardest pixels, without ever holding the upsampled logits.

At 12 crops of 776² pixels and 65 classes upsampled logits take 1.9 GB in float32, and cross-entropy needs two more such buffers.
Here bands of rows are upsampled one after another, twice: once for the loss of every pixel, once for its gradient, which goes
back to the small logits at once. What is alive is a few bands, each an eighth of the upsampled logits at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .scenes import VOID

__all__ = ["bootstrapped"]

BANDS = 8


def bootstrapped(logits: Tensor, targets: Tensor, hardest: float = 1.0) -> Tensor:
    """Mean over the crops of the mean loss of their hardest pixels.

    ℓ_i = −log softmax(up(logits))_{i, t_i}, 0 where t_i is void; a crop's loss is the sum of its K = ⌈hardest · HW⌉ largest ℓ_i
    over K: loss max-pooling with p = 1 (Rota Bulò et al.), online bootstrapping (Wu et al.). Pixels that tie for the last places
    share them. A crop that is all void has loss 0 and gradient 0.

    Args:
        logits: of shape (N, C, h, w), brought to the targets' size bilinearly (``align_corners=False``).
        targets: classes of shape (N, H, W), VOID where there is none.
        hardest: the share of pixels that count.

    >>> float(bootstrapped(torch.zeros(1, 4, 2, 2), torch.zeros(1, 8, 8, dtype=torch.long), 0.25))  # log 4
    1.386294...
    """
    if not 0 < hardest <= 1:
        raise ValueError(f"hardest is {hardest}; it is a share of the pixels, in (0, 1]")
    loss: Tensor = _Bootstrapped.apply(logits, targets, hardest)  # type: ignore[no-untyped-call]
    return loss


class _Bootstrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, hardest: float) -> Tensor:
        wide = _wide(logits, targets)
        losses = torch.empty(targets.shape, dtype=wide.dtype, device=wide.device)
        for rows, band, classes, known in _bands(wide, targets):
            chosen = band.gather(1, classes)[:, 0] - band.logsumexp(1)
            losses[:, rows] = torch.where(known, -chosen, 0)
        pixels = losses.flatten(1)
        weights = _shares(pixels, hardest)
        ctx.save_for_backward(logits, targets, weights.view(targets.shape))
        return (pixels * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, weights = ctx.saved_tensors
        wide = _wide(logits, targets)
        down, across = _weights(logits.shape, targets.shape, wide)
        small = torch.zeros_like(wide)
        for rows, band, classes, known in _bands(wide, targets):
            share = torch.where(known, weights[:, rows], 0)[:, None]
            slope = torch.softmax(band, 1)
            slope.scatter_(1, classes, slope.gather(1, classes) - 1)
            slope *= share
            small += _product(down[rows].T, _product(slope, across))
        return (small * grad).to(logits.dtype), None, None


def _shares(pixels: Tensor, hardest: float) -> Tensor:
    """What every pixel's loss counts in the mean, out of the losses (N, HW) of the crops."""
    if hardest == 1:
        # No need to sort them.
        return torch.full_like(pixels, 1 / max(1, pixels.numel()))
    count = max(1, -int(-hardest * pixels.shape[1] // 1))
    least = pixels.topk(count).values[:, -1:]
    above, tied = pixels > least, pixels == least
    places = (count - above.sum(1, keepdim=True)).to(pixels.dtype)
    weights = above + tied * (places / tied.sum(1, keepdim=True))
    return weights.div_(count * len(pixels))


def _wide(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.shape[0] != targets.shape[0] or targets.dim() != 3 or logits.dim() != 4:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} do not belong together")
    return logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).contiguous()


def _bands(wide: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Rows, their upsampled logits, their classes (0 where void) of shape (N, 1, R, W), and which are not void."""
    down, across = _weights(wide.shape, targets.shape, wide)
    # Along rows first: a small map's height by a large one's width.
    stretched = _product(wide, across.T)
    step = -(-targets.shape[1] // BANDS)
    for start in range(0, targets.shape[1], step):
        rows = slice(start, start + step)
        labels = targets[:, rows].long()
        known = labels != VOID
        yield rows, _product(down[rows], stretched), torch.where(known, labels, 0)[:, None], known


def _product(a: Tensor, b: Tensor) -> Tensor:
    # Autocast would upsample in 16 bits.
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _weights(small: torch.Size, large: torch.Size, like: Tensor) -> tuple[Tensor, Tensor]:
    return _interpolation(small[2], large[1], like), _interpolation(small[3], large[2], like)


def _interpolation(size: int, to: int, like: Tensor) -> Tensor:
    """The matrix of bilinear interpolation along one side: output i lies at (i + ½) · size / to − ½, held inside."""
    at = ((torch.arange(to, device=like.device, dtype=like.dtype) + 0.5) * (size / to) - 0.5).clamp(0, size - 1)
    first = at.floor().clamp(max=max(size - 2, 0))
    matrix = torch.zeros(to, size, device=like.device, dtype=like.dtype)
    left = first.long()[:, None]
    matrix.scatter_(1, left, (1 - (at - first))[:, None])
    if size > 1:
        matrix.scatter_(1, left + 1, (at - first)[:, None])
    return matrix

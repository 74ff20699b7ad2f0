"""Tensors of equal values and different strides."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

View = Callable[[Tensor], Tensor]


def contiguous(t: Tensor) -> tuple[Tensor, View]:
    return t.contiguous(), lambda base: base


def channels_last(t: Tensor) -> tuple[Tensor, View]:
    """Dense with channels innermost, for any rank: torch's channels_last and channels_last_3d at rank 4 and 5."""
    return t.movedim(1, -1).contiguous(), lambda base: base.movedim(-1, 1)


def transposed(t: Tensor) -> tuple[Tensor, View]:
    order = tuple(reversed(range(t.dim())))
    return t.permute(order).contiguous(), lambda base: base.permute(order)


def stepped(t: Tensor) -> tuple[Tensor, View]:
    """Every second element of the last dimension."""
    base = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])
    base[..., ::2] = t
    return base, lambda base: base[..., ::2]


def offset(t: Tensor) -> tuple[Tensor, View]:
    """Dense, but not at the start of its storage, and misaligned."""
    base = t.new_zeros(t.numel() + 3)
    base[3:] = t.flatten()
    return base, lambda base: base[3:].view(t.shape)


def gap(t: Tensor) -> tuple[Tensor, View]:
    """Some channels of a tensor with more."""
    base = t.new_zeros(t.shape[0], t.shape[1] + 3, *t.shape[2:])
    base[:, 1:-2] = t
    return base, lambda base: base[:, 1:-2]


LAYOUTS = {f.__name__: f for f in (contiguous, channels_last, transposed, stepped, offset, gap)}

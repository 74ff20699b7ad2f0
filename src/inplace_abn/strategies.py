"""The paper's Figure 2: five ways to run batch norm, activation and convolution, which differ in what they keep for backward.

==================  ============================  =========  =====================================================================
strategy            kept between the passes       vectors    backward
==================  ============================  =========  =====================================================================
standard            x, z                          μ, σ       of convolution, φ and batch norm, one after the other
checkpoint          x                             μ, σ       z again from x, by one scale-and-shift and φ; then from x
checkpoint_xhat     x̂, over x                     σ          z again from x̂; then from x̂ (the paper's own, for any φ)
inplace_1           z, over x                     σ          x̂ = (φ⁻¹(z) − β)/γ for every element
inplace_2           z, over x                     σ          in terms of y = φ⁻¹(z), with one division per channel
==================  ============================  =========  =====================================================================

All five compute the same outputs, gradients and running statistics; x̂ is rounded to x's dtype where it is kept.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activations import resolve
from .context import may_overwrite, recomputing
from .functions import keeping_x, only_once
from .library import backend
from .modules import ABN, InPlaceABN
from .recompute import Record, recompute
from .settings import Settings, Vectors, check, settled

__all__ = ["STRATEGIES", "BNActConv"]

STRATEGIES = ("standard", "checkpoint", "checkpoint_xhat", "inplace_1", "inplace_2")


class BNActConv(nn.Module):
    """conv(φ(BN(x))), by one of :data:`STRATEGIES`.

    Args:
        conv: the convolution, or whatever reads z.
        num_features: channels of x.
        strategy: one of :data:`STRATEGIES`.
        options: further arguments of :class:`inplace_abn.ABN`.

    Example:
        >>> unit = BNActConv(nn.Conv2d(4, 8, 3), 4, "checkpoint", activation="relu")
        >>> unit(torch.randn(2, 4, 9, 9)).shape
        torch.Size([2, 8, 7, 7])
    """

    def __init__(self, conv: nn.Module, num_features: int, strategy: str = "inplace_2", **options: Any) -> None:
        super().__init__()
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy {strategy!r} is unknown; one of: {', '.join(STRATEGIES)}")
        self.strategy = strategy
        if strategy.startswith("inplace"):
            self.norm: ABN = InPlaceABN(num_features, variant="I" if strategy == "inplace_1" else "II", **options)
        else:
            self.norm = ABN(num_features, **options)
        self.conv = recompute(conv) if strategy.startswith("checkpoint") else conv

    def forward(self, x: Tensor) -> Tensor:
        """conv(φ(BN(x)))."""
        norm = self.norm
        if not norm.training or not torch.is_grad_enabled() or self.strategy.startswith("inplace"):
            z = norm(x)
        else:
            how = settled(True, norm.momentum, norm.eps, norm.activation, norm.activation_param, variant="I")
            buffers: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
            if norm.track_running_stats:
                buffers = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
            vectors = (norm.weight, norm.bias, *buffers)
            check(x, vectors, how)
            z = _RUN[self.strategy](x, vectors, how)
        out: Tensor = self.conv(z)
        return out

    def extra_repr(self) -> str:
        """Which of the five."""
        return self.strategy


def _standard(x: Tensor, vectors: Vectors, how: Settings) -> Tensor:
    """Torch's batch norm and φ, in place on y."""
    weight, bias, running_mean, running_var, tracked = vectors
    momentum = how.momentum
    if recomputing():
        # Statistics move once; here, those of a copy.
        running_mean, running_var = (None if v is None else v.clone() for v in (running_mean, running_var))
    elif tracked is not None:
        tracked.add_(1)
        momentum = 1.0 / float(tracked) if momentum is None else momentum
    return how.phi.plain(
        F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum or 0.0, how.eps), how.a
    )


def _keeping_xhat(x: Tensor, vectors: Vectors, how: Settings) -> Tensor:
    """A new z, with x̂ over x, from which z can be had again."""
    record = Record(partial(_from_xhat, how))
    z: Tensor
    z, _ = _KeepingXhat.apply(x, *vectors[:2], vectors[2:], how, record)  # type: ignore[no-untyped-call]
    record.belongs_to(z)
    return z


def _from_xhat(how: Settings, saved: tuple[Any, ...], z: Tensor) -> None:
    """z = φ(γx̂ + β)."""
    xhat, weight, bias, invstd = saved
    plain = torch.zeros_like(invstd), torch.ones_like(invstd)
    backend(xhat).normalize_(xhat, *plain, weight, bias, how.floor, how.phi, how.a, None, z)


class _KeepingXhat(torch.autograd.Function):
    """z = φ(γx̂ + β), and x̂ where x was. Saved: x̂, weight, bias, invstd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        buffers: tuple[Tensor | None, ...],
        how: Settings,
        record: Record,
    ) -> tuple[Tensor, Tensor]:
        """Overwrite x, or a copy of it where that is not allowed, with x̂."""
        ctx.set_materialize_grads(False)
        ctx.how, ctx.record = how, record
        record.node = weakref.ref(ctx)
        if may_overwrite(x):
            xhat = x
            ctx.mark_dirty(x)
        else:
            xhat = x.clone()
        if recomputing():
            # Statistics move once.
            buffers = (None, None, None)
        alone = (None, None, *buffers, how.momentum, how.eps, how.floor, *resolve("identity", 0.0))
        invstd = backend(xhat).normalize_batch_(xhat, *alone)
        z = torch.empty_strided(xhat.shape, xhat.stride(), dtype=xhat.dtype, device=xhat.device)
        _from_xhat(how, (xhat, weight, bias, invstd), z)
        ctx.save_for_backward(xhat, weight, bias, invstd)
        return z, xhat

    @staticmethod
    def backward(ctx: Any, dz: Tensor, dxhat: Tensor | None) -> tuple[Tensor | None, ...]:
        """dx, dweight, dbias from x̂; differentiating those raises."""
        if dxhat is not None:
            raise RuntimeError(
                "checkpoint_xhat overwrites its input by x̂, and something else reads it: hand over a copy"
            )
        xhat, weight, bias, invstd = ctx.record.saved()
        how: Settings = ctx.how
        rest = (how.floor, how.phi, how.a, how.variant, None, None, 0.0)
        with torch.no_grad():
            dx, dgamma, dbeta = backend(xhat).input_grad_batch(dz, xhat, weight, bias, invstd, *rest)
            dweight = None if weight is None else dgamma.to(weight.dtype)
            dbias = None if bias is None else dbeta.to(bias.dtype)
        gradients: tuple[Tensor | None, ...] = dx, dweight, dbias
        ctx.record.forget()
        if torch.is_grad_enabled():
            gradients = only_once(gradients, dz, xhat, weight, bias)
        return *gradients, None, None, None


_RUN = {"standard": _standard, "checkpoint": keeping_x, "checkpoint_xhat": _keeping_xhat}

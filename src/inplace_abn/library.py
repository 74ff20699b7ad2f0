"""Which backend runs, and the same two steps as operators of torch, for compilers.

A compiler must see what the layer reads and writes. While one is tracing, the layer is a function of a copy of x whose two steps
are the operators ``inplace_abn::forward_`` and ``inplace_abn::backward``; inductor finds that x is not needed any more, drops
the copy, and the result is in place again. Run eagerly, the layer calls the verbs directly, which costs the host less.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import reference
from .activations import ACTIVATIONS, warn_once

__all__ = ["NOT_TWICE", "Compiled", "backend"]

NOT_TWICE = (
    "InPlaceABN cannot be differentiated twice: its gradient is computed from z and not recorded. Where second "
    "derivatives are needed (gradient penalties, meta-learning), use inplace_abn.ABN, which keeps two maps"
)


@cache
def _kernels() -> Any:
    """The Triton kernels, imported when a GPU first needs them; None, and a word about it, where they cannot be."""
    try:
        return importlib.import_module(f"{__package__}.kernels")
    except ImportError as error:
        warn_once(f"no Triton kernels ({error}): GPU tensors take plain torch, which is right but slow; install triton")
        return None


def backend(x: Tensor) -> Any:
    """The module whose verbs run on x: the kernels where they take it, else the reference."""
    if x.is_cuda and (kernels := _kernels()) is not None and kernels.supports(x):
        return kernels
    return reference


def _forward_(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    floor: float,
    activation: str,
    a: float,
    residual: Tensor | None = None,
) -> Tensor:
    phi = ACTIVATIONS[activation]
    vectors = (weight, bias, running_mean, running_var, num_batches_tracked)
    invstd: Tensor = backend(x).normalize_batch_(x, *vectors, momentum, eps, floor, phi, a, residual)
    return invstd


def _backward(
    dz: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    invstd: Tensor,
    floor: float,
    activation: str,
    a: float,
    variant: str,
    residual: Tensor | None = None,
    need_r: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rest = (floor, ACTIVATIONS[activation], a, variant, residual)
    dr = torch.empty_strided(z.shape, z.stride(), dtype=z.dtype, device=z.device) if need_r else None
    dx, dgamma, dbeta = backend(z).input_grad_batch(dz, z, weight, bias, invstd, *rest, dr)
    return dx, dgamma.to(invstd.dtype), dbeta.to(invstd.dtype), z.new_empty(0) if dr is None else dr


def _shape_of_forward(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[1], dtype=reference.wide(x))


def _shape_of_backward(
    dz: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    invstd: Tensor,
    floor: float,
    activation: str,
    a: float,
    variant: str,
    residual: Tensor | None = None,
    need_r: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dr = torch.empty_like(z) if need_r else z.new_empty(0)
    return torch.empty_like(z), torch.empty_like(invstd), torch.empty_like(invstd), dr


# Kept, or the operators would go with it.
_LIBRARY = torch.library.Library("inplace_abn", "DEF")
_SCHEMAS = {
    "forward_": (
        "(Tensor(a!) x, Tensor? weight, Tensor? bias, Tensor(b!)? running_mean, Tensor(c!)? running_var, "
        "Tensor(d!)? num_batches_tracked, float? momentum, float eps, float floor, str activation, float a, "
        "Tensor? residual=None) -> Tensor",
        _forward_,
        _shape_of_forward,
    ),
    "backward": (
        "(Tensor dz, Tensor z, Tensor? weight, Tensor? bias, Tensor invstd, float floor, str activation, float a, "
        "str variant, Tensor? residual=None, bool need_r=False) -> (Tensor, Tensor, Tensor, Tensor)",
        _backward,
        _shape_of_backward,
    ),
}
for _name, (_schema, _function, _shape) in _SCHEMAS.items():
    # Any strides will do: otherwise inductor copies every map to those it saw while tracing, and back.
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.flexible_layout,))
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _shape, "Meta")


def _not_twice(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(NOT_TWICE)


torch.library.register_autograd("inplace_abn::backward", _not_twice, lib=_LIBRARY)


class Compiled(torch.autograd.Function):
    """z = φ(BN(x) [+ r]) and its gradient, for tracing. Saved: z, weight, bias, r, invstd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        momentum: float | None,
        eps: float,
        floor: float,
        activation: str,
        a: float,
        variant: str,
    ) -> Tensor:
        """A new z, as far as autograd knows."""
        z = x.clone()
        vectors = (weight, bias, running_mean, running_var, num_batches_tracked)
        invstd = torch.ops.inplace_abn.forward_(z, *vectors, momentum, eps, floor, activation, a, residual)
        ctx.save_for_backward(z, weight, bias, residual, invstd)
        ctx.rest = floor, activation, a, variant
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        """dx, dweight, dbias, dr from dz and the saved z."""
        z, weight, bias, residual, invstd = ctx.saved_tensors
        need_r = residual is not None and ctx.needs_input_grad[3]
        dx, dgamma, dbeta, dr = torch.ops.inplace_abn.backward(dz, z, weight, bias, invstd, *ctx.rest, residual, need_r)
        dweight = None if weight is None else dgamma.to(weight.dtype)
        dbias = None if bias is None else dbeta.to(bias.dtype)
        return dx, dweight, dbias, dr if need_r else None, *[None] * 9

"""The layer as a function: which path runs, what is overwritten, what autograd keeps.

``inplace_abn`` and ``inplace_abn_sync`` take their arguments in the order of the original library; what is new is keyword-only.
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from . import ranks, reference
from .activations import SLOPE, Activation, warn_of_slope, warn_once
from .context import (
    is_dense,
    is_exported,
    is_traced,
    is_transformed,
    is_wrapped,
    may_overwrite,
    overlaps,
    recomputing,
    saves_by_hooks,
)
from .library import NOT_TWICE, Compiled, backend
from .ranks import active_group
from .recompute import Record, is_at_work
from .settings import WEIGHT_FLOOR, Settings, Vectors, added, check, settled, without_phi

__all__ = [
    "active_group",
    "in_place",
    "in_steps",
    "inplace_abn",
    "inplace_abn_sync",
    "keeping_x",
    "only_once",
    "synchronised",
]

# With INPLACE_ABN_DEBUG=1 the backward pass checks that z still holds the bits that forward wrote. Autograd itself misses writes
# through .data; the check costs one read of z each way.
DEBUG = os.environ.get("INPLACE_ABN_DEBUG", "0") not in ("", "0")


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-05,
    activation: str | None = "leaky_relu",
    activation_param: float = SLOPE,
    *,
    variant: str = "II",
    weight_floor: float = WEIGHT_FLOOR,
    num_batches_tracked: Tensor | None = None,
    residual: Tensor | None = None,
    keep_x: bool = False,
    overwrite: bool = True,
) -> Tensor:
    r"""Batch normalisation and activation, written over x where autograd allows it.

    .. math::
        z = \varphi\Big(\gamma\,\frac{x-\mu}{\sqrt{\sigma^2+\epsilon}} + \beta \;[+\; r]\Big), \qquad
        \gamma = \mathrm{copysign}(\max(|w|, \text{floor}), w)

    Autograd keeps z, a few per-channel vectors and a reference to r, whether or not x itself was overwritten. x is left alone,
    and z is a new tensor, where x has no history (a batch of data, a leaf), where its producer kept it for its own backward
    (sigmoid, softmax, another layer of this kind), where it is one of several views (``chunk``) or overlaps itself (``expand``),
    where it is r, under module hooks that hand out views, under saved-tensor hooks (checkpointing, offloading), and wherever
    nothing is to be differentiated.

    Activations without an inverse keep x instead of z and leave it as it is. Whoever reads z keeps that as well, unless it runs
    within :func:`inplace_abn.recompute`. γ needs no guard then, and has none.

    What is exported, traced by ``torch.jit.trace``, or transformed by ``torch.func`` is ``batch_norm`` and φ as separate steps.
    Under ``torch.compile`` the layer is a pair of operators on a copy of x, which the compiler leaves out where x is not needed;
    without an inverse it is separate steps there, too.

    Args:
        x: a floating-point tensor of shape (N, C, …).
        weight: γ before its guard, shape (C,), or None for 1.
        bias: β, or None for 0.
        running_mean: moved towards the batch's mean in training, used in its place otherwise.
        running_var: likewise, with the unbiased variance.
        training: normalise by the batch's statistics.
        momentum: weight of the newest batch; None for the plain average, which needs ``num_batches_tracked``.
        eps: added to the variance.
        activation: a key of :data:`inplace_abn.ACTIVATIONS`, or "none".
        activation_param: slope of leaky ReLU, α of ELU and CELU; others ignore it.
        variant: which of the paper's backward passes, "I" or "II".
        weight_floor: least magnitude of γ; its sign is kept.
        num_batches_tracked: counts the training calls that moved the running statistics. A call inside a backward pass is
            taken for the recomputation of a checkpointed segment, and moves nothing.
        residual: r, added before φ, of x's shape or one that broadcasts to it; cast to x's dtype if it has another. It is read,
            never overwritten, and must not be changed before backward has used it. Where x is what broadcasts, z is larger
            than x, and comes of ordinary steps.
        keep_x: keep x and leave it as it is, instead of inverting z in backward: exact for any γ and β, at a second map. The
            layers ask for it where z would not give x̂ back well enough.
        overwrite: False leaves x as it is and makes a new z, for an x that has another reader: a shortcut, say. What is kept
            for backward is the same.

    Example:
        >>> x = torch.nn.functional.conv2d(torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3, requires_grad=True))
        >>> z = inplace_abn(x, torch.ones(4), torch.zeros(4), torch.zeros(4), torch.ones(4))
        >>> z is x
        True
    """
    how = settled(training, momentum, eps, activation, activation_param, weight_floor, variant, overwrite)
    return in_place(x, (weight, bias, running_mean, running_var, num_batches_tracked), how, residual, keep_x)


def in_place(
    x: Tensor, vectors: Vectors, how: Settings, residual: Tensor | None = None, keep_x: bool = False
) -> Tensor:
    """:func:`inplace_abn`, of what was settled before."""
    check(x, vectors, how)
    phi, weight, bias = how.phi, vectors[0], vectors[1]
    if residual is not None:
        residual = added(residual, x)
        if residual.shape != x.shape:
            return _added_to_larger(in_place(x, vectors, without_phi(how), None, True), residual, how)
    if phi.inverse is None:
        keep_x = True
    else:
        warn_of_slope(phi, how.a, x.dtype)
    if not _needs_graph(x, weight, bias, residual):
        return _composite(x, vectors, how, residual)
    if is_traced():
        if keep_x or not how.training or not torch.compiler.is_dynamo_compiling() or is_exported():
            return _composite(x, vectors, how, residual)
        rest = (how.momentum, how.eps, how.floor, phi.name, how.a, how.variant)
        traced: Tensor = Compiled.apply(x, weight, bias, residual, *vectors[2:], *rest)  # type: ignore[no-untyped-call]
        return traced
    if keep_x:
        _warn_of_two_maps(phi)
        return keeping_x(x, vectors, how, residual)
    z: Tensor = _apply(x, weight, bias, residual, vectors[2:], how)
    return z


def keeping_x(
    x: Tensor,
    vectors: Vectors,
    how: Settings,
    residual: Tensor | None = None,
    group: Any = None,
    anchor: Tensor | None = None,
) -> Tensor:
    """A new z, of which readers within recompute keep a handle."""
    if overlaps(x):
        # z is laid out as x.
        x = x.contiguous()
    record = Record(partial(_again, how), residual)
    z: Tensor = _apply(x, *vectors[:2], residual, vectors[2:], how, group, anchor, record)
    record.belongs_to(z)
    return z


def _again(how: Settings, saved: tuple[Any, ...], z: Tensor) -> None:
    """Z once more, of the x that was kept."""
    x, weight, bias, residual, invstd, mean = saved
    backend(x).normalize_(x, mean, invstd, weight, bias, how.floor, how.phi, how.a, residual, z)


def _warn_of_two_maps(phi: Activation) -> None:
    """Where z is kept beside x by who reads it, for want of an inverse, and :func:`inplace_abn.recompute` would help."""
    if phi.inverse is None and torch.is_grad_enabled() and not (is_at_work() or recomputing() or saves_by_hooks()):
        warn_once(
            f"{phi.name} has no inverse: the layer keeps x, and who reads its output keeps that, which makes two maps. "
            "Within a model marked by inplace_abn.recompute(model), as converted ones are, it is one map; this call is not "
            "within such a model: mark the one that is called. leaky_relu with slope 0.01 does without recomputing"
        )


def inplace_abn_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-05,
    activation: str | None = "leaky_relu",
    activation_param: float = SLOPE,
    group: Any = None,
    *,
    variant: str = "II",
    weight_floor: float = WEIGHT_FLOOR,
    num_batches_tracked: Tensor | None = None,
    residual: Tensor | None = None,
    keep_x: bool = False,
    overwrite: bool = True,
) -> Tensor:
    """:func:`inplace_abn` with statistics over all ranks of ``group`` (None: all ranks), as if one process had all samples.

    Training takes one collective forward and one backward on every rank of the group, whether or not it has samples (x may be
    empty) or needs gradients; evaluation, and a group of one rank, take none. dx uses the sums of all ranks; the gradients
    of weight and bias are this rank's own sums, for DistributedDataParallel to average. Where torch.distributed is not
    initialised, statistics are this process's own, and one warning says so.

    ``torch.compile`` breaks its graph here: the collectives run outside of it.
    """
    how = settled(training, momentum, eps, activation, activation_param, weight_floor, variant, overwrite)
    vectors = (weight, bias, running_mean, running_var, num_batches_tracked)
    return synchronised(x, vectors, how, group, residual, keep_x)


def synchronised(
    x: Tensor, vectors: Vectors, how: Settings, group: Any, residual: Tensor | None = None, keep_x: bool = False
) -> Tensor:
    """:func:`inplace_abn_sync`, of what was settled before."""
    if how.training and not ranks.is_on():
        warn_once("inplace_abn_sync: torch.distributed is not initialised; statistics are those of this process alone")
    if not how.training or ranks.size(group) == 1:
        return in_place(x, vectors, how, residual, keep_x)
    check(x, vectors, how, alone=False)
    if residual is not None:
        residual = added(residual, x)
        if residual.shape != x.shape:
            normalized = synchronised(x, vectors, without_phi(how), group, None, True)
            return _added_to_larger(normalized, residual, how)
    # Without gradients nobody expects x to change; a tensor without history is not overwritten.
    return _synchronised(x if torch.is_grad_enabled() else x.detach(), vectors, how, group, residual, keep_x)


# Not torch.compiler.disable, which imports the whole compiler at once.
@_disable_dynamo
def _synchronised(
    x: Tensor, vectors: Vectors, how: Settings, group: Any, residual: Tensor | None, keep_x: bool
) -> Tensor:
    """A training call of several ranks."""
    # Gives every rank a backward pass to take part in, even one with nothing to learn.
    anchor = x.new_zeros(0, requires_grad=True)
    if how.phi.inverse is not None:
        warn_of_slope(how.phi, how.a, x.dtype)
    if keep_x or how.phi.inverse is None:
        _warn_of_two_maps(how.phi)
        return keeping_x(x, vectors, how, residual, group, anchor)
    z: Tensor = InPlaceABN.apply(x, *vectors[:2], residual, vectors[2:], how, group, anchor)  # type: ignore[no-untyped-call]
    return z


def in_steps(x: Tensor, vectors: Vectors, how: Settings, residual: Tensor | None = None) -> Tensor:
    """``batch_norm`` and then the activation, as two steps of torch: what :class:`inplace_abn.ABN` computes."""
    check(x, vectors, how)
    if residual is not None:
        residual = added(residual, x)
    return _composite(x, vectors, how, residual)


class InPlaceABN(torch.autograd.Function):
    """z = φ(BN(x) [+ r]) and its gradient.

    Saved: z, weight, bias, r, invstd, None; with a record x, weight, bias, r, invstd, mean.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        buffers: tuple[Tensor | None, Tensor | None, Tensor | None],
        how: Settings,
        group: Any = None,
        anchor: Tensor | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """Overwrite x, or a copy of it where that is not allowed; with an anchor, the batch is that of all ranks of the group.

        With a record, x is kept and z new.
        """
        if record is not None:
            record.node = weakref.ref(ctx)
            return InPlaceABN._forward_keeping_x(ctx, x, weight, bias, residual, buffers, how, group, anchor, record)
        ops = backend(x)
        # Statistics move once.
        running_mean, running_var, num_batches_tracked = (
            (None, None, None) if recomputing() and how.training else buffers
        )
        kept_ops = count = None
        fresh = False
        if how.overwrite and may_overwrite(x) and (residual is None or not _share_memory(x, residual)):
            z = x
            ctx.mark_dirty(x)
            # No hooks store z, or it would not be overwritten: backward finds it as it is here.
            kept_ops = ops
        elif how.training and anchor is None and is_dense(x):
            fresh = True
        else:
            z = x.clone()
        if fresh:
            # Straight into a new z: a copy would be read once more.
            moved = (running_mean, running_var, num_batches_tracked)
            rest = (how.momentum, how.eps, how.floor, how.phi, how.a, residual)
            z, _, invstd = ops.normalize_batch(x, weight, bias, *moved, *rest)
        elif anchor is not None:
            mean, var, count = _moments_of_all(z, ops, group)
            invstd = (var + how.eps).rsqrt_()
            if z.numel():
                ops.normalize_(z, mean, invstd, weight, bias, how.floor, how.phi, how.a, residual)
            unbiased = var * (count / (count - 1))
            reference.track(running_mean, running_var, num_batches_tracked, mean, unbiased, how.momentum)
        elif how.training:
            invstd = ops.normalize_batch_(
                z,
                weight,
                bias,
                running_mean,
                running_var,
                num_batches_tracked,
                how.momentum,
                how.eps,
                how.floor,
                how.phi,
                how.a,
                residual,
            )
        else:
            assert running_mean is not None and running_var is not None
            invstd = (running_var.double() + how.eps).rsqrt_()
            ops.normalize_(z, running_mean.double(), invstd, weight, bias, how.floor, how.phi, how.a, residual)
        ctx.save_for_backward(z, weight, bias, residual, invstd, None)
        # At once: each attribute is slow to set, and to find.
        ctx.call = how, kept_ops, group, count, None, _checksum(z) if DEBUG and not z.is_meta else None
        return z

    @staticmethod
    def _forward_keeping_x(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        buffers: tuple[Tensor | None, ...],
        how: Settings,
        group: Any,
        anchor: Tensor | None,
        record: Record,
    ) -> Tensor:
        ops = backend(x)
        z: Tensor
        count = None
        if recomputing() and how.training:
            # Statistics move once.
            buffers = (None, None, None)
        if how.training and anchor is None:
            rest = (how.momentum, how.eps, how.floor, how.phi, how.a, residual)
            z, mean, invstd = ops.normalize_batch(x, weight, bias, *buffers, *rest)
        else:
            z = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            if anchor is None:
                mean, var, _ = buffers
                assert mean is not None and var is not None
                # A copy: a training step in between may move the buffers.
                mean, invstd = mean.to(reference.wide(x), copy=True), (var.double() + how.eps).rsqrt_()
            else:
                mean, var, count = _moments_of_all(x, ops, group)
                invstd = (var + how.eps).rsqrt_()
                unbiased = var * (count / (count - 1))
                running_mean, running_var, tracked = buffers
                reference.track(running_mean, running_var, tracked, mean, unbiased, how.momentum)
            mean, invstd = mean.to(reference.wide(x)), invstd.to(reference.wide(x))
            if x.numel():
                ops.normalize_(x, mean, invstd, weight, bias, how.floor, how.phi, how.a, residual, z)
        ctx.save_for_backward(x, weight, bias, residual, invstd, mean)
        ctx.call = how, None, group, count, record, None
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        """dx, dweight, dbias, dr from dz and the saved z; differentiating those raises."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                gradients, saved = InPlaceABN._gradients(ctx, dz)
            gradients = only_once(gradients, dz, *saved)
        else:
            gradients, _ = InPlaceABN._gradients(ctx, dz)
        # Those of the other arguments; torch drops what is beyond the last.
        return *gradients, None, None, None, None, None

    @staticmethod
    def _gradients(ctx: Any, dz: Tensor) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """What backward gives, and what was saved."""
        how, ops, group, count, record, checksum = ctx.call
        saved = _saved(ctx, how, record, checksum)
        # z is x where x was kept, and the mean is there.
        z, weight, bias, residual, invstd, mean = saved
        ops = ops or backend(z)
        rest = (how.floor, how.phi, how.a, how.variant, residual)
        need_x, need_weight, need_bias, need_r = ctx.needs_input_grad[:4]
        dx = dgamma = dbeta = dr = None
        if need_r and how.phi.name == "identity":
            dr, need_r = dz, False
        elif need_r:
            dr, need_x = torch.empty_strided(z.shape, z.stride(), dtype=z.dtype, device=z.device), True
        fill = dr if need_r else None
        if count is not None:
            if z.numel():
                dbeta, dgamma = ops.sums(dz, z, weight, bias, *rest, mean, invstd)
            else:
                dbeta, dgamma = z.new_zeros(2, z.shape[1])
            # Whatever this rank needs, the others wait for its sums.
            of_all = ranks.total_sums(dbeta, dgamma, group)
            if need_x:
                means = (s / count for s in of_all)
                last = (*rest, fill, mean)
                dx = ops.input_grad(dz, z, weight, bias, invstd, *means, 1, *last) if z.numel() else dz.clone()
        elif how.training and need_x:
            dx, dgamma, dbeta = ops.input_grad_batch(dz, z, weight, bias, invstd, *rest, fill, mean)
        else:
            if need_weight or need_bias:
                dbeta, dgamma = ops.sums(dz, z, weight, bias, *rest, mean, invstd)
            if need_x:
                dx = ops.input_grad(dz, z, weight, bias, invstd, None, None, 0, *rest, fill, mean)
        if record is not None:
            record.forget()
        dweight = _gradient_of(weight, dgamma) if need_weight else None
        dbias = _gradient_of(bias, dbeta) if need_bias else None
        return (dx, dweight, dbias, dr), saved


def _gradient_of(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The gradient in its parameter's dtype."""
    if parameter is None or gradient is None:
        return None
    # A conversion to the same dtype costs nothing but the call, which for a small layer is dear.
    return gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)


# Function.apply itself looks for transforms of torch.func first, which were ruled out, and costs a third of the call.
_apply: Any = super(torch.autograd.Function, InPlaceABN).apply


class _OnlyOnce(torch.autograd.Function):
    """The identity in its first argument, whose own gradient raises: dx was computed from numbers, not from a graph."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *history: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RuntimeError(NOT_TWICE)


def only_once(gradients: tuple[Tensor | None, ...], *history: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients, as far as autograd knows differentiable by all that they were computed of: which raises.

    Without these, whoever asks for the gradients of some tensors alone would silently get what does not go through here.
    """
    of = [t for t in history if t is not None and t.requires_grad]
    once: Any = _OnlyOnce.apply
    # Detached: one may be dz itself, which is the caller's.
    return tuple(None if g is None else once(g.detach(), *of) for g in gradients)


def _moments_of_all(z: Tensor, ops: Any, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count over the ranks of the group; an error on every rank if the count is too small."""
    if z.numel():
        mean, var, count = ops.moments(z)
    else:
        mean, var, count = *z.new_zeros(2, z.shape[1], dtype=torch.float64), 0
    mean, var, total = ranks.merged_moments(mean, var, count, group)
    # More than one here is more than one in all: only then is the total worth waiting for.
    if count < 2 and total < 2:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {int(total)} on all {ranks.size(group)} ranks together; "
            "use a larger batch, or the layer in eval mode"
        )
    return mean, var, total


def _composite(x: Tensor, vectors: Vectors, how: Settings, residual: Tensor | None) -> Tensor:
    """The same function out of torch's own differentiable steps, which keep x and z."""

    weight, bias, running_mean, running_var, num_batches_tracked = vectors

    def act(y: Tensor) -> Tensor:
        return how.phi.plain(y if residual is None else y + residual, how.a)

    if weight is not None and how.floor > 0:
        if is_exported():
            # ONNX knows no sign bit; −0 counts as 0 there.
            weight = torch.where(weight.abs() < how.floor, torch.where(weight < 0, -how.floor, how.floor), weight)
        else:
            # Straight through, as in the verbs: the guard moves the value and not the gradient.
            guarded = torch.copysign(weight.abs().clamp_min(how.floor), weight)
            weight = weight + (guarded - weight).detach()
    given = [v for v in (weight, bias, running_mean, running_var) if v is not None]
    # Torch takes vectors in x's dtype, or float32 ones beside 16-bit x.
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16) and any(v.dtype != dtype for v in given):
        dtype = torch.float32
    weight, bias = (None if v is None else v.to(dtype) for v in (weight, bias))
    if not how.training:
        assert running_mean is not None and running_var is not None
        # Copies: a training step in between may move the buffers that backward needs.
        fixed = running_mean.to(dtype, copy=True), running_var.to(dtype, copy=True)
        return act(F.batch_norm(x, *fixed, weight, bias, False, 0.0, how.eps))
    if running_mean is None or running_var is None:
        return act(F.batch_norm(x, None, None, weight, bias, True, 0.0, how.eps))
    if is_transformed():
        y = F.batch_norm(x, None, None, weight, bias, True, 0.0, how.eps)
        unbiased, mean = torch.var_mean(x.detach().to(dtype), [0, *range(2, x.dim())], correction=1)
        # What a transform wraps cannot be written into a buffer from outside of it.
        if is_wrapped(mean) and not is_wrapped(running_mean):
            warn_once(
                "running statistics stay as they are inside this torch.func transform: they were not among its inputs; "
                "hand the buffers in by torch.func.functional_call"
            )
            return act(y)
    elif (
        how.momentum is not None and running_mean.dtype == running_var.dtype == reference.wide(x) and not recomputing()
    ):
        # Torch moves such statistics itself, within its own kernel.
        if num_batches_tracked is not None:
            num_batches_tracked.add_(1)
        return act(F.batch_norm(x, running_mean, running_var, weight, bias, True, how.momentum, how.eps))
    else:
        # Momentum 1 makes torch hand out the batch's own statistics.
        mean, unbiased = x.new_zeros(x.shape[1], dtype=dtype), x.new_zeros(x.shape[1], dtype=dtype)
        y = F.batch_norm(x, mean, unbiased, weight, bias, True, 1.0, how.eps)
    if not recomputing():
        with torch.no_grad():
            reference.track(running_mean, running_var, num_batches_tracked, mean, unbiased, how.momentum)
    return act(y)


def _added_to_larger(y: Tensor, residual: Tensor, how: Settings) -> Tensor:
    """φ(y + r) in ordinary steps: z has more elements than x, which cannot hold it."""
    return how.phi.plain(y + residual, how.a)


def _share_memory(x: Tensor, residual: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == residual.untyped_storage().data_ptr()


def _needs_graph(*tensors: Tensor | None) -> bool:
    """Whether there is a backward pass to keep z for."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def _checksum(z: Tensor) -> Tensor:
    """Sum of z's bits as integers, modulo 2⁶⁴: any change of a single element changes it."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[z.element_size()]
    return z.detach().resolve_neg().view(bits).sum(dtype=torch.int64)


def _saved(ctx: Any, how: Settings, record: Record | None, checksum: Tensor | None) -> tuple[Any, ...]:
    """The saved tensors, or an error that names the layer and the cure if they were written to."""
    try:
        saved: tuple[Any, ...] = ctx.saved_tensors if record is None else record.saved()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"InPlaceABN with activation {how.phi.name}: its output z, or its weight, bias or residual, was changed in place "
            "after the forward pass, but backward recovers everything from them. Use out-of-place operations on z "
            "(z = z + r for z += r, inplace=False for the next activation), and step the optimizer after backward. "
            f"Torch says: {error}"
        ) from error
    if checksum is not None and not torch.equal(checksum, _checksum(saved[0])):
        raise RuntimeError(
            f"InPlaceABN with activation {how.phi.name} and output of shape {tuple(saved[0].shape)}: z was changed through "
            ".data or by a foreign kernel after the forward pass; work on a copy, z.clone()"
        )
    return saved

"""The verbs of :mod:`inplace_abn.reference` as Triton kernels, for CUDA tensors: same names, same arguments.

A local batch takes one launch forward and one backward. The programs that share a slab of channels exchange their sums within
the launch, and hold the slab in shared memory until then (:mod:`.ring`), or as much of it as fits (:mod:`.sweep`), or read it
a second time while it is still in the L2 cache (:mod:`.device`), so that little of x, z and dz comes from memory twice. Running
statistics, the counter, the guard on γ, dγ and dβ are computed inside, and the host never waits. Where a card cannot hold the
programs of a slab at once, and for the verbs that synchronised statistics need one by one, there is a kernel for each verb.
Which tensors they take: :func:`supports`.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import activations
from ..activations import Activation
from . import device, launches, plans

__all__ = [
    "input_grad",
    "input_grad_batch",
    "moments",
    "normalize_",
    "normalize_batch",
    "normalize_batch_",
    "sums",
    "supports",
]


def supports(x: Tensor) -> bool:
    """Whether the kernels take x: float32, float16 or bfloat16 on a GPU, with strides that let pixels run in one line."""
    # Subclasses (fake tensors among them) and lazily negated tensors are not what their memory says.
    if type(x) not in (Tensor, torch.nn.Parameter) or not x.is_cuda or x.is_neg():
        return False
    return x.dtype in (torch.float32, torch.float16, torch.bfloat16) and x.numel() > 0 and plans.layout(x) is not None


@cache
def compiled(phi: Activation) -> tuple[Any, Any, Any]:
    """φ, φ⁻¹ and φ′ as device functions, out of the very code of the table; the identity where there is no inverse."""
    helpers = {name: _on_device(getattr(activations, name), {}) for name in ("expm1", "log1p")}
    forward, inverse, backward = (
        _on_device(f, helpers) for f in (phi.forward, phi.inverse or activations.identity, phi.backward)
    )
    return forward, inverse, backward


def _on_device(function: Any, helpers: dict[str, Any]) -> Any:
    """The function with ``xp`` bound to Triton's language."""
    rebound = FunctionType(function.__code__, {"xp": tl, "Tensor": tl.tensor, **helpers}, function.__name__)
    rebound.__module__ = __name__
    rebound.__qualname__ = f"{__name__}.{function.__name__}"
    return triton.jit(rebound)


def _vector(v: Tensor | float | None, instead: Tensor) -> Tensor:
    """A per-channel vector as the kernels read it; where there is none, any pointer will do."""
    return v.contiguous() if isinstance(v, Tensor) else instead


def _forward_flags(
    track: bool, cumulative: bool, counted: bool, weight: bool, bias: bool, residual: bool, phi: Activation | None
) -> dict[str, Any]:
    """What is compiled into the kernels of a forward pass; each takes what it knows."""
    return {
        "TRACK": track, "CUMULATIVE": cumulative, "COUNTED": counted, "HAS_WEIGHT": weight, "HAS_BIAS": bias,
        "RESIDUAL": residual, "PHI": None if phi is None else compiled(phi)[0],
    }  # fmt: skip


def _backward_flags(
    weight: bool,
    bias: bool,
    residual: bool,
    from_x: bool,
    hat: bool,
    phi: Activation,
    variant: str,
    need_r: bool = False,
    fixed: bool = False,
) -> dict[str, Any]:
    """What is compiled into the kernels of a backward pass; each takes what it knows."""
    forward, inverse, backward = compiled(phi)
    if from_x and phi.inverse is not None:
        # From x: what φ′ wants is φ(y); without an inverse, y itself, and the identity stands there already.
        inverse = forward
    return {
        "HAS_WEIGHT": weight, "HAS_BIAS": bias, "RESIDUAL": residual, "FROM_X": from_x, "HAT": hat, "INVERSE": inverse,
        "BACKWARD": backward, "VARIANT_I": variant == "I" or from_x, "NEED_R": need_r, "FIXED": fixed,
    }  # fmt: skip


def _moments(
    x: Tensor,
    eps: float,
    running: tuple[Tensor, Tensor] | None = None,
    tracked: Tensor | None = None,
    momentum: float | None = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    # Storages of their own: some are kept for backward, and half of a larger one need not be aligned.
    mean, var, invstd = (torch.empty(x.shape[1], dtype=torch.float32, device=x.device) for _ in range(3))
    moved = [*(running or (mean, var)), invstd if tracked is None else tracked]
    floats = (x.numel() / x.shape[1], momentum or 0.0, eps)
    asked = _forward_flags, running is not None, momentum is None, False, False, False, False, None
    launches.launch(device.moments_kernel, 1, 0, [x, mean, var, invstd, *moved], floats, asked)
    return mean, var, invstd


def _transform_(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    tracked: Tensor | None,
    floor: float,
    phi: Activation,
    a: float,
    residual: Tensor | None,
    out: Tensor | None = None,
) -> None:
    vectors = [mean.contiguous(), invstd.contiguous(), _vector(weight, mean), _vector(bias, mean)]
    maps = [x, x if residual is None else _as(residual, x), x if out is None else out]
    has = tracked is not None, weight is not None, bias is not None, residual is not None
    asked = _forward_flags, False, False, *has, phi
    counter = mean if tracked is None else tracked
    launches.launch(device.transform_kernel, 3, 0, [*maps, *vectors, counter], (floor, a), asked)


def moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance of every channel, and the count m of values in each."""
    mean, var, _ = _moments(x, 1.0)
    return mean, var, x.numel() // x.shape[1]


def normalize_(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    floor: float,
    phi: Activation,
    a: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Overwrite x, or fill ``out``, laid out as x, with z = φ(γ·(x − mean)·invstd + β [+ r])."""
    _transform_(x, mean, invstd, weight, bias, None, floor, phi, a, residual, out)


def normalize_batch_(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    floor: float,
    phi: Activation,
    a: float,
    residual: Tensor | None = None,
) -> Tensor:
    """Overwrite x with z from the batch's own statistics, move the running ones, return invstd."""
    tracked, dense, momentum = _to_move(running_mean, running_var, num_batches_tracked, momentum)
    invstd = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    means, variances = dense or (invstd, invstd)
    r = x if residual is None else _as(residual, x)
    gamma, beta, counter = _vector(weight, invstd), _vector(bias, invstd), invstd if tracked is None else tracked
    tensors = [x, r, gamma, beta, invstd, means, variances, counter]
    kinds = gamma.dtype, beta.dtype, means.dtype, variances.dtype
    has = tracked is not None, weight is not None, bias is not None, residual is not None
    asked = _forward_flags, dense is not None, momentum is None, *has, phi
    if not launches.launch(device.forward_kernel, 2, 1, tensors, (momentum or 0.0, eps, floor, a), asked, kinds):
        mean, _, invstd = _moments(x, eps, dense, tracked, momentum)
        _transform_(x, mean, invstd, weight, bias, tracked, floor, phi, a, r if residual is not None else None)
    _have_moved(running_mean, running_var, tracked, dense)
    return invstd


Pair = tuple[Tensor, Tensor]


def _to_move(
    running_mean: Tensor | None, running_var: Tensor | None, tracked: Tensor | None, momentum: float | None
) -> tuple[Tensor | None, Pair | None, float | None]:
    """The counter, the running statistics as kernels write them, and the momentum; nothing where there are none."""
    if running_mean is None or running_var is None:
        return None, None, 0.0
    return tracked, (running_mean.contiguous(), running_var.contiguous()), momentum


def _have_moved(
    running_mean: Tensor | None, running_var: Tensor | None, tracked: Tensor | None, dense: Pair | None
) -> None:
    """Bring what kernels wrote to where it belongs, and tell autograd, which does not see it."""
    if dense is None or running_mean is None or running_var is None:
        return
    if dense[0] is not running_mean:
        running_mean.copy_(dense[0])
    if dense[1] is not running_var:
        running_var.copy_(dense[1])
    # What was made under inference mode has no version, and is passed over.
    written = (running_mean, running_var) if tracked is None else (running_mean, running_var, tracked)
    torch.autograd.graph.increment_version(written)


def normalize_batch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    floor: float,
    phi: Activation,
    a: float,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A new z from the batch's own statistics, which leaves x as it is; mean and invstd. Moves the running statistics."""
    tracked, dense, momentum = _to_move(running_mean, running_var, num_batches_tracked, momentum)
    z = _like(x)
    mean, _, invstd = _moments(x, eps, dense, tracked, momentum)
    _transform_(x, mean, invstd, weight, bias, tracked, floor, phi, a, residual, z)
    _have_moved(running_mean, running_var, tracked, dense)
    return z, mean, invstd


def sums(
    dz: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    floor: float,
    phi: Activation,
    a: float,
    variant: str,
    residual: Tensor | None = None,
    mean: Tensor | float | None = None,
    invstd: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """∑ dy (which is dβ) and ∑ dy·x̂ (which is dγ) of every channel."""
    sum_dy, sum_dy_xhat = (torch.empty(z.shape[1], dtype=torch.float32, device=z.device) for _ in range(2))
    maps = [_as(dz, z), z, z if residual is None else _as(residual, z)]
    vectors = [*(_vector(v, sum_dy) for v in (weight, bias, mean, invstd)), sum_dy, sum_dy_xhat]
    has = weight is not None, bias is not None, residual is not None, mean is not None, isinstance(mean, float)
    asked = _backward_flags, *has, phi, variant
    launches.launch(device.sums_kernel, 3, 0, maps + vectors, (floor, a), asked)
    return sum_dy, sum_dy_xhat


def input_grad(
    dz: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    invstd: Tensor,
    sum_dy: Tensor | None,
    sum_dy_xhat: Tensor | None,
    count: int,
    floor: float,
    phi: Activation,
    a: float,
    variant: str,
    residual: Tensor | None = None,
    dr: Tensor | None = None,
    mean: Tensor | float | None = None,
) -> Tensor:
    """dx, in a new buffer laid out as z. Sums of None mean fixed statistics, and then dx = γ·invstd·dy."""
    dx = _like(z)
    maps = [_as(dz, z), z, z if residual is None else _as(residual, z), dx, dx if dr is None else dr]
    vectors = [_vector(v, invstd) for v in (weight, bias, mean, invstd, sum_dy, sum_dy_xhat)]
    has = weight is not None, bias is not None, residual is not None, mean is not None, isinstance(mean, float)
    asked = _backward_flags, *has, phi, variant, dr is not None, sum_dy is None
    launches.launch(device.input_grad_kernel, 5, 0, maps + vectors, (max(count, 1), floor, a), asked)
    return dx


def _like(z: Tensor) -> Tensor:
    """A new buffer in z's layout, gaps included: one layout serves all tensors of a launch."""
    # Quicker, and the same where z has no gaps.
    new = torch.empty_like(z)
    if new.stride() != z.stride():
        # Not both at once.
        del new
        new = torch.empty_strided(z.shape, z.stride(), dtype=z.dtype, device=z.device)
    return new


def _as(dz: Tensor, z: Tensor) -> Tensor:
    """dz in z's layout: copied only if it has another."""
    if dz.stride() == z.stride() and dz.dtype == z.dtype and not dz.is_neg():
        return dz
    return _like(z).copy_(dz)


def input_grad_batch(
    dz: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    invstd: Tensor,
    floor: float,
    phi: Activation,
    a: float,
    variant: str,
    residual: Tensor | None = None,
    dr: Tensor | None = None,
    mean: Tensor | float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dγ, dβ of a local batch."""
    r = None if residual is None else _as(residual, z)
    dz, dx, sum_dy, sum_dy_xhat = _as(dz, z), _like(z), torch.empty_like(invstd), torch.empty_like(invstd)
    maps = [dz, z, z if r is None else r, dx, dx if dr is None else dr]
    gamma, beta, shift = _vector(weight, invstd), _vector(bias, invstd), _vector(mean, invstd)
    vectors = [gamma, beta, shift, invstd, sum_dy, sum_dy_xhat]
    kinds = gamma.dtype, beta.dtype, shift.dtype, invstd.dtype
    has = weight is not None, bias is not None, r is not None, mean is not None, isinstance(mean, float)
    asked = _backward_flags, *has, phi, variant, dr is not None
    twice = 2 if r is None else 3
    if launches.launch(device.backward_kernel, 5, twice, maps + vectors, (floor, a), asked, kinds):
        return dx, sum_dy_xhat, sum_dy
    # Not beside those of the verbs.
    del dx, maps, sum_dy, sum_dy_xhat, vectors
    rest = (floor, phi, a, variant, r)
    sum_dy, sum_dy_xhat = sums(dz, z, weight, bias, *rest, mean, invstd)
    dx = input_grad(dz, z, weight, bias, invstd, sum_dy, sum_dy_xhat, z.numel() // z.shape[1], *rest, dr, mean)
    return dx, sum_dy_xhat, sum_dy

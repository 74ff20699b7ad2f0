"""The verbs of :mod:`inplace_abn.reference` as Triton kernels, for CUDA tensors: same names, same arguments.

Two launches forward (moments, transform), two backward (sums, input gradient): x is read twice and written once, z and dz are
read twice and dx is written once. Running statistics, the counter, the guard on γ, dγ and dβ are computed inside, and the
host never waits. Which tensors they take: :func:`supports`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import activations
from ..activations import Activation
from . import device

__all__ = ["input_grad", "input_grad_batch", "moments", "normalize_", "normalize_batch_", "sums", "supports"]

# Elements per tile, warps per program: 16 elements a thread.
TILE = 4096
WARPS = 8
# Neighbouring channels per slab where channels are innermost: 128 bytes of bfloat16.
CHANNELS = 64


class Layout(NamedTuple):
    """A tensor as rows (images, or pixels where channels are inner) of a channel, and the strides between them."""

    inner: bool
    rows: int
    channels: int
    pixels: int
    row_stride: int
    channel_stride: int


class Plan(NamedTuple):
    """How a layout is cut: arguments of every kernel, its constants, and the sizes of the grids."""

    place: tuple[int, ...]
    constants: dict[str, Any]
    slabs: int
    tiles: int
    programs: int


def layout(x: Tensor) -> Layout | None:
    """See x as channels outer or inner, or say that its strides allow neither."""
    return _layout(x.shape, x.stride())


@lru_cache(maxsize=4096)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout | None:
    images, channels = shape[:2]
    step, pixels = None, 1
    for size, stride in zip(shape[:1:-1], strides[:1:-1], strict=True):
        if size > 1:
            step = stride if step is None else step
            # The spatial dimensions must run through memory as one.
            if stride != pixels * step:
                return None
            pixels *= size
    channels_touch = channels == 1 or strides[1] == 1
    if step is None:
        return Layout(channels_touch, images, channels, 1, strides[0], 1 if channels_touch else strides[1])
    if step == 1:
        return Layout(False, images, channels, pixels, strides[0], strides[1])
    if channels_touch and (images == 1 or strides[0] == pixels * step):
        return Layout(True, images * pixels, channels, 1, step, 1)
    return None


def supports(x: Tensor) -> bool:
    """Whether the kernels take x: float32, float16 or bfloat16 on a GPU, with strides that let pixels run in one line."""
    # Subclasses (fake tensors among them) and lazily negated tensors are not what their memory says.
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.is_cuda and not x.is_neg()
    return (
        plain and x.dtype in (torch.float32, torch.float16, torch.bfloat16) and x.numel() > 0 and layout(x) is not None
    )


@lru_cache(maxsize=4096)
def plan(place: Layout, itemsize: int, processors: int) -> Plan:
    """Cut a layout into slabs and tiles, by formula: the same in every process."""
    per_vector = 16 // itemsize
    if place.inner:
        width = min(CHANNELS, triton.next_power_of_2(place.channels))
        height = TILE // width
        across, tiles, w = 1, triton.cdiv(place.rows, height), width
        vector = _common(per_vector, place.row_stride)
    else:
        width = min(TILE, triton.next_power_of_2(place.pixels))
        height = max(1, min(triton.next_power_of_2(place.rows), TILE // width))
        across = triton.cdiv(place.pixels, width)
        tiles, w = triton.cdiv(place.rows, height) * across, 1
        vector = _common(per_vector, place.row_stride, place.channel_stride)
    slabs = triton.cdiv(place.channels, w)
    # Four programs per processor keep enough loads in flight.
    programs = max(1, min(tiles, triton.cdiv(4 * processors, slabs)))
    numbers = (place.rows, place.channels, place.pixels, place.row_stride, place.channel_stride, across, tiles)
    return Plan(
        numbers, {"INNER": place.inner, "BR": height, "BC": width, "W": w, "VEC": vector}, slabs, tiles, programs
    )


def _common(limit: int, *strides: int) -> int:
    """Largest power of two up to the limit that divides all strides."""
    while any(stride % limit for stride in strides):
        limit //= 2
    return limit


@cache
def compiled(phi: Activation) -> tuple[Any, Any, Any]:
    """φ, φ⁻¹ and φ′ as device functions, out of the very code of the table."""
    assert phi.inverse is not None
    helpers = {name: _on_device(getattr(activations, name), {}) for name in ("expm1", "log1p")}
    forward, inverse, backward = (_on_device(f, helpers) for f in (phi.forward, phi.inverse, phi.backward))
    return forward, inverse, backward


def _on_device(function: Any, helpers: dict[str, Any]) -> Any:
    """The function with ``xp`` bound to Triton's language."""
    rebound = FunctionType(function.__code__, {"xp": tl, "Tensor": tl.tensor, **helpers}, function.__name__)
    rebound.__module__ = __name__
    rebound.__qualname__ = f"{__name__}.{function.__name__}"
    return triton.jit(rebound)


@cache
def _workspace(where: torch.device, stream: int, slabs: int, floats: int) -> tuple[Tensor, Tensor]:
    """Arrival counters, which every launch leaves at zero, and room for partial results; one per stream: launches may overlap."""
    return torch.zeros(slabs, dtype=torch.int32, device=where), torch.empty(floats, dtype=torch.float32, device=where)


def _room(x: Tensor, p: Plan, values: int) -> tuple[Tensor, Tensor]:
    # In powers of two, so that few sizes serve all layers.
    sizes = triton.next_power_of_2(p.slabs), triton.next_power_of_2(p.slabs * p.programs * values * p.constants["W"])
    if not x.is_cuda:
        return _workspace(x.device, 0, *sizes)
    if torch.cuda.is_current_stream_capturing():
        # Graphs captured on one stream may be replayed on several: each launch gets a workspace of its own.
        return _workspace.__wrapped__(x.device, 0, *sizes)
    return _workspace(x.device, torch.cuda.current_stream(x.device).cuda_stream, *sizes)


@cache
def _processors(where: torch.device) -> int:
    # Without a GPU the kernels run in Triton's interpreter, for tests.
    return int(torch.cuda.get_device_properties(where).multi_processor_count) if where.type == "cuda" else 2


def _plan(x: Tensor) -> Plan:
    place = layout(x)
    assert place is not None
    return plan(place, x.element_size(), _processors(x.device))


def _vector(v: Tensor | None, instead: Tensor) -> Tensor:
    """A per-channel vector as the kernels read it; where there is none, any pointer will do."""
    return instead if v is None else v.contiguous()


def _on(x: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the current device: make it x's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _block(p: Plan) -> int:
    """How many partial results the last program loads at once."""
    return int(min(triton.next_power_of_2(p.programs), max(1, TILE // p.constants["W"])))


def _moments(
    x: Tensor,
    p: Plan,
    eps: float,
    running: tuple[Tensor, Tensor] | None = None,
    tracked: Tensor | None = None,
    momentum: float | None = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = torch.empty(2, x.shape[1], dtype=torch.float32, device=x.device)
    # Kept for backward, so in a storage of its own.
    invstd = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    counters, partial = _room(x, p, 4)
    means, variances = running or (mean, var)
    device.moments_kernel[(p.slabs * p.programs,)](
        x, mean, var, invstd, means, variances, counters if tracked is None else tracked, partial, counters,
        *p.place, p.programs, 0.0 if momentum is None else momentum, eps,
        TRACK=running is not None, CUMULATIVE=momentum is None, **p.constants, BP=_block(p), num_warps=WARPS,
    )  # fmt: skip
    return mean, var, invstd


def _transform_(
    x: Tensor,
    p: Plan,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    tracked: Tensor | None,
    floor: float,
    phi: Activation,
    a: float,
) -> None:
    device.transform_kernel[(p.slabs * p.tiles,)](
        x, mean.contiguous(), invstd.contiguous(), _vector(weight, mean), _vector(bias, mean),
        mean if tracked is None else tracked, *p.place, floor, a,
        COUNTED=tracked is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, PHI=compiled(phi)[0],
        **p.constants, num_warps=WARPS,
    )  # fmt: skip


def moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance of every channel, and the count m of values in each."""
    with _on(x):
        mean, var, _ = _moments(x, _plan(x), 1.0)
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
) -> None:
    """Overwrite x with z = φ(γ·(x − mean)·invstd + β)."""
    with _on(x):
        _transform_(x, _plan(x), mean, invstd, weight, bias, None, floor, phi, a)


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
) -> Tensor:
    """Overwrite x with z from the batch's own statistics, move the running ones, return invstd."""
    buffers: tuple[Tensor, ...] = ()
    dense, tracked = None, None
    if running_mean is not None and running_var is not None:
        buffers, tracked = (running_mean, running_var), num_batches_tracked
        dense = running_mean.contiguous(), running_var.contiguous()
    else:
        momentum = 0.0
    with _on(x):
        p = _plan(x)
        mean, _, invstd = _moments(x, p, eps, dense, tracked, momentum)
        _transform_(x, p, mean, invstd, weight, bias, tracked, floor, phi, a)
        for own, moved in zip(buffers, dense or (), strict=True):
            if own is not moved:
                own.copy_(moved)
    # Autograd does not see what a kernel writes.
    torch.autograd.graph.increment_version([t for t in (*buffers, tracked) if t is not None and not t.is_inference()])
    return invstd


def sums(
    dz: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    floor: float,
    phi: Activation,
    a: float,
    variant: str,
) -> tuple[Tensor, Tensor]:
    """∑ dy (which is dβ) and ∑ dy·x̂ (which is dγ) of every channel."""
    sum_dy, sum_dy_xhat = torch.empty(2, z.shape[1], dtype=torch.float32, device=z.device)
    _, inverse, backward = compiled(phi)
    with _on(z):
        p = _plan(z)
        counters, partial = _room(z, p, 2)
        device.sums_kernel[(p.slabs * p.programs,)](
            _as(dz, z), z, _vector(weight, sum_dy), _vector(bias, sum_dy), sum_dy, sum_dy_xhat, partial, counters,
            *p.place, p.programs, floor, a,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, INVERSE=inverse, BACKWARD=backward,
            VARIANT_I=variant == "I", **p.constants, BP=_block(p), num_warps=WARPS,
        )  # fmt: skip
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
) -> Tensor:
    """dx, in a new buffer laid out as z. Sums of None mean fixed statistics, and then dx = γ·invstd·dy."""
    # One layout for all three, gaps included.
    dx = torch.empty_strided(z.shape, z.stride(), dtype=z.dtype, device=z.device)
    _, inverse, backward = compiled(phi)
    with _on(z):
        p = _plan(z)
        device.input_grad_kernel[(p.slabs * p.tiles,)](
            _as(dz, z), z, dx, _vector(weight, invstd), _vector(bias, invstd), invstd.contiguous(),
            _vector(sum_dy, invstd), _vector(sum_dy_xhat, invstd),
            *p.place, float(max(count, 1)), floor, a,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, INVERSE=inverse, BACKWARD=backward,
            FIXED=sum_dy is None, VARIANT_I=variant == "I", **p.constants, num_warps=WARPS,
        )  # fmt: skip
    return dx


def _as(dz: Tensor, z: Tensor) -> Tensor:
    """dz in z's layout: copied only if it has another."""
    if dz.stride() == z.stride() and dz.dtype == z.dtype and not dz.is_neg():
        return dz
    return torch.empty_strided(z.shape, z.stride(), dtype=z.dtype, device=z.device).copy_(dz)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dγ, dβ of a local batch."""
    dz = _as(dz, z)
    rest = (floor, phi, a, variant)
    sum_dy, sum_dy_xhat = sums(dz, z, weight, bias, *rest)
    dx = input_grad(dz, z, weight, bias, invstd, sum_dy, sum_dy_xhat, z.numel() // z.shape[1], *rest)
    return dx, sum_dy_xhat, sum_dy

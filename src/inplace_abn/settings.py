"""What a call is asked to do: settled once, checked against its tensors, and refused before anything is written."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .activations import ACTIVATIONS, Activation, resolve

__all__ = ["WEIGHT_FLOOR", "Settings", "Vectors", "added", "check", "check_fixed", "settled", "without_phi"]

VARIANTS = ("I", "II")
# Least magnitude of γ, unless the caller says otherwise.
WEIGHT_FLOOR = 1e-5
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# weight, bias, running_mean, running_var, num_batches_tracked.
Vectors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Settings(NamedTuple):
    """What a call is asked to do, settled and checked."""

    training: bool
    momentum: float | None
    eps: float
    phi: Activation
    a: float
    floor: float
    variant: str
    overwrite: bool


def settled(
    training: bool,
    momentum: float | None,
    eps: float,
    activation: str | None,
    activation_param: float,
    floor: float = 0.0,
    variant: str = VARIANTS[-1],
    overwrite: bool = True,
) -> Settings:
    """The settings of a call, or an error if they cannot be right, whatever the input."""
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is unknown; one of: {', '.join(VARIANTS)}")
    if torch.compiler.is_compiling():
        # Compilers look through no cache.
        settle = _settled.__wrapped__
        return settle(training, momentum, eps, activation, float(activation_param), floor, variant, overwrite)
    # Of a layer they are the same at every call. As plain numbers: what is equal is alike then, and nothing changes inside.
    momentum = momentum if momentum is None or type(momentum) is float else _number("momentum", momentum)
    eps = eps if type(eps) is float else _number("eps", eps)
    floor = floor if type(floor) is float else _number("weight_floor", floor)
    a = activation_param if type(activation_param) is float else _number("activation_param", activation_param)
    asked = bool(training), momentum, eps, activation, a, floor, variant, bool(overwrite)
    try:
        return _settled(*asked)
    except TypeError:
        # A list, say, has no hash; the error is to name it.
        return _settled.__wrapped__(*asked)


def _number(name: str, value: Any) -> float:
    # Text that reads like one would do here, and fail where compiled: YAML takes 1e-5 for text.
    if not isinstance(value, str | bytes | bytearray):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return float(value)
    raise TypeError(f"{name} is {value!r}, which is no number; give a float")


@lru_cache(maxsize=1024)
def _settled(
    training: bool,
    momentum: float | None,
    eps: float,
    activation: str | None,
    a: float,
    floor: float,
    variant: str,
    overwrite: bool,
) -> Settings:
    phi, a = resolve(activation, a)
    if not eps > 0:
        raise ValueError(f"eps is {eps}; it must be positive, such as 1e-5")
    if not floor >= 0:
        raise ValueError(f"weight_floor is {floor}; it must not be negative")
    # Nothing is divided by γ where x is kept.
    return Settings(training, momentum, eps, phi, a, 0.0 if phi.inverse is None else floor, variant, overwrite)


def check(x: Tensor, vectors: Vectors, how: Settings, alone: bool = True) -> None:
    """Raise before anything is written if the call cannot be right."""
    shape, device, dtype = x.shape, x.device, x.dtype
    if x.layout != torch.strided or dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"x is {x.layout} {dtype}; it must be a dense tensor of {names}: convert it, as by x.float()")
    if len(shape) < 2:
        raise ValueError(f"x has shape {tuple(shape)}; it needs at least two dimensions, (N, C) or (N, C, …)")
    channels = shape[1]
    size = (channels,)
    weight, bias, running_mean, running_var, counter = vectors
    for v in (weight, bias, running_mean, running_var):
        if v is not None and not (v.shape == size and v.device == device and v.dtype in (dtype, torch.float32)):
            _refuse(v, x, vectors)
    if counter is not None and (counter.device != device or counter.dtype != torch.int64):
        raise ValueError(
            f"num_batches_tracked is {counter.dtype} on {counter.device}; it must be torch.int64 on {device}, where x is: "
            "move the whole layer there"
        )
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var belong together: give both or neither")
    if weight is None and bias is not None:
        check_fixed(how.phi)
    if not how.training:
        if running_mean is None:
            raise ValueError("training=False needs running_mean and running_var")
        return
    if alone and x.numel() <= channels:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(shape)}; "
            "use a larger batch, or the layer in eval mode"
        )
    if running_mean is not None:
        if how.momentum is None and counter is None:
            raise ValueError("momentum=None averages over all batches and needs num_batches_tracked to count them")
        if not torch.compiler.is_compiling() and running_mean.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "running_mean was made under torch.inference_mode and cannot be moved outside of it; build the layer outside, "
                "or copy its state into one that was"
            )


def _refuse(v: Tensor, x: Tensor, vectors: Vectors) -> None:
    """Say which of the vectors v is, and why it does not go with x."""
    name = ("weight", "bias", "running_mean", "running_var")[[v is other for other in vectors].index(True)]
    channels = x.shape[1]
    if v.shape != (channels,):
        raise ValueError(
            f"{name} has shape {tuple(v.shape)}, but x of shape {tuple(x.shape)} has {channels} channels "
            "(dimension 1); build the layer with that num_features"
        )
    if v.device != x.device:
        raise ValueError(f"{name} is on {v.device} and x on {x.device}; move both to one device")
    raise TypeError(f"{name} is {v.dtype} and x {x.dtype}; keep {name} in float32 or in x's dtype")


def check_fixed(phi: Activation) -> None:
    """Raise if γ cannot be fixed to 1 in front of φ."""
    if not phi.scale_covariant:
        raise ValueError(
            f"γ is fixed to 1 (affine='bias'), but {phi.name} is not scale-covariant, so the next convolution "
            "cannot take γ over; use affine=True"
        )


def added(residual: Tensor, x: Tensor) -> Tensor:
    """The residual in x's dtype and shape, or in the larger one of their sum; an error if it cannot be added to x."""
    if residual.device != x.device:
        raise ValueError(f"residual is on {residual.device} and x on {x.device}; move both to one device")
    if residual.shape != x.shape:
        try:
            shape = torch.broadcast_shapes(residual.shape, x.shape)
        except RuntimeError as error:
            raise ValueError(
                f"residual has shape {tuple(residual.shape)} and x {tuple(x.shape)}, which cannot be added; bring it to x's "
                "shape, as by a convolution"
            ) from error
        # A view, so that no more is kept; kernels repeat it while they run.
        residual = residual.expand(shape)
    return residual.to(x.dtype)


def without_phi(how: Settings) -> Settings:
    """The same, up to y."""
    return how._replace(phi=ACTIVATIONS["identity"], a=0.0)

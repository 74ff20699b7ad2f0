"""The activations φ: each declared once, as φ, φ⁻¹ and φ′-from-the-output, in the table :data:`ACTIVATIONS`.

The formulas are written over the namespace ``xp`` with only those functions that torch and Triton's language share (``where``,
``exp``, ``log``, ``abs``, ``sigmoid``, ``erf``, ``clamp``), so a kernel can rebind ``xp`` and compile the very same code.

All of them run in float32 or float64. Inverses are finite for every storable z: where z has saturated (ELU at −α, tanh at ±1,
a softplus that underflowed to 0), y is not recoverable, φ′ is 0 there and the inverse returns the nearest finite value.
One saturated pixel therefore cannot turn a channel's sums into NaN.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch as xp
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "ALIASES", "SLOPE", "Activation", "named", "resolve", "warn", "warn_of_slope", "warn_once"]

# Of leaky ReLU, as in the paper and in torch; the α of ELU unless given, as in the original library.
SLOPE = 0.01

Formula = Callable[[Tensor, float], Tensor]
Gradient = Callable[[Tensor, Tensor, float], Tensor]


# By identity, which is quicker: rows are looked up, not made.
@dataclass(frozen=True, eq=False)
class Activation:
    """One row of the table.

    Attributes:
        name: the key in :data:`ACTIVATIONS`.
        plain: torch's own φ(y, a), in place on y where torch can; differentiable, exportable.
        forward: φ(y, a).
        inverse: φ⁻¹(z, a), or None where φ cannot be inverted.
        backward: φ′·dz from the *output*, as ``backward(dz, z, a)``; from the input y where ``inverse`` is None.
        parameter: what ``a`` is called ("slope", "alpha"), or None where φ has no parameter.
        scale_covariant: φ(s·y) = s·φ(y) for s > 0, so that γ can move into the next convolution.
        fused: forward, inverse, backward as one ATen call each, the first in place; preferred on plain tensors because
            ``where`` is not vectorised on CPUs (3.2 M floats: 4.5 ms against 0.4 ms).
    """

    name: str
    plain: Formula
    forward: Formula
    inverse: Formula | None
    backward: Gradient
    parameter: str | None = None
    scale_covariant: bool = False
    fused: tuple[Formula, Formula, Gradient] | None = None


def expm1(y: Tensor) -> Tensor:
    """exp(y) − 1 without cancellation: the series up to y¹³/13! within ±0.35, where its remainder is below 2e-17."""
    series = 1.0 + y * (1.0 / 12.0) * (1.0 + y * (1.0 / 13.0))
    series = 1.0 + y * (1.0 / 10.0) * (1.0 + y * (1.0 / 11.0) * series)
    series = 1.0 + y * (1.0 / 8.0) * (1.0 + y * (1.0 / 9.0) * series)
    series = 1.0 + y * (1.0 / 6.0) * (1.0 + y * (1.0 / 7.0) * series)
    series = 1.0 + y * (1.0 / 4.0) * (1.0 + y * (1.0 / 5.0) * series)
    series = 1.0 + y * (1.0 / 2.0) * (1.0 + y * (1.0 / 3.0) * series)
    return xp.where(xp.abs(y) < 0.35, y * series, xp.exp(y) - 1.0)


def log1p(s: Tensor) -> Tensor:
    """log(1 + s) without cancellation: 2·artanh(s/(2+s)) as a series within ±0.3, where its remainder is below 5e-17."""
    t = s / (2.0 + s)
    w = t * t
    series = 1.0 / 15.0 + w * (1.0 / 17.0 + w * (1.0 / 19.0))
    series = 1.0 / 9.0 + w * (1.0 / 11.0 + w * (1.0 / 13.0 + w * series))
    series = 1.0 + w * (1.0 / 3.0 + w * (1.0 / 5.0 + w * (1.0 / 7.0 + w * series)))
    return xp.where(xp.abs(s) < 0.3, 2.0 * t * series, xp.log(1.0 + s))


# Literals below: 1 − 2⁻²⁴ (0.9999999403953552) is the largest float32 under 1, 2⁻¹²⁶ (1.1754943508222875e-38) the least
# normal one. They bound z in float64 as well: past them φ′ is under 1.2e-7.


def identity(y: Tensor, a: float) -> Tensor:
    """z = y."""
    return y


def identity_backward(dz: Tensor, z: Tensor, a: float) -> Tensor:
    """dy = dz."""
    return dz


def leaky_relu(y: Tensor, a: float) -> Tensor:
    """z = y where y > 0, else a·y."""
    return xp.where(y > 0, y, y * a)


def leaky_relu_inverse(z: Tensor, a: float) -> Tensor:
    """y = z where z > 0, else z/a."""
    return xp.where(z > 0, z, z * (1.0 / a))


def leaky_relu_backward(dz: Tensor, z: Tensor, a: float) -> Tensor:
    """dy = dz where z > 0, else a·dz: torch's rule, so a negative y that underflowed to −0 keeps its slope."""
    return xp.where(z > 0, dz, dz * a)


def elu(y: Tensor, a: float) -> Tensor:
    """z = y where y > 0, else α(eʸ − 1)."""
    return xp.where(y > 0, y, a * expm1(y))


def elu_inverse(z: Tensor, a: float) -> Tensor:
    """y = z where z > 0, else log(1 + z/α)."""
    return xp.where(z > 0, z, log1p(xp.clamp(z * (1.0 / a), -0.9999999403953552, 0.0)))


def elu_backward(dz: Tensor, z: Tensor, a: float) -> Tensor:
    """dy = dz where z > 0, else (z + α)·dz."""
    return xp.where(z > 0, dz, dz * (z + a))


def celu(y: Tensor, a: float) -> Tensor:
    """z = y where y > 0, else α(e^(y/α) − 1)."""
    return xp.where(y > 0, y, a * expm1(y * (1.0 / a)))


def celu_inverse(z: Tensor, a: float) -> Tensor:
    """y = z where z > 0, else α·log(1 + z/α)."""
    return xp.where(z > 0, z, a * log1p(xp.clamp(z * (1.0 / a), -0.9999999403953552, 0.0)))


def celu_backward(dz: Tensor, z: Tensor, a: float) -> Tensor:
    """dy = dz where z > 0, else (z/α + 1)·dz."""
    return xp.where(z > 0, dz, dz * (z * (1.0 / a) + 1.0))


# SELU's λ = 1.0507009873554805 and λα = 1.7580993408473766 are written out: a kernel cannot read a Python global.


def selu(y: Tensor, a: float) -> Tensor:
    """z = λy where y > 0, else λα(eʸ − 1)."""
    return xp.where(y > 0, 1.0507009873554805 * y, 1.7580993408473766 * expm1(y))


def selu_inverse(z: Tensor, a: float) -> Tensor:
    """y = z/λ where z > 0, else log(1 + z/(λα))."""
    s = xp.clamp(z * (1.0 / 1.7580993408473766), -0.9999999403953552, 0.0)
    return xp.where(z > 0, z * (1.0 / 1.0507009873554805), log1p(s))


def selu_backward(dz: Tensor, z: Tensor, a: float) -> Tensor:
    """dy = λ·dz where z > 0, else (z + λα)·dz."""
    return xp.where(z > 0, 1.0507009873554805 * dz, dz * (z + 1.7580993408473766))


def tanh(y: Tensor, a: float) -> Tensor:
    """z = tanh(y) = −e/(2 + e) with e = exp(−2|y|) − 1, signed as y."""
    e = expm1(-2.0 * xp.abs(y))
    t = -e / (2.0 + e)
    return xp.where(y < 0, -t, t)


def tanh_inverse(z: Tensor, a: float) -> Tensor:
    """y = ½ log(1 + 2|z|/(1 − |z|)), signed as z."""
    t = xp.clamp(xp.abs(z), 0.0, 0.9999999403953552)
    y = 0.5 * log1p(2.0 * t / (1.0 - t))
    return xp.where(z < 0, -y, y)


def tanh_backward(dz: Tensor, z: Tensor, a: float) -> Tensor:
    """dy = (1 − z²)·dz."""
    return dz * ((1.0 - z) * (1.0 + z))


def sigmoid(y: Tensor, a: float) -> Tensor:
    """z = 1/(1 + e⁻ʸ)."""
    return xp.sigmoid(y)


def sigmoid_inverse(z: Tensor, a: float) -> Tensor:
    """y = log(z/(1 − z))."""
    t = xp.clamp(z, 1.1754943508222875e-38, 0.9999999403953552)
    return xp.log(t / (1.0 - t))


def sigmoid_backward(dz: Tensor, z: Tensor, a: float) -> Tensor:
    """dy = z(1 − z)·dz."""
    return dz * (z * (1.0 - z))


def softplus(y: Tensor, a: float) -> Tensor:
    """z = log(1 + eʸ) = max(y, 0) + log(1 + e^−|y|)."""
    return xp.where(y > 0, y, 0.0) + log1p(xp.exp(-xp.abs(y)))


def softplus_inverse(z: Tensor, a: float) -> Tensor:
    """y = log(eᶻ − 1) = z + log(1 − e⁻ᶻ)."""
    t = xp.clamp(z, 1.1754943508222875e-38, 3.4028234663852886e38)
    return t + xp.log(-expm1(-t))


def softplus_backward(dz: Tensor, z: Tensor, a: float) -> Tensor:
    """dy = (1 − e⁻ᶻ)·dz."""
    return -dz * expm1(-z)


def relu(y: Tensor, a: float) -> Tensor:
    """z = max(y, 0); what is no number stays none."""
    return xp.where(y <= 0, 0.0, y)


def relu_backward(dz: Tensor, y: Tensor, a: float) -> Tensor:
    """dy = 0 where y ≤ 0, else dz."""
    return xp.where(y <= 0, 0.0, dz)


# What follows cannot be inverted either: flat somewhere, or not monotone. Derivatives are those of the input y.


def relu6(y: Tensor, a: float) -> Tensor:
    """z = min(max(y, 0), 6)."""
    return xp.clamp(y, 0.0, 6.0)


def relu6_backward(dz: Tensor, y: Tensor, a: float) -> Tensor:
    """dy = dz where 0 < y < 6, else 0."""
    return xp.where((y > 0.0) & (y < 6.0), dz, 0.0)


def hardswish(y: Tensor, a: float) -> Tensor:
    """z = y·min(max(y + 3, 0), 6)/6."""
    return y * xp.clamp(y + 3.0, 0.0, 6.0) * (1.0 / 6.0)


def hardswish_backward(dz: Tensor, y: Tensor, a: float) -> Tensor:
    """dy = (2y + 3)/6·dz within ±3; 0 below, dz above."""
    inside = xp.where(y >= 3.0, dz, dz * (y * (1.0 / 3.0) + 0.5))
    return xp.where(y <= -3.0, 0.0, inside)


def silu(y: Tensor, a: float) -> Tensor:
    """z = y·σ(y)."""
    return y * xp.sigmoid(y)


def silu_backward(dz: Tensor, y: Tensor, a: float) -> Tensor:
    """dy = σ(y)·(1 + y·(1 − σ(y)))·dz."""
    s = xp.sigmoid(y)
    return dz * (s * (1.0 + y * (1.0 - s)))


# 1/√2 = 0.7071067811865476, 1/√(2π) = 0.3989422804014327, 2·√(2/π) = 1.5957691216057308.


def gelu(y: Tensor, a: float) -> Tensor:
    """z = y·Φ(y) with Φ(y) = ½(1 + erf(y/√2))."""
    return y * (0.5 + 0.5 * xp.erf(y * 0.7071067811865476))


def gelu_backward(dz: Tensor, y: Tensor, a: float) -> Tensor:
    """dy = (Φ(y) + y·exp(−y²/2)/√(2π))·dz."""
    return dz * (0.5 + 0.5 * xp.erf(y * 0.7071067811865476) + y * xp.exp(-0.5 * y * y) * 0.3989422804014327)


def gelu_tanh(y: Tensor, a: float) -> Tensor:
    """z = ½y(1 + tanh(u)) = y·σ(2u) with u = √(2/π)·(y + 0.044715·y³)."""
    return y * xp.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))


def gelu_tanh_backward(dz: Tensor, y: Tensor, a: float) -> Tensor:
    """dy = (σ(2u) + y·σ(2u)·(1 − σ(2u))·2u′)·dz."""
    s = xp.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    return dz * (s + y * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * y * y))


def mish(y: Tensor, a: float) -> Tensor:
    """z = y·tanh(log(1 + eʸ)) = y·e(e + 2)/(e(e + 2) + 2) with e = eʸ; past 20 that is y."""
    e = xp.exp(xp.where(y < 20.0, y, 20.0))
    n = e * (e + 2.0)
    return y * (n / (n + 2.0))


def mish_backward(dz: Tensor, y: Tensor, a: float) -> Tensor:
    """dy = (t + y·(1 − t²)·σ(y))·dz with t = z/y."""
    e = xp.exp(xp.where(y < 20.0, y, 20.0))
    n = e * (e + 2.0)
    t = n / (n + 2.0)
    # 1 − t² without cancellation.
    return dz * (t + y * (4.0 * (n + 1.0) / ((n + 2.0) * (n + 2.0))) * xp.sigmoid(y))


def _leaky_relu_aten(dz: Tensor, z: Tensor, a: float) -> Tensor:
    return torch.ops.aten.leaky_relu_backward(dz, z, a, True)  # type: ignore[no-any-return]


_ROWS = (
    Activation(
        "leaky_relu",
        plain=lambda y, a: F.leaky_relu(y, a, inplace=True),
        forward=leaky_relu,
        inverse=leaky_relu_inverse,
        backward=leaky_relu_backward,
        parameter="slope",
        scale_covariant=True,
        fused=(F.leaky_relu_, lambda z, a: F.leaky_relu(z, 1.0 / a), _leaky_relu_aten),
    ),
    Activation(
        "elu",
        plain=lambda y, a: F.elu(y, a, inplace=True),
        forward=elu,
        inverse=elu_inverse,
        backward=elu_backward,
        parameter="alpha",
    ),
    Activation(
        "identity",
        plain=identity,
        forward=identity,
        inverse=identity,
        backward=identity_backward,
        scale_covariant=True,
    ),
    Activation(
        "tanh",
        plain=lambda y, a: torch.tanh_(y),
        forward=tanh,
        inverse=tanh_inverse,
        backward=tanh_backward,
    ),
    Activation(
        "sigmoid",
        plain=lambda y, a: torch.sigmoid_(y),
        forward=sigmoid,
        inverse=sigmoid_inverse,
        backward=sigmoid_backward,
    ),
    Activation(
        "softplus",
        # Torch turns linear past its threshold; at the default 20 that costs float64 seven digits.
        plain=lambda y, a: F.softplus(y, threshold=40.0),
        forward=softplus,
        inverse=softplus_inverse,
        backward=softplus_backward,
    ),
    Activation(
        "selu",
        plain=lambda y, a: F.selu(y, inplace=True),
        forward=selu,
        inverse=selu_inverse,
        backward=selu_backward,
    ),
    Activation(
        "celu",
        # The same function as F.celu, whose backward rounds 1/α to float32 (2e-8 off in float64).
        plain=lambda y, a: a * F.elu(y / a, inplace=True),
        forward=celu,
        inverse=celu_inverse,
        backward=celu_backward,
        parameter="alpha",
    ),
    Activation(
        "relu",
        plain=lambda y, a: F.relu(y, inplace=True),
        forward=relu,
        inverse=None,
        backward=relu_backward,
        scale_covariant=True,
    ),
    Activation(
        "relu6", plain=lambda y, a: F.relu6(y, inplace=True), forward=relu6, inverse=None, backward=relu6_backward
    ),
    Activation(
        "hardswish", plain=lambda y, a: F.hardswish(y), forward=hardswish, inverse=None, backward=hardswish_backward
    ),
    Activation("silu", plain=lambda y, a: F.silu(y), forward=silu, inverse=None, backward=silu_backward),
    Activation("gelu", plain=lambda y, a: F.gelu(y), forward=gelu, inverse=None, backward=gelu_backward),
    Activation(
        "gelu_tanh",
        plain=lambda y, a: F.gelu(y, approximate="tanh"),
        forward=gelu_tanh,
        inverse=None,
        backward=gelu_tanh_backward,
    ),
    Activation("mish", plain=lambda y, a: F.mish(y), forward=mish, inverse=None, backward=mish_backward),
)

# Read-only, as calls keep the row they found.
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({row.name: row for row in _ROWS})

# Names of earlier releases for the same function.
ALIASES: dict[str | None, str] = {"none": "identity", None: "identity"}


WARNED: set[str] = set()


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and point at the line outside this package and torch that led here."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in (__package__, "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def warn_once(message: str) -> None:
    """Warn, the first time this very text comes up in the process. Silent in compiled code, which cannot warn."""
    if not torch.compiler.is_compiling() and message not in WARNED:
        WARNED.add(message)
        warn(message)


def named(name: str | None) -> Activation | None:
    """The row of this name or alias, if there is one."""
    return ACTIVATIONS.get(ALIASES.get(name, name) or "") if name is None or isinstance(name, str) else None


def resolve(name: str | None, parameter: float) -> tuple[Activation, float]:
    """Look φ and its parameter up, or say what is wrong with them.

    A leaky ReLU of slope 0 is a ReLU, and is returned as one.

    >>> phi, a = resolve("leaky_relu", 0.01)
    >>> phi.inverse(phi.forward(torch.tensor([-3.0, 5.0]), a), a)
    tensor([-3., 5.])
    """
    phi = named(name)
    if phi is None:
        raise ValueError(f"activation {name!r} is unknown; one of: {', '.join(sorted([*ACTIVATIONS, 'none']))}")
    a = float(parameter)
    if phi.parameter is None:
        return phi, a
    if not -math.inf < a < math.inf:
        raise ValueError(f"{phi.name}: {phi.parameter} is {a}; give a finite number")
    if phi.parameter == "slope" and a < 0:
        raise ValueError(
            f"{phi.name}: slope is {a}, but a negative slope maps two values of y to one z, which cannot be inverted; "
            "give a slope > 0, such as 0.01, or 0 for a ReLU"
        )
    if phi.parameter == "slope" and a == 0:
        return ACTIVATIONS["relu"], a
    if phi.parameter == "alpha" and a <= 0:
        raise ValueError(f"{phi.name}: alpha is {a}; φ is increasing, and so invertible, only for alpha > 0")
    return phi, a


def warn_of_slope(phi: Activation, a: float, dtype: torch.dtype) -> None:
    """Warn, once, of a slope whose reciprocal does not fit the dtype that z is stored in."""
    # Within these limits any dtype will do.
    if phi.parameter != "slope" or 1e-4 <= a <= 1e4 or torch.compiler.is_compiling():
        return
    if torch.finfo(dtype).tiny <= 1.0 / a <= torch.finfo(dtype).max:
        return
    warn_once(
        f"{phi.name}: slope {a} inverts to {1.0 / a:g}, outside {dtype}'s range: values near zero flush to 0 and lose "
        f"their gradient; use a slope nearer 0.01, or store activations in a wider dtype"
    )

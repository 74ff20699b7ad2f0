"""The oracle, and the tolerances that follow from dtypes and from plain PyTorch's own error. No number here is picked by hand.

The oracle is numpy in extended precision (64-bit mantissa on x86), written from the textbook formulas and sharing nothing with
the package: so float64 results can be held to it, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SELU = (np.longdouble("1.0507009873554804934193349852946"), np.longdouble("1.6732632423543772848170429916717"))


def sigmoid(y):
    return 1 / (1 + np.exp(-y))


PI = np.longdouble("3.14159265358979323846264338327950288")


def erf(y):
    """Taylor's series within ±3, beyond it the continued fraction of erfc; numpy has none in extended precision."""
    y = np.asarray(y, np.longdouble)
    near = np.clip(y, -3, 3)
    term = total = 2 / np.sqrt(PI) * near
    for n in range(1, 80):
        term = -term * near * near / n
        total = total + term / (2 * n + 1)
    far = np.maximum(np.abs(y), 2)
    fraction = far
    for k in range(120, 0, -1):
        fraction = far + np.longdouble(k) / 2 / fraction
    beyond = 1 - np.exp(-far * far) / np.sqrt(PI) / fraction
    return np.where(np.abs(y) <= 3, total, np.sign(y) * beyond)


def bell(y):
    return np.exp(-y * y / 2) / np.sqrt(2 * PI)


def normal(y):
    return (1 + erf(y / np.sqrt(np.longdouble(2)))) / 2


def gate(y):
    """What multiplies y in GELU's approximation: σ(2u), and its derivative."""
    u = 2 * np.sqrt(2 / PI) * (y + np.longdouble("0.044715") * y**3)
    slope = 2 * np.sqrt(2 / PI) * (1 + 3 * np.longdouble("0.044715") * y**2)
    return sigmoid(u), sigmoid(u) * sigmoid(-u) * slope


def squash(y):
    """What multiplies y in Mish, tanh(softplus(y)), and its derivative."""
    t = np.tanh(np.logaddexp(y, np.zeros_like(y)))
    return t, (1 - t * t) * sigmoid(y)


# φ(y, a) and φ′(y, a).
PHI = {
    "leaky_relu": (lambda y, a: np.where(y > 0, y, a * y), lambda y, a: np.where(y > 0, 1, a)),
    "elu": (lambda y, a: np.where(y > 0, y, a * np.expm1(y)), lambda y, a: np.where(y > 0, 1, a * np.exp(y))),
    "identity": (lambda y, a: y, lambda y, a: np.ones_like(y)),
    "tanh": (lambda y, a: np.tanh(y), lambda y, a: 1 - np.tanh(y) ** 2),
    "sigmoid": (lambda y, a: sigmoid(y), lambda y, a: sigmoid(y) * sigmoid(-y)),
    "softplus": (lambda y, a: np.logaddexp(y, np.zeros_like(y)), lambda y, a: sigmoid(y)),
    "selu": (
        lambda y, a: SELU[0] * np.where(y > 0, y, SELU[1] * np.expm1(y)),
        lambda y, a: SELU[0] * np.where(y > 0, 1, SELU[1] * np.exp(y)),
    ),
    "celu": (lambda y, a: np.where(y > 0, y, a * np.expm1(y / a)), lambda y, a: np.where(y > 0, 1, np.exp(y / a))),
    "relu": (lambda y, a: np.where(y > 0, y, 0), lambda y, a: np.where(y > 0, 1, 0)),
    "relu6": (lambda y, a: np.clip(y, 0, 6), lambda y, a: np.where((y > 0) & (y < 6), 1, 0)),
    "hardswish": (
        lambda y, a: y * np.clip(y + 3, 0, 6) / 6,
        lambda y, a: np.where(y <= -3, 0, np.where(y >= 3, 1, (2 * y + 3) / 6)),
    ),
    "silu": (lambda y, a: y * sigmoid(y), lambda y, a: sigmoid(y) * (1 + y * sigmoid(-y))),
    "gelu": (lambda y, a: y * normal(y), lambda y, a: normal(y) + y * bell(y)),
    "gelu_tanh": (lambda y, a: y * gate(y)[0], lambda y, a: gate(y)[0] + y * gate(y)[1]),
    "mish": (lambda y, a: y * squash(y)[0], lambda y, a: squash(y)[0] + y * squash(y)[1]),
}


def exact(t: Tensor):
    """A tensor's values in extended precision."""
    return t.detach().cpu().double().numpy().astype(np.longdouble)


@dataclass
class Truth:
    y: np.ndarray
    z: np.ndarray
    dx: np.ndarray
    dweight: np.ndarray
    dbias: np.ndarray
    # The L2 norm of the terms that dx, dweight, dbias are sums of: rounding is relative to these, not to what is left.
    dx_terms: float
    dweight_terms: float
    dbias_terms: float


def oracle(x, weight, bias, dz, eps, name, a, stats=None) -> Truth:
    """Batch norm, φ and their gradients. ``stats`` are fixed (mean, var); None takes the batch's. dz may depend on y."""
    x = exact(x)
    axes, shape = (0, *range(2, x.ndim)), (1, -1, *[1] * (x.ndim - 2))
    gamma = np.ones(x.shape[1], np.longdouble) if weight is None else exact(weight)
    beta = np.zeros(x.shape[1], np.longdouble) if bias is None else exact(bias)
    a = np.longdouble(a)
    if stats is None:
        mean = x.mean(axes)
        var = ((x - mean.reshape(shape)) ** 2).mean(axes)
    else:
        mean, var = map(exact, stats)
    invstd = 1 / np.sqrt(var + np.longdouble(eps))
    xhat = (x - mean.reshape(shape)) * invstd.reshape(shape)
    y = gamma.reshape(shape) * xhat + beta.reshape(shape)
    phi, slope = PHI[name]
    dy = slope(y, a) * exact(dz(y) if callable(dz) else dz)
    dbias, dweight = dy.sum(axes), (dy * xhat).sum(axes)
    gain = (gamma * invstd).reshape(shape)
    dx = dy * gain
    terms = float(np.linalg.norm(dx.astype(float)))
    if stats is None:
        m = x.size // x.shape[1]
        dx = (dy - dbias.reshape(shape) / m - xhat * dweight.reshape(shape) / m) * gain
    norms = [float(np.sqrt((v.astype(float) ** 2).sum())) for v in (dy * xhat, dy)]
    return Truth(y, phi(y, a), dx, dweight, dbias, terms, *norms)


def error(got: Tensor, want) -> float:
    """L2 distance."""
    return float(np.linalg.norm((exact(got) - want).astype(float)))


def ulp(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def reordered(dtype: torch.dtype, terms: int) -> float:
    """How far two sums of so many terms of size 1 may be apart that were added up in another order."""
    return 4 * ulp(dtype) * terms**0.5


def unit(dtype: torch.dtype) -> float:
    """u of the rounding error u·|z|: 2⁻⁹ in bfloat16, 2⁻¹² in float16, 2⁻²⁵ in float32."""
    return torch.finfo(dtype).eps / 4

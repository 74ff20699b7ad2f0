r"""How well x̂ can be recovered from a stored z, and which layers had better keep x.

z is stored with a relative rounding of u (2⁻⁹ in bfloat16, 2⁻¹² in float16, 2⁻²⁵ in float32), and x̂ = (φ⁻¹(z) − r − β)/γ is what
is left of it, so a channel's error, relative to x̂'s unit variance, is about

.. math::
    e = u\,\sqrt{\gamma^2 + \beta^2 + \mathbb E[r^2]}\,/\,|\gamma|

Small γ alone is harmless; |β|/|γ| and the residual over |γ| are not, and γ = 0 cannot be inverted at all. A layer whose channels
have a root-mean-square e above :data:`LIMIT` keeps x instead of inverting, which is exact for any γ.

When that is found out: at the layer's first training forward, and after its γ or β were loaded or edited by anything but an
optimizer, the host waits for the estimate, once. From then on it is refreshed every :data:`EVERY` training forwards from a copy
that was started as many forwards earlier: nobody waits, and the same run takes the same decisions, as does a resumed one that
restores :func:`guard_state`.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["EVERY", "LIMIT", "Guard", "estimate", "of"]

# Past this, gradients of γ are noticeably worse than those of 16-bit batch norm itself; see docs/numerics.md.
LIMIT = 0.05
# Training forwards between two decisions.
EVERY = 100


def unit(dtype: torch.dtype) -> float:
    """What rounding to the dtype changes a number by, in the mean of many and relative to it."""
    return torch.finfo(dtype).eps / 4


def estimate(
    weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype, floor: float, channels: int
) -> Tensor:
    """The error e of every channel, as a float32 vector on the layer's device."""
    given = next((t for t in (weight, bias, residual) if t is not None), None)
    device = None if given is None else given.device
    with torch.no_grad():
        gamma = torch.ones(channels, device=device) if weight is None else weight.float().abs().clamp_min(floor)
        inside = gamma.square()
        if bias is not None:
            inside = inside + bias.float().square()
        if residual is not None:
            spread = [0, *range(2, residual.dim())]
            # Reduced as it is read: no copy of r in float32.
            dtype_of_sum = torch.float64 if residual.dtype == torch.float64 else torch.float32
            norm = torch.linalg.vector_norm(residual, dim=spread, dtype=dtype_of_sum)
            inside = inside + (norm.square() / max(residual.numel() // channels, 1)).float()
        return unit(dtype) * inside.sqrt() / gamma


def is_too_large(errors: Tensor) -> bool:
    """Whether a layer with these errors keeps x. Waits for them."""
    return not float(errors.double().square().mean()) <= LIMIT**2


class Known(NamedTuple):
    """Which γ and β a decision is about."""

    weight: int
    weight_version: int
    bias: int
    bias_version: int


class Guard:
    """What a layer has decided, and when it decides next."""

    def __init__(self) -> None:
        self.keeps_x: bool | None = None
        self.steps = 0
        self.known: Known | None = None
        self.was_known = False
        self.pending: Tensor | None = None
        self.event: Any = None

    def __reduce__(self) -> tuple[type[Guard], tuple[()]]:
        # Copies and stored layers look for themselves.
        return Guard, ()

    def decides(self, layer: nn.Module, x: Tensor, residual: Tensor | None) -> bool:
        """Whether this training forward keeps x."""
        if x.is_meta or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return bool(self.keeps_x)
        if not x.is_floating_point() or (residual is not None and residual.shape != x.shape):
            # An error to come.
            return False
        weight, bias = layer.weight, layer.bias
        now = _known(weight, bias)
        if self.keeps_x is None or now != self.known:
            self.keeps_x = is_too_large(self._errors(layer, x, residual))
            self.known, self.steps, self.pending = now, 0, None
            _register(layer)
            return self.keeps_x
        self.steps += 1
        if self.steps % EVERY == 0:
            if self.pending is not None:
                if self.event is not None:
                    # Recorded EVERY forwards ago: done.
                    self.event.synchronize()
                self.keeps_x = is_too_large(self.pending)
            self._start_copy(self._errors(layer, x, residual))
        return self.keeps_x

    def _errors(self, layer: nn.Module, x: Tensor, residual: Tensor | None) -> Tensor:
        has: Any = layer
        return estimate(has.weight, has.bias, residual, x.dtype, has.weight_floor, has.num_features)

    def _start_copy(self, errors: Tensor) -> None:
        self.event = None
        if errors.is_cuda:
            self.pending = torch.empty(errors.shape, dtype=errors.dtype, pin_memory=True)
            self.pending.copy_(errors, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.pending = errors

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to decide alike."""
        if self.event is not None:
            self.event.synchronize()
        pending = None if self.pending is None else self.pending.tolist()
        return {"keeps_x": self.keeps_x, "steps": self.steps, "pending": pending}

    def restore(self, state: dict[str, Any], layer: nn.Module) -> None:
        """Go on as the run that :meth:`state` came from; its γ and β must be in the layer already."""
        self.keeps_x, self.steps, self.event = state["keeps_x"], state["steps"], None
        self.pending = None if state["pending"] is None else torch.tensor(state["pending"])
        self.known = _known(layer.weight, layer.bias)
        _register(layer)


def of(layer: nn.Module) -> Guard:
    """The layer's guard."""
    guard = layer.__dict__.get("_guard")
    if guard is None:
        guard = layer.__dict__["_guard"] = Guard()
    assert isinstance(guard, Guard)
    return guard


def _known(weight: Any, bias: Any) -> Known:
    return Known(id(weight), getattr(weight, "_version", 0), id(bias), getattr(bias, "_version", 0))


# Layers that have decided. What an optimizer does to their parameters is no reason to look again at once.
_LAYERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_HOOKED: list[Any] = []


def _register(layer: nn.Module) -> None:
    _LAYERS.add(layer)
    if not _HOOKED:
        _HOOKED.append(register_optimizer_step_pre_hook(_before))
        _HOOKED.append(register_optimizer_step_post_hook(_after))


def _before(*_: Any) -> None:
    for layer in _LAYERS:
        guard = of(layer)
        guard.was_known = guard.known == _known(layer.weight, layer.bias)


def _after(*_: Any) -> None:
    for layer in _LAYERS:
        guard = of(layer)
        if guard.was_known:
            guard.known = _known(layer.weight, layer.bias)

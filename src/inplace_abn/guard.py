r"""How well x̂ can be recovered from a stored z, and which layers had better keep x.

z is stored with a relative rounding of u (2⁻⁹ in bfloat16, 2⁻¹² in float16, 2⁻²⁵ in float32), and x̂ = (φ⁻¹(z) − r − β)/γ is what
is left of it, so a channel's error, relative to x̂'s unit variance, is about

.. math::
    e = u\,\sqrt{\gamma^2 + \beta^2 + \mathbb E[r^2]}\,/\,|\gamma|

Small γ alone is harmless; |β|/|γ| and the residual over |γ| are not, and γ = 0 cannot be inverted at all. A layer whose channels
have a root-mean-square e above :data:`LIMIT` keeps x instead of inverting, which is exact for any γ.

When that is found out: at the layer's first forward with gradients, when x comes in another dtype, and after its γ or β were
loaded or edited by anything but an optimizer, the host waits for the estimate, once. (Edits through ``.data`` go unseen.) From
then on it is refreshed every :data:`EVERY` such forwards from a copy that was started as many forwards earlier: nobody waits, and
the same run takes the same decisions, as does a resumed one that restores :func:`inplace_abn.guard_state`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .reference import wide

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
            norm = torch.linalg.vector_norm(residual, dim=spread, dtype=wide(residual))
            inside = inside + (norm.square() / max(residual.numel() // channels, 1)).float()
        return unit(dtype) * inside.sqrt() / gamma


def is_too_large(errors: Tensor) -> bool:
    """Whether a layer with these errors keeps x. Waits for them."""
    return not float(errors.double().square().mean()) <= LIMIT**2


Known = tuple[tuple[int, int], tuple[int, int], torch.dtype]


class Guard:
    """What a layer has decided, and when it decides next."""

    def __init__(self) -> None:
        self.keeps_x: bool | None = None
        self.steps = 0
        self.known: Known | None = None
        self.held: tuple[nn.Parameter, ...] = ()
        self.was_known = False
        self.saw_residual = False
        self.pending: Tensor | None = None
        self.event: Any = None

    def __reduce__(self) -> tuple[type[Guard], tuple[()]]:
        # Copies and stored layers look for themselves.
        return Guard, ()

    def decides(self, layer: nn.Module, x: Tensor, residual: Tensor | None) -> bool:
        """Whether this forward keeps x."""
        now = _known(layer, x.dtype)
        if residual is not None:
            self.saw_residual = True
        if self.keeps_x is not None and now == self.known and (self.steps + 1) % EVERY:
            self.steps += 1
            return self.keeps_x
        if x.is_meta or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            # Nothing can be looked at.
            return bool(self.keeps_x)
        if not x.is_floating_point() or (residual is not None and residual.device != x.device):
            # An error to come.
            return False
        try:
            residual = None if residual is None else residual.expand(x.shape)
        except RuntimeError:
            # Another one, or ordinary steps, z being larger than x.
            return False
        if self.keeps_x is None or now != self.known:
            self.keeps_x = is_too_large(self._errors(layer, x, residual))
            self.steps, self.pending = 0, None
            self._know(layer, x.dtype)
            return self.keeps_x
        self.steps += 1
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
        dtype = None if self.known is None else str(self.known[-1]).removeprefix("torch.")
        decided = {"keeps_x": self.keeps_x, "steps": self.steps, "pending": pending}
        return decided | {"dtype": dtype, "saw_residual": self.saw_residual}

    def restore(self, state: dict[str, Any], layer: nn.Module) -> None:
        """Go on as the run that :meth:`state` came from; its γ and β must be in the layer already."""
        self.keeps_x, self.steps, self.event = state["keeps_x"], state["steps"], None
        self.pending = None if state["pending"] is None else torch.tensor(state["pending"])
        self.saw_residual = state["saw_residual"]
        if state["dtype"] is None:
            self.known = None
        else:
            self._know(layer, getattr(torch, state["dtype"]))

    def _know(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """That what was decided is about γ and β as they are now."""
        self.known = _known(layer, dtype)
        # Parameters put in the place of these might else get their addresses, and be taken for them.
        vectors = (layer._parameters.get(name) for name in ("weight", "bias"))
        self.held = tuple([v for v in vectors if isinstance(v, nn.Parameter)])
        _register(layer)


def of(layer: nn.Module) -> Guard:
    """The layer's guard."""
    guard = layer.__dict__.get("_guard")
    if guard is None:
        guard = layer.__dict__["_guard"] = Guard()
    assert isinstance(guard, Guard)
    return guard


def _known(layer: nn.Module, dtype: torch.dtype) -> Known:
    """Which γ and β, of which version, a decision is about, and for which dtype of x."""
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    return _identity(weight), _identity(bias), dtype


def _identity(v: Tensor | None) -> tuple[int, int]:
    # What is computed (parametrizations, FSDP's views, functional_call) is new every time, and looked at by count alone.
    if v is None or not (type(v) is nn.Parameter or isinstance(v, nn.Parameter)):
        return 0, 0
    try:
        return id(v), v._version
    except RuntimeError:
        # Made under inference mode, where versions are not counted. Quicker than to ask.
        return 0, 0


# By parameter, the layers that have decided. What an optimizer does to it is no reason to look again at once.
_LAYERS: dict[int, weakref.WeakSet[nn.Module]] = {}
_LOCK = threading.Lock()
_HOOKED: list[Any] = []


def _register(layer: nn.Module) -> None:
    with _LOCK:
        for gone in [key for key, layers in _LAYERS.items() if not layers]:
            del _LAYERS[gone]
        for v in (layer.weight, layer.bias):
            if isinstance(v, nn.Parameter):
                _LAYERS.setdefault(id(v), weakref.WeakSet()).add(layer)
        if not _HOOKED:
            _HOOKED.append(register_optimizer_step_pre_hook(_before))
            _HOOKED.append(register_optimizer_step_post_hook(_after))


def _of_optimizer(optimizer: Any) -> list[nn.Module]:
    """The layers whose parameters an optimizer has."""
    with _LOCK:
        sets = [_LAYERS.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
        # γ and β have the same layer.
        return list({layer for layers in sets if layers is not None for layer in layers})


# Those of an optimizer whose step has begun. A step may call that of its base class, which begins and ends within it.
_STEPPING: weakref.WeakKeyDictionary[Any, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()


def _before(optimizer: Any, *_: Any) -> None:
    layers = _of_optimizer(optimizer)
    _STEPPING[optimizer] = [weakref.ref(layer) for layer in layers]
    for layer in layers:
        guard = of(layer)
        guard.was_known = guard.known is not None and guard.known == _known(layer, guard.known[-1])


def _after(optimizer: Any, *_: Any) -> None:
    for reference in _STEPPING.get(optimizer, ()):
        layer = reference()
        if layer is None:
            continue
        guard = of(layer)
        if guard.was_known and guard.known is not None:
            now = _known(layer, guard.known[-1])
            # Parameters put in the place of others are looked at.
            if all(one[0] == other[0] for one, other in zip(now[:2], guard.known[:2], strict=True)):
                guard.known = now

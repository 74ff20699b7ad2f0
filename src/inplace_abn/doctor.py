"""What the guards of a model's layers think, and what they have decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import guard
from .modules import InPlaceABN

__all__ = ["Checkup", "columns", "doctor", "guard_state", "load_guard_state"]


@dataclass(frozen=True)
class Finding:
    """One layer: its worst channel, the estimated error of the recovered x̂ there and over all channels, and what follows."""

    layer: str
    worst_channel: int
    worst_error: float
    error: float
    decision: str


@dataclass(frozen=True)
class Checkup:
    """Findings of all layers; prints as a table."""

    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        head = ("layer", "worst channel", "its error", "rms error", "decision")
        rows = [
            (f.layer or "(model)", str(f.worst_channel), f"{f.worst_error:.1e}", f"{f.error:.1e}", f.decision)
            for f in self.findings
        ]
        return "\n".join(columns(head, rows))


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, its cells one below the other."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]


def doctor(model: nn.Module, dtype: torch.dtype | None = None) -> Checkup:
    """Estimate, for every :class:`inplace_abn.InPlaceABN` in the model, how well x̂ can be recovered, and decide by it.

    Residuals are not known outside of a forward pass; a layer that has seen one, and kept x because of it, is shown with its
    own decision. Under ``torch.compile``, which cannot look at numbers, layers go by what was decided before: call this first.

    Args:
        model: any module.
        dtype: what z is stored in; the parameters' dtype if not given. Under autocast, name its dtype.

    Example:
        >>> print(doctor(nn.Sequential(nn.Conv2d(3, 4, 1), InPlaceABN(4)), torch.bfloat16))
        layer  worst channel  its error  rms error  decision
        1      0              2.0e-03    2.0e-03    inverts
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; give a torch.dtype, such as torch.bfloat16")
    findings = []
    for name, layer in model.named_modules():
        if not isinstance(layer, InPlaceABN):
            continue
        own = guard.of(layer)
        given = layer.weight if layer.weight is not None else layer.bias
        stored = dtype or (torch.get_default_dtype() if given is None else given.dtype)
        errors = guard.estimate(layer.weight, layer.bias, None, stored, layer.weight_floor, layer.num_features)
        error = float(errors.double().square().mean().sqrt())
        # What a residual adds is known to the layer alone.
        own.keeps_x = guard.is_too_large(errors) or (own.saw_residual and bool(own.keeps_x))
        decision = "keeps x" if own.keeps_x else "inverts"
        if not layer.is_invertible():
            decision = "keeps x: no inverse"
        findings.append(Finding(name, int(errors.argmax()), float(errors.max()), error, decision))
    return Checkup(tuple(findings))


def guard_state(model: nn.Module) -> dict[str, Any]:
    """Decisions and pending estimates of all layers by name, as plain numbers: store them beside the model's state dict."""
    return {name: guard.of(layer).state() for name, layer in model.named_modules() if isinstance(layer, InPlaceABN)}


def load_guard_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Go on deciding as the run that :func:`guard_state` came from. Load the parameters first."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, InPlaceABN)}
    if layers.keys() != state.keys():
        raise ValueError(
            f"the state has layers {sorted(state.keys() - layers.keys())} that the model has not, and not its "
            f"{sorted(layers.keys() - state.keys())}; hand over the same module that guard_state was called on"
        )
    for name, layer in layers.items():
        guard.of(layer).restore(state[name], layer)

"""What a training step will need, before there is a GPU or data: bytes kept, peak, and the largest batch and crop that fit."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from .conversion import converted_on_meta, on_meta, revert
from .doctor import columns
from .memory import LiveBytes, readable
from .modules import InPlaceABN

__all__ = ["Plan", "Row", "plan"]

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# Of a card's memory, what allocations may take: the driver's context and fragmentation need the rest.
USABLE = 0.92
# Sides of crops are multiples of this, as networks of output stride 32 want them.
SIDE = 32


@dataclass(frozen=True)
class Row:
    """One way to train: bytes between forward and backward, peak of a step, and what fits; None where nothing was asked."""

    way: str
    kept: int
    peak: int
    largest_batch: int | None = None
    largest_crop: int | None = None


@dataclass(frozen=True)
class Plan:
    """Rows for all ways; prints as a table."""

    input_shape: tuple[int, ...]
    memory: int | None
    static: int
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        head = ("way", "kept", "peak", "largest batch", "largest crop")
        rows = [
            (
                row.way,
                readable(row.kept),
                readable(row.peak),
                "" if row.largest_batch is None else str(row.largest_batch),
                "" if row.largest_crop is None else f"{row.largest_crop}²",
            )
            for row in self.rows
        ]
        shape = "×".join(map(str, self.input_shape))
        last = f"input {shape}; parameters, buffers and optimizer state: {readable(self.static)}"
        return "\n".join([*columns(head, rows), last])


def size_in_bytes(size: str | float) -> int:
    """A number of bytes out of "24GB" or "11.5 GiB"; what is no text is a number of bytes already.

    >>> size_in_bytes("24GB"), size_in_bytes("1.5 GiB"), size_in_bytes(24e9)
    (24000000000, 1610612736, 24000000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]+)\s*", size) if isinstance(size, str) else None
    if isinstance(size, int | float) and math.isfinite(size):
        found = int(size)
    elif match is not None and match[2].upper() in UNITS:
        found = int(float(match[1]) * UNITS[match[2].upper()])
    else:
        raise ValueError(f"memory is {size!r}; give a number and a unit, such as 24GB or 11.5GiB")
    if found <= 0:
        raise ValueError(f"memory is {size!r}; give some, such as 24GB")
    return found


def plan(
    model: nn.Module,
    input_shape: Sequence[int],
    memory: str | float | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    optimizer_states: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Forecast the memory of a training step with plain batch norm, converted, and converted with checkpointed blocks.

    A model that is converted already, or has :class:`inplace_abn.InPlaceABN` put in by hand, is reverted for the first.

    The model is copied to the meta device, where shapes are computed and numbers are not, so neither a GPU nor data are
    needed, and a step of any size takes seconds. Every storage is counted from its making to its end. Not counted are
    workspaces of libraries, which a convolution may need for itself, and what the allocator loses to rounding.

    Args:
        model: any module that takes one batch of images; it is not changed.
        input_shape: of that batch, (N, C, H, W) or with other spatial dimensions.
        memory: of the card, "24GB", "11.5GiB" or bytes; 92 % of it are taken to be usable. Without it, nothing is searched.
        dtype: what maps are stored in: that of autocast. Parameters and optimizer state are float32 in any case.
        optimizer_states: per parameter: 1 for SGD with momentum, 2 for Adam.
        progress: called with a word about every step of the search.

    Example:
        >>> plan(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (4, 3, 66, 66)).rows[1].way
        'converted'
    """
    if optimizer_states < 0:
        raise ValueError(f"optimizer_states is {optimizer_states}; 0 or more for each parameter")
    input_shape = tuple(input_shape)
    total = None if memory is None else size_in_bytes(memory)
    limit = None if total is None else int(USABLE * total)
    tell = progress or (lambda text: None)
    static, _ = _fixed_bytes(model, dtype, optimizer_states)
    rows = []
    for way, net in _ways(model).items():
        tell(way)

        @functools.cache
        def bytes_of(shape: tuple[int, ...], net: nn.Module = net) -> tuple[int, int]:
            return forecast(net, shape, dtype, optimizer_states)

        kept, peak = bytes_of(input_shape)
        batch = crop = None
        if limit is not None:
            batch = largest(lambda n: bytes_of((n, *input_shape[1:]))[1], input_shape[0], limit, 1)
            tell(f"{way}: {batch} images fit")
            if len(input_shape) > 2 and len(set(input_shape[2:])) == 1:
                side = largest(_by_side(bytes_of, input_shape), input_shape[2] // SIDE or 1, limit, 2)
                crop = None if side is None else SIDE * side
        rows.append(Row(way, kept, peak, batch, crop))
    return Plan(input_shape, total, static, tuple(rows))


def forecast(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, optimizer_states: int) -> tuple[int, int]:
    """Bytes kept, and the peak of a step, of a model on the meta device; parameters in float32, maps in ``dtype``."""
    static, copies = _fixed_bytes(model, dtype, optimizer_states)
    kept, peak = step_bytes(model.train().to(dtype), torch.empty(shape, dtype=dtype, device="meta"))
    return kept, peak + static + copies


def _fixed_bytes(model: nn.Module, dtype: torch.dtype, optimizer_states: int) -> tuple[int, int]:
    """Parameters and optimizer state, in float32, and buffers; and the copies of weights that autocast keeps beside the maps."""
    parameters = list(model.parameters())
    learned = sum(4 * p.numel() for p in parameters if p.requires_grad)
    static = (
        sum(4 * p.numel() for p in parameters) + sum(b.nbytes for b in model.buffers()) + optimizer_states * learned
    )
    copies = 0 if dtype == torch.float32 else sum(p.numel() * dtype.itemsize for p in parameters if p.dim() > 1)
    return static, copies


def _ways(model: nn.Module) -> dict[str, nn.Module]:
    """What can be made of the model, on the meta device; it may be converted already, or have layers put in by hand."""
    by_hand = any(isinstance(m, InPlaceABN) and "_was" not in m.__dict__ for m in model.modules())
    exact = converted_on_meta(model, "exact")
    return {
        "standard": revert(on_meta(model)),
        "converted": exact,
        "converted, leaky ReLU": converted_on_meta(model, "leaky", anew=not by_hand),
        "converted, checkpointed": _checkpointed(on_meta(exact)),
    }


def _by_side(bytes_of: Callable[[tuple[int, ...]], tuple[int, int]], shape: tuple[int, ...]) -> Callable[[int], int]:
    return lambda side: bytes_of((*shape[:2], *[SIDE * side] * (len(shape) - 2)))[1]


def largest(bytes_of: Callable[[int], int], start: int, limit: int, power: int) -> int | None:
    """The largest n whose bytes, which grow about as a + b·nᵖ, are within the limit; None if not even 1 is."""

    def fits(n: int) -> bool:
        try:
            return bytes_of(n) <= limit
        except (RuntimeError, ValueError):
            # Too small for the network.
            return n < start

    first, second = max(start, 2), 2 * max(start, 2)
    try:
        low, high = bytes_of(first), bytes_of(second)
    except (RuntimeError, ValueError):
        return None
    slope = max((high - low) / (second**power - first**power), 1.0)
    guess = max(1, int(max((limit - low) / slope + first**power, 1.0) ** (1 / power)))
    while guess > 1 and not fits(guess):
        guess -= max(1, guess // 64)
    while fits(guess + max(1, guess // 64)):
        guess += max(1, guess // 64)
    return guess if fits(guess) else None


def step_bytes(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes alive after the forward pass and the loss, and the most at once in a step, gradients included, parameters not."""
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        live.know(x, *model.parameters(), *model.buffers())
        # A batch takes its place as well.
        live.now = live.peak = x.nbytes
        loss = cross_entropy(model(x))
        between = live.now
        loss.backward()
    model.zero_grad(set_to_none=True)
    return between, live.peak


def cross_entropy(output: Any) -> Tensor:
    """A loss of any output: cross-entropy over the channels of each of its tensors, every target being class 0."""
    total: Any = 0.0
    for out in tree_leaves(dict(output) if isinstance(output, dict) else output):
        if isinstance(out, Tensor) and out.is_floating_point():
            out = out.float()
            if out.dim() < 2:
                total = total + out.mean()
            else:
                target = torch.zeros(out.shape[0], *out.shape[2:], dtype=torch.long, device=out.device)
                total = total + F.cross_entropy(out, target)
    if not isinstance(total, Tensor):
        raise ValueError("the model gives no tensor to compute a loss of")
    return total


def _checkpointed(model: nn.Module) -> nn.Module:
    """The model with every block of its sequences checkpointed."""
    for block in _blocks(model):
        forward: Any = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        block.forward = forward
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The smallest modules that sequences hold and that have at least two convolutions."""
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            found += [b for b in module.children() if _convolutions(b) >= 2]
    return [b for b in found if not any(other is not b and other in set(b.modules()) for other in found)]


def _convolutions(module: nn.Module) -> int:
    return sum(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())

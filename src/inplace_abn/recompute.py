"""Handles that stand for z in the saved tensors of whoever reads it: kept is x, and z is computed again when backward asks.

A layer whose φ cannot be inverted keeps x. The convolution behind it would keep z as well. Within :func:`recompute` it keeps a
handle instead, and one reading of x and one writing give back the very bits of z: forward's own mean and 1/σ, the same code.

=========  =====================================================================================================
Record     one per call of such a layer: how z was made, of what; and z itself while backward has use for it
Handle     what a node holds in place of z, or of a view of z
Hooks      the pair of saved-tensor hooks that swaps one for the other and leaves everything else to the enclosing pair
=========  =====================================================================================================

In a chain of residual sums z depends on the z before it, whose handle is resolved on the way, down to the nearest z that was
kept: every :data:`ANCHOR`-th is. A stage of n blocks then keeps n/k maps more than its x and computes up to k − 1 ahead. Counted
for ResNet-50, -101 and -152, the peak is least, or within 1 % of it, at k = 4.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .context import Passing, is_traced

__all__ = ["Record", "is_at_work", "recompute", "unmark"]

# Of a chain of residual sums, every so manyth z is kept.
ANCHOR = 4

Module = TypeVar("Module", bound=nn.Module)


class Record:
    """How z was made. Shared by the layer's node, which owns it, and by the handles in the nodes of its readers."""

    def __init__(self, again: Callable[[tuple[Any, ...], Tensor], None], residual: Tensor | None = None) -> None:
        before = None if residual is None else find(residual)
        self.depth: int = 0 if before is None else before.depth + 1
        # Fills its second argument with z, from what the layer saved.
        self.again = again
        # Weak: handles have the record.
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self.z: Tensor | None = None
        # The layer's node; weak, since it has the record.
        self.node: Any = None
        self._saved: tuple[Tensor | None, ...] | None = None
        self._versions: list[int] = []

    def belongs_to(self, z: Tensor) -> None:
        """From now on, who saves z within :func:`recompute` gets a handle; unless z is an anchor."""
        # Without a graph, as in the first run of a reentrant checkpoint, nobody keeps anything.
        if z.grad_fn is None or self.depth >= ANCHOR:
            return
        # Made in a checkpointed part, whose end it may be: x will be gone, and z the start of the next part.
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if around is not None and getattr(around[0], "__module__", "") == "torch.utils.checkpoint":
            return
        self.shape, self.stride, self.offset = z.shape, z.stride(), z.storage_offset()
        self.version, self.dtype = z._version, z.dtype
        # While this lives no other storage can be taken for it.
        self._storage = StorageWeakRef(z.untyped_storage())
        _RECORDS[self._storage.cdata] = self

    def saved(self) -> tuple[Tensor | None, ...]:
        """What the layer saved. Read once: under activation checkpointing a second reading would fail."""
        if self._saved is None:
            self._saved = self.node().saved_tensors
            self._versions = [_version(t) for t in self._saved or ()]
        assert self._saved is not None
        # Autograd checked them when they were read.
        for t, version in zip(self._saved, self._versions, strict=True):
            _check_version(t, version)
        return self._saved

    def forget(self) -> None:
        """Let go of what was saved; the layer has had its backward."""
        self._saved = None

    def value(self) -> Tensor:
        """Z, to the bit."""
        if self.z is None:
            saved = self.saved()
            x = saved[0]
            assert x is not None
            self.z = torch.empty_strided(self.shape, self.stride, dtype=x.dtype, device=x.device)
            with torch.no_grad():
                self.again(saved, self.z)
        return self.z


class Handle:
    """Stands for z, or a view of it."""

    def __init__(self, record: Record, t: Tensor) -> None:
        self.record = record
        self.view = t.shape, t.stride(), t.storage_offset() - record.offset
        self.asked = False
        record.handles.add(self)

    def tensor(self) -> Tensor:
        """What was saved. The last handle to be asked makes the record drop z; if they are asked again, it is computed anew."""
        record = self.record
        z = record.value()
        self.asked = True
        if all(handle.asked for handle in record.handles):
            record.z = None
            for handle in record.handles:
                handle.asked = False
        return z if self.view == (z.shape, z.stride(), 0) else z.as_strided(*self.view)


# By storage of z, as long as a layer's node or a handle lives.
_RECORDS: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()


def find(t: Tensor) -> Record | None:
    """The record of t's storage, if t is z or a view of it, and nobody has written to it since.

    A detached one may outlive the layer's node, and views of another dtype are none of z's elements: these are kept as they are.
    """
    if not _RECORDS or t.layout != torch.strided or not t.requires_grad or t.is_conj() or t.is_neg():
        return None
    record = _RECORDS.get(t.untyped_storage()._cdata)
    return record if record is not None and (t._version, t.dtype) == (record.version, record.dtype) else None


def _version(t: Tensor | None) -> int:
    return 0 if t is None or t.is_inference() else t._version


def _check_version(t: Tensor | None, version: int) -> None:
    """What autograd itself does where no hooks are active."""
    if _version(t) != version:
        assert t is not None
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
            f"{tuple(t.shape)} is at version {_version(t)}; expected version {version} instead"
        )


class Kept:
    """A tensor that is no business of ours, as autograd would keep it: with its version, and without its history.

    An operation's own output would hold its node, and the node the output, for ever.
    """

    def __init__(self, t: Tensor) -> None:
        self.t, self.version = t.detach(), _version(t)

    def tensor(self) -> Tensor:
        """What was saved, if it is still that."""
        _check_version(self.t, self.version)
        return self.t


class Hooks(Passing):
    """Saved-tensor hooks that put handles for z."""

    def __init__(self) -> None:
        super().__init__()
        self.context = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, t: Tensor) -> Any:
        """A handle for z; for everything else, what the enclosing hooks make of it."""
        record = find(t)
        if record is not None:
            return Handle(record, t)
        return Kept(t) if self.enclosing is None else self.enclosing[0](t)

    def unpack(self, kept: Any) -> Any:
        """The tensor that was packed."""
        return kept.tensor() if isinstance(kept, Handle | Kept) else self.enclosing[1](kept)


class _Entered(threading.local):
    """The marked modules that are running, innermost last, and their hooks; None where those of another one serve."""

    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, Hooks | None]] = []


_ENTERED = _Entered()


def is_at_work() -> bool:
    """Whether a marked module is running."""
    return bool(_ENTERED.modules)


def recompute(module: Module) -> Module:
    """Keep one map per convolution with exact ReLU, GELU, SiLU, … inside this module: compute z again in backward.

    Applies to the outputs of :class:`inplace_abn.InPlaceABN` layers whose activation has no inverse, wherever the layers are,
    as far as they are read inside this module: mark the whole network, or a part. Nothing else changes: outputs, gradients and
    running statistics are the same to the bit, names and parameters stay. It costs one more reading and writing of z in
    backward. ``torch.compile`` ignores it: there, ``torch._functorch.config.activation_memory_budget = 0.99`` keeps as little.

    The module is changed and returned; marking it twice is the same as once.

    Example:
        >>> from inplace_abn import InPlaceABN, saved_bytes
        >>> conv = lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False)
        >>> net = recompute(nn.Sequential(conv(), InPlaceABN(4, activation="relu"), conv()))
        >>> saved_bytes(net, torch.randn(2, 4, 16, 16)).total
        8224
    """
    if "_recomputes" not in module.__dict__:
        # Copies have it, and the hooks.
        module.__dict__["_recomputes"] = True
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)
    return module


def unmark(module: nn.Module) -> None:
    """Undo :func:`recompute`; a module that was not marked stays as it is."""
    if module.__dict__.pop("_recomputes", None) is None:
        return
    tables: list[Any] = [module._forward_pre_hooks, module._forward_hooks]
    for table in tables:
        for key in [key for key, hook in table.items() if hook in (_enter, _leave)]:
            del table[key]
            module._forward_hooks_always_called.pop(key, None)


def _enter(module: nn.Module, arguments: Any) -> None:
    # Hooks of this kind can be neither compiled nor transformed; the layer itself is plain there.
    if is_traced() or not torch.is_grad_enabled():
        return
    # Within another marked module, its hooks are at work already.
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)
    ours = around is not None and isinstance(getattr(around[0], "__self__", None), Hooks)
    hooks = None if ours else Hooks()
    if hooks is not None:
        hooks.context.__enter__()
    _ENTERED.modules.append((module, hooks))


def _leave(module: nn.Module, arguments: Any, output: Any) -> None:
    if torch.compiler.is_compiling() or not any(module is entered for entered, _ in _ENTERED.modules):
        return
    # Whoever entered after this module has left by an error.
    while True:
        last, hooks = _ENTERED.modules.pop()
        if hooks is not None:
            hooks.context.__exit__(None, None, None)
        if last is module:
            return

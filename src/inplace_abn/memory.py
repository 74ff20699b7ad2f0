"""What autograd keeps for the backward pass, counted by storage, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes", "SavedBytes", "peak_bytes", "readable", "saved_bytes"]


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that autograd keeps after one forward pass.

    Attributes:
        total: all of them; every storage counts once, however many nodes and views share it.
        by_module: the same bytes by the module that was running when a storage was first kept; "" is the model's own code.
    """

    total: int
    by_module: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [(name or "(model)", size) for name, size in self.by_module.items() if size]
        rows.append(("total", self.total))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {size:>15,} B  {size / max(self.total, 1):>6.1%}" for name, size in rows)


class _Kept:
    """What a graph holds in place of a saved tensor; it lives exactly as long as the graph needs the tensor."""

    def __init__(self, tensor: Tensor, module: str) -> None:
        self.tensor = tensor
        self.module = module


def saved_bytes(model: nn.Module, /, *inputs: Any, **keywords: Any) -> SavedBytes:
    """Run ``model(*inputs, **keywords)`` once and count the bytes autograd keeps for its backward pass.

    Storages are counted whole (a view keeps all of its base alive) and once. Those of parameters, buffers and inputs (tensors
    in tuples, lists and dicts) are not counted: they exist anyway. Neither is what was freed before the forward pass ended.
    The model runs in the mode it is in; its buffers and torch's random state are as before afterwards. Works on ``meta``
    tensors too, without computing anything.

    Missing are sparse and nested tensors, and state that autograd's hooks do not see: tensors a custom Function sets as
    attributes, oneDNN workspaces. A model made by ``torch.compile``, or with lazy layers, should have run once before.

    Example:
        >>> from inplace_abn import InPlaceABN
        >>> conv = lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False)
        >>> plain = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.LeakyReLU(inplace=True), conv())
        >>> lean = nn.Sequential(conv(), InPlaceABN(4), conv())
        >>> x = torch.randn(2, 4, 16, 16)
        >>> saved_bytes(plain, x).total, saved_bytes(lean, x).total
        (16416, 8208)
        >>> print(saved_bytes(lean, x))
        1                8,208 B  100.0%
        total            8,208 B  100.0%
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"saved_bytes needs an nn.Module to name its parts by, not {type(model).__name__}")
    known = {
        _storage(t)
        for t in [*model.parameters(), *model.buffers(), *tree_leaves((inputs, keywords))]
        if isinstance(t, Tensor) and t.layout == torch.strided and not torch.nn.parameter.is_lazy(t)
    }
    running = [""]
    kept: list[weakref.ref[_Kept]] = []

    def pack(tensor: Tensor) -> _Kept:
        # Detached: a node's own output would hold the node, and the node the handle, for ever.
        handle = _Kept(tensor.detach(), running[-1])
        kept.append(weakref.ref(handle))
        return handle

    with _named_calls(model, running), _state_restored(model):
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle.tensor)
        with torch.inference_mode(False), torch.enable_grad(), hooks:
            output = model(*inputs, **keywords)
        sizes: dict[int, int] = {}
        by_module = {name: 0 for name, _ in model.named_modules()}
        for reference in kept:
            handle = reference()
            if handle is None or handle.tensor.layout != torch.strided:
                continue
            storage = _storage(handle.tensor)
            if storage not in known and storage not in sizes:
                sizes[storage] = handle.tensor.untyped_storage().nbytes()
                by_module[handle.module] = by_module.get(handle.module, 0) + sizes[storage]
        # The graph hangs on the output: it had to live until here.
        del output
    return SavedBytes(sum(sizes.values()), by_module)


def peak_bytes(step: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Most bytes that torch had allocated at once while ``step()`` ran, beyond those at its start.

    On a GPU this is the allocator's own peak. On a CPU torch's profiler reports every allocation and release in order; the
    peak is the largest partial sum. Not seen there: what other threads allocate, what a library such as oneDNN allocates
    by itself, and the release of what existed before.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        step()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


def readable(size: int | None) -> str:
    """A number of bytes as people read it; empty for None.

    >>> readable(3 << 20), readable(3 << 30), readable(None)
    ('3.0 MiB', '3.00 GiB', '')
    """
    if size is None:
        return ""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make until they die: ``now``, and the most at once, ``peak``.

    A context. On the meta device nothing is computed. What an operation needs for itself alone, as workspaces, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def _gone(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.now -= size

    def know(self, *tensors: Tensor) -> None:
        """Leave these out of the count."""
        self._known |= {_storage(t) for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


def _storage(tensor: Tensor) -> int:
    """Identity of a live storage; unlike data_ptr() it also tells meta tensors apart."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _named_calls(model: nn.Module, running: list[str]) -> Iterator[None]:
    """Keep the name of the innermost module that is running at the end of ``running``."""
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name), prepend=True))
        hooks.append(module.register_forward_hook(lambda *_: _pop(running), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _pop(running: list[str]) -> None:
    running.pop()


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """Put buffers, guards and the random state back as they were."""
    guards = [(m, g, dict(vars(g))) for m in model.modules() if (g := m.__dict__.get("_guard")) is not None]
    tables = [(module, dict(module._buffers)) for module in model.modules()]
    # An inference tensor cannot change outside inference mode.
    buffers = [b for _, table in tables for b in table.values() if b is not None and not b.is_inference()]
    before = [(buffer, buffer._version, buffer.detach().clone()) for buffer in buffers]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[d for d in devices if d is not None]):
        try:
            yield
        finally:
            for module, table in tables:
                module._buffers.clear()
                module._buffers.update(table)
                module.__dict__.pop("_guard", None)
            for module, guard, state in guards:
                vars(guard).update(state)
                module.__dict__["_guard"] = guard
            for buffer, version, value in before:
                # Torch's batch norm moves its statistics without telling; and nobody's graph is to think they had changed.
                if buffer._version != version or not (buffer.is_meta or torch.equal(buffer, value)):
                    buffer.data.copy_(value)

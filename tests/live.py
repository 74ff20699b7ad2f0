"""Bytes alive, counted as they come and go; on the meta device nothing is computed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts storages that operations make, until they die: ``now``, and the most at once, ``peak``."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def _gone(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.now -= size

    def know(self, *tensors: Tensor) -> None:
        """Leave these out of the count."""
        self._known |= {t.untyped_storage()._cdata for t in tensors}

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


def peak_of_a_step(net: torch.nn.Module, *shape: int) -> tuple[int, int]:
    """Bytes alive between forward and backward of a step on the meta device, and the most at once; parameters aside."""
    x = torch.empty(*shape, device="meta")
    with Live() as live:
        live.know(x, *net.parameters(), *net.buffers())
        loss = net(x).sum()
        between = live.now
        loss.backward()
    return between, live.peak

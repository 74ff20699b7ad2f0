"""Bytes alive in a training step on the meta device."""

from __future__ import annotations

import torch

from inplace_abn.memory import LiveBytes


def peak_of_a_step(net: torch.nn.Module, *shape: int) -> tuple[int, int]:
    """Bytes alive between forward and backward, and the most at once; parameters aside."""
    x = torch.empty(*shape, device="meta")
    with LiveBytes() as live:
        live.know(x, *net.parameters(), *net.buffers())
        loss = net(x).sum()
        between = live.now
        loss.backward()
    return between, live.peak

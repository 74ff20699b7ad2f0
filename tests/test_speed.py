"""The CPU path must keep up with eager batch norm."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch import nn

from inplace_abn import InPlaceABN


def ratio(layout: torch.memory_format, rounds: int = 25) -> float:
    """Median time of forward and backward over that of BatchNorm2d and LeakyReLU(inplace=True), taking turns."""
    x, dz = (torch.randn(16, 64, 56, 56).contiguous(memory_format=layout) for _ in range(2))
    layers = [nn.Sequential(nn.BatchNorm2d(64), nn.LeakyReLU(0.01, inplace=True)), InPlaceABN(64)]
    seconds: list[list[float]] = [[], []]
    for i in range(rounds + 3):
        for layer, times in zip(layers, seconds, strict=True):
            h = x.clone().requires_grad_() * 1
            began = time.perf_counter()
            layer(h).backward(dz)
            if i >= 3:
                times.append(time.perf_counter() - began)
    return statistics.median(seconds[1]) / statistics.median(seconds[0])


@pytest.mark.alone
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_cpu_path_takes_at_most_1_3_times_eager(layout):
    torch.use_deterministic_algorithms(False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # Another program may be in the way of one run of medians, hardly of three.
        assert min(ratio(layout) for _ in range(3)) <= 1.3
    finally:
        torch.set_num_threads(threads)

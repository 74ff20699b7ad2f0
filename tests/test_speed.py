"""The CPU path must keep up with eager batch norm, and a first training run be short."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from inplace_abn import InPlaceABN

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


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
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_the_cpu_path_takes_at_most_1_3_times_eager(layout):
    # Page faults decide, and with them what an allocator has got used to: each run has a process of its own. Another program
    # may be in the way for some seconds, hardly for two minutes.
    ratios = []
    for pause in (0, 0, 0, 4, 8, 16, 32, 64):
        time.sleep(pause)
        run = subprocess.run([sys.executable, __file__, layout], env=ENVIRONMENT, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        ratios.append(float(run.stdout))
        if len(ratios) >= 3 and statistics.median(ratios) <= 1.3:
            break
    assert statistics.median(ratios) <= 1.3, ratios


@pytest.mark.alone
def test_the_readmes_first_training_takes_less_than_a_minute(tmp_path):
    (line,) = re.findall(r"^inplace-abn (train .*?) +#", (ROOT / "README.md").read_text(), re.M)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "inplace_abn.cli", *line.split()],
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - began
    assert done.returncode == 0 and "top1" in done.stdout, done.stderr
    assert seconds < 60
    # Four kinds of scenes: a quarter would be guessing.
    assert float(re.search(r"top1 +([\d.]+)", done.stdout)[1]) > 0.5


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(ratio(getattr(torch, sys.argv[1])))

"""Every test starts from the same seed, sees NaN in memory nobody wrote, and fails on a warning it did not expect."""

from __future__ import annotations

import os

import pytest
import torch

from inplace_abn import activations

# Tests run several at a time; threads inside each would only compete.
torch.set_num_threads(int(os.environ.get("INPLACE_ABN_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def clean():
    torch.manual_seed(0)
    activations.WARNED.clear()
    # Also fills torch.empty with NaN, so that an element nobody wrote cannot pass.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)

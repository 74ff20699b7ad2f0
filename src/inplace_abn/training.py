"""What training scripts do to norms by their class, for code that would look for torch's: weight decay, averaged statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .modules import ABN

__all__ = ["param_groups", "update_bn"]

# Torch's batch norms share a base class; its other norms do not.
NORMS = (ABN, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: what decays, and what does not: γ and β of every norm, and biases.

    Parameters that need no gradient are left out, and shared ones appear once.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), ABN(8))
        >>> [len(g["params"]) for g in param_groups(net, 1e-4)]
        [1, 3]
    """
    spared = {p for m in model.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)}
    spared |= {p for name, p in model.named_parameters() if name.split(".")[-1] == "bias"}
    learned = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in learned if p not in spared], "weight_decay": weight_decay},
        {"params": [p for p in learned if p in spared], "weight_decay": 0.0},
    ]


@torch.no_grad()
def update_bn(loader: Iterable[Any], model: nn.Module, device: torch.device | str | None = None) -> None:
    """Recompute the running statistics of all batch norms, these layers and torch's, as plain averages over the loader.

    What ``torch.optim.swa_utils.update_bn`` does for torch's alone, to use after averaging weights. Batches may be tensors, or
    tuples that start with one. Modes and momenta are as before afterwards.
    """
    norms = [
        m
        for m in model.modules()
        if isinstance(m, (ABN, nn.modules.batchnorm._NormBase)) and m.running_mean is not None
    ]
    if not norms:
        return
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    model.train()
    try:
        for batch in loader:
            x: Tensor = batch[0] if isinstance(batch, (list, tuple)) else batch
            model(x if device is None else x.to(device))
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        for module, training in modes.items():
            module.training = training

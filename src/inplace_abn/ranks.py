"""What ranks tell each other: moments forward, sums backward. One collective each, in float64 whatever the activations are.

Messages do not depend on what a rank was given: a rank without samples, or one that needs no gradient, sends and receives what
the others do, so that none of them waits for ever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["active_group", "is_on", "merged_moments", "size", "total_sums"]


def is_on() -> bool:
    """Whether there are ranks at all."""
    return dist.is_available() and dist.is_initialized()


def size(group: Any) -> int:
    """How many ranks share statistics; None is all of them."""
    if not is_on():
        return 1
    ranks = dist.get_world_size(group)
    if ranks < 1:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the layer's process group; hand it a group that it is in, by set_group, "
            "or keep the layer in eval mode there"
        )
    return ranks


def merged_moments(mean: Tensor, var: Tensor, count: int, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count over all ranks, the same bits on each.

    Chan's formula in the order of the ranks: m·σ² = ∑ n·(σ²ᵣ + (μᵣ − μ)²) with m·μ = ∑ n·μᵣ. Every rank's 2C + 1 numbers
    reach every rank; the count is exact up to 2⁵³.
    """
    channels = mean.numel()
    message = torch.empty(2 * channels + 1, dtype=torch.float64, device=mean.device)
    message[:channels], message[channels:-1], message[-1] = mean, var, count
    gathered = torch.empty(size(group), message.numel(), dtype=torch.float64, device=mean.device)
    dist.all_gather(list(gathered.unbind()), message, group=group)
    n = gathered[:, -1:]
    total = n.sum(0)
    share = n / total
    means, variances = gathered[:, :channels], gathered[:, channels:-1]
    merged = (share * means).sum(0)
    return merged, (share * (variances + (means - merged).square_())).sum(0), total[0]


def total_sums(sum_dy: Tensor, sum_dy_xhat: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """∑ dy and ∑ dy·x̂ over all ranks."""
    message = torch.stack([sum_dy.double(), sum_dy_xhat.double()])
    dist.all_reduce(message, group=group)
    return message[0], message[1]


# By the ranks in them; a new default group makes them anew.
_GROUPS: dict[tuple[Any, frozenset[int]], Any] = {}


def active_group(active: bool) -> Any:
    """The group of the ranks that call this with True. Every rank must call it, equally often.

    The others get torch's ``GroupMember.NON_GROUP_MEMBER``, with which the layer raises in training. None without ranks.

    It serves networks in which only some ranks have work for a part (a detection head without proposals): hand the result to
    :func:`inplace_abn.set_active_group`.
    """
    if not is_on():
        return None
    where = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    flags = torch.empty(dist.get_world_size(), dtype=torch.int64, device=where)
    dist.all_gather(list(flags.split(1)), torch.tensor([int(active)], device=where))
    ranks = frozenset(flags.nonzero().flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    key = dist.group.WORLD, ranks
    if ranks and key not in _GROUPS:
        _GROUPS[key] = dist.new_group(sorted(ranks))
    return _GROUPS[key] if active else dist.GroupMember.NON_GROUP_MEMBER

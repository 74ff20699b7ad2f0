"""What else is going on around a call: who still needs x, and is anybody watching.

The layer overwrites x only where nobody was promised it. Where in doubt the answer is no, which costs one buffer for a moment and
keeps no more for backward.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

__all__ = [
    "Passing",
    "is_dense",
    "is_exported",
    "is_traced",
    "is_transformed",
    "is_wrapped",
    "may_overwrite",
    "overlaps",
    "recomputing",
    "saves_by_hooks",
]


def is_transformed() -> bool:
    """Whether a transform of torch.func is active."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_traced() -> bool:
    """Whether the call is recorded rather than run: compiled, exported, traced or transformed."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._are_functorch_transforms_active()


def is_exported() -> bool:
    """Whether torch.export is at work. Not ``torch.compiler.is_exporting()``: torch 2.11 compiles that to True, always."""
    return bool(torch.compiler._is_exporting_flag)


def recomputing() -> bool:
    """Whether a backward pass is running: a forward inside one is a recomputation (activation checkpointing)."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a transform of torch.func stands in for the tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def saves_by_hooks() -> bool:
    """Whether saved-tensor hooks are active: checkpointing will start again from its inputs, and versions go unchecked.

    Those of :mod:`inplace_abn.recompute` leave to the pair around them what they do not replace, and do not count.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    while hooks is not None and isinstance(owner := getattr(hooks[0], "__self__", None), Passing):
        hooks = owner.enclosing
    return hooks is not None


class Passing:
    """Saved-tensor hooks that hand what they do not know to the pair around them: torch itself calls the innermost only."""

    def __init__(self) -> None:
        self.enclosing: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)


_PLAIN_VIEW = torch._C._autograd.CreationMeta.DEFAULT

# What autograd's own nodes call the inputs and the small results that they save. Anything else may be their output.
INPUTS = "self other input weight bias mat1 mat2 batch1 batch2 vec vec1 vec2 tensor1 tensor2 mask index indices end grid target"
INPUTS += " result1 result2 result3 running_mean running_var"


@cache
def _keeps_its_output(node: type) -> bool:
    """Whether an autograd node may need its own output in backward: sigmoid, softmax, …, and any custom Function."""
    if issubclass(node, BackwardCFunction) or node.__name__ == "CopySlices":
        return True
    saved = {name.removeprefix("_raw_saved_") for name in dir(node) if name.startswith("_raw_saved_")}
    return not saved <= set(INPUTS.split())


def may_overwrite(x: Tensor) -> bool:
    """Whether writing to x changes nothing that anybody else was promised."""
    maker = x.grad_fn
    # No history: a batch of data, or a leaf. Its owner has not agreed to lose it.
    if maker is None or _keeps_its_output(type(maker)) or saves_by_hooks() or recomputing():
        return False
    if x._is_view():
        base = x._base
        if base is None or base.grad_fn is None or _keeps_its_output(type(base.grad_fn)):
            return False
        if torch._C._autograd._get_creation_meta(x) != _PLAIN_VIEW:
            return False
    return not overlaps(x)


def is_dense(x: Tensor) -> bool:
    """Whether x is laid out as a new tensor would be, in one of torch's formats."""
    return (
        x.is_contiguous()
        or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
        or (x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d))
    )


def overlaps(x: Tensor) -> bool:
    """Whether two indices of x may share an element: every stride must step over all that the smaller ones reach."""
    if is_dense(x):
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False

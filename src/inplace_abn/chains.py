"""Batch norms in a traced model and what follows them: a sum with a residual, perhaps, and an activation, perhaps.

Such a chain is read by nobody else on the way. Values are followed through the whole traced part, across the borders of modules.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from .activations import ACTIVATIONS
from .modules import ABN
from .tracing import EDITS, is_hooked

__all__ = [
    "IDENTITY",
    "Chain",
    "Phi",
    "edits_between",
    "follow",
    "inner_activation",
    "is_kept_by_readers",
    "reader_that_edits",
    "source",
    "users",
    "why_not_norm",
    "why_not_overwritten",
]

Phi = tuple[str, float]

IDENTITY: Phi = ("identity", 0.0)
# Torch's modules; its functions and methods have the names of the table.
_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.ReLU6: "relu6", nn.LeakyReLU: "leaky_relu", nn.ELU: "elu", nn.CELU: "celu", nn.SELU: "selu",
    nn.SiLU: "silu", nn.GELU: "gelu", nn.Mish: "mish", nn.Hardswish: "hardswish", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh",
}  # fmt: skip
# What torch calls a parameter of the table, and has it be where it is not given.
_ARGUMENTS = {"slope": ("negative_slope", 0.01), "alpha": ("alpha", 1.0)}
_ADDS = {operator.add, operator.iadd, torch.add}
# What makes a new tensor and keeps no output: it may be overwritten.
_FRESH_MODULES = (
    nn.modules.conv._ConvNd, nn.Linear, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._MaxPoolNd, nn.Upsample, _BatchNorm,
)  # fmt: skip
_FRESH_FUNCTIONS = {
    "add", "sub", "mul", "cat", "concat", "conv1d", "conv2d", "conv3d", "linear", "matmul", "interpolate",
    "avg_pool2d", "adaptive_avg_pool2d", "max_pool2d", "batch_norm", "pad", "mean", "sum",
}  # fmt: skip
_KEEPS_OUTPUT = {"sigmoid", "tanh", "relu", "relu_", "exp", "softmax", "sqrt", "leaky_relu", "elu"}
_VIEWS = {
    "chunk", "split", "getitem", "view", "reshape", "flatten", "transpose", "permute", "unbind", "narrow", "squeeze",
    "unsqueeze", "expand", "unflatten", "tensor_split", "select", "slice",
}  # fmt: skip
# What needs nothing of its input in backward.
_KEEPS_NOTHING = {
    "add", "sub", "iadd", "isub", "cat", "concat", "mean", "sum", "flatten", "view", "reshape", "permute", "transpose",
    "interpolate", "pad", "avg_pool2d", "adaptive_avg_pool2d", "getitem", "chunk", "split", "output", "size", "getattr",
    "dropout", "stochastic_depth", "drop_path",
}  # fmt: skip
_KEEPS_NOTHING_MODULES = (
    nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.dropout._DropoutNd, nn.Upsample, nn.Flatten,
)  # fmt: skip


def name_of(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    """What a step is called: "relu", "add", "Conv2d"."""
    if node.op == "call_module":
        return type(modules[str(node.target)]).__name__
    if node.op in ("call_method", "output", "placeholder", "get_attr"):
        return str(node.target) if node.op == "call_method" else node.op
    return getattr(node.target, "__name__", str(node.target))


def activation_of(node: fx.Node, modules: dict[str, nn.Module]) -> Phi | None:
    """The activation that a step is, with its parameter; None where it is something else."""
    if node.op == "call_module":
        return _of_module(modules[str(node.target)])
    name = name_of(node, modules).rstrip("_")
    if node.op not in ("call_function", "call_method") or name not in _MODULES.values():
        return None
    # A function of this name that is not torch's, or one of its operators with arguments of their own.
    home = getattr(node.target, "__module__", None) or ""
    if node.op == "call_function" and (not home.startswith("torch") or "OpOverload" in type(node.target).__name__):
        return None
    rest = dict(node.kwargs)
    rest.pop("input", None)
    extra = [rest.pop("inplace", False), *node.args[1:]]
    value: Any = 0.0
    parameter = ACTIVATIONS[name].parameter
    if parameter is not None:
        key, value = _ARGUMENTS[parameter]
        value = extra.pop(1) if len(extra) > 1 else rest.pop(key, value)
    elif name == "gelu" and rest.pop("approximate", "none") != "none":
        name = "gelu_tanh"
    # What is left may be "in place", and nothing else.
    known = isinstance(value, int | float) and not rest and all(isinstance(flag, bool) for flag in extra)
    return (name, float(value)) if known else None


def _of_module(module: Any) -> Phi | None:
    """The activation that a module is."""
    name = None if "forward" in vars(module) else _MODULES.get(type(module))
    if name is None:
        return None
    parameter = ACTIVATIONS[name].parameter
    if name == "gelu" and module.approximate != "none":
        name = "gelu_tanh"
    return name, 0.0 if parameter is None else float(getattr(module, _ARGUMENTS[parameter][0]))


def _is_transparent(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a step hands its input on as it is."""
    if node.op != "call_module":
        return False
    module = modules[str(node.target)]
    if is_hooked(module):
        return False
    return isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and module.p == 0)


def users(node: fx.Node, modules: dict[str, nn.Module]) -> list[fx.Node]:
    """Who reads a value, looking through identities."""
    readers: list[fx.Node] = []
    for user in node.users:
        readers += users(user, modules) if _is_transparent(user, modules) else [user]
    return readers


def source(node: Any, modules: dict[str, nn.Module]) -> Any:
    """Where a value comes from, looking through identities."""
    while isinstance(node, fx.Node) and _is_transparent(node, modules):
        node = node.args[0]
    return node


def edits(node: fx.Node, value: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a step writes over a value that it reads."""
    first = source(node.args[0] if node.args else node.kwargs.get("input"), modules)
    if first is not value:
        return False
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    return _writes(node)


def _writes(node: fx.Node) -> bool:
    """Whether a function, method or operator writes over its first argument."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    is_edit = name in (*EDITS, "setitem") or (name.endswith("_") and not name.endswith("__"))
    return is_edit or node.kwargs.get("inplace") is True


def reader_that_edits(value: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """The name of a step that writes over a value, or over what may be the same memory."""
    for user in users(value, modules):
        if edits(user, value, modules):
            return name_of(user, modules)
        if _may_hand_on(user, modules) and (found := reader_that_edits(user, modules)):
            return found
    return None


def _may_hand_on(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a step may give its own input, or a view of it: views, dropout, and whatever is not torch's."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        ours = type(module).__module__.startswith(("torch.nn", __package__ or "?"))
        return not ours or isinstance(module, nn.modules.dropout._DropoutNd | nn.Flatten)
    if node.op == "call_method":
        return str(node.target) in (*_VIEWS, "contiguous", "to", "type_as", "float")
    if node.op != "call_function":
        return False
    home = getattr(node.target, "__module__", None) or ""
    foreign = home.split(".")[0] not in ("torch", "_operator", "operator", "math", "builtins")
    return foreign or name_of(node, modules) in (*_VIEWS, "dropout")


def is_kept_by_readers(value: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether somebody who reads a value keeps it for backward."""
    for user in users(value, modules):
        if user.op == "call_module":
            if not isinstance(modules[str(user.target)], _KEEPS_NOTHING_MODULES):
                return True
        elif name_of(user, modules).rstrip("_") not in _KEEPS_NOTHING:
            return True
    return False


def _asks_for_shape(node: fx.Node) -> bool:
    """Whether a step reads nothing of a tensor that writing to it would change."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "ndimension", "numel", "stride")
    return node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device")


def why_not_overwritten(x: Any, modules: dict[str, nn.Module]) -> str | None:
    """A reason not to write over the input of a norm; None where nobody else needs it."""
    x = source(x, modules)
    if not isinstance(x, fx.Node):
        return "INPUT_UNKNOWN"
    if x.op in ("placeholder", "get_attr"):
        return f"SHARED_INPUT: {x.op} of the traced part"
    readers = [user for user in users(x, modules) if not _asks_for_shape(user)]
    if len(readers) > 1:
        others = ", ".join(sorted({name_of(reader, modules) for reader in readers}))
        return f"SHARED_INPUT: read by {others}"
    name = name_of(x, modules)
    if name in ("iadd", "add_"):
        # The first operand's memory, if nobody else has it.
        return why_not_overwritten(x.args[0], modules)
    if x.op == "call_module":
        module = modules[str(x.target)]
        if is_hooked(module):
            return f"HOOKED: a hook watches {name}, whose output it is"
        if isinstance(module, _FRESH_MODULES):
            return None
        if activation_of(x, modules) is not None or isinstance(module, ABN):
            return f"PRODUCER_SAVES_OUTPUT: {name}"
        return f"PRODUCER_UNKNOWN: {name}"
    if name in _VIEWS:
        return f"MULTI_VIEW: {name}"
    if name in _KEEPS_OUTPUT:
        return f"PRODUCER_SAVES_OUTPUT: {name}"
    return None if name in _FRESH_FUNCTIONS else f"PRODUCER_UNKNOWN: {name}"


@dataclass
class Chain:
    """A norm's call, the sum and the activation that follow it, and what they amount to."""

    norm: fx.Node
    add: fx.Node | None = None
    residual: fx.Node | None = None
    act: fx.Node | None = None
    phi: Phi = IDENTITY
    last: fx.Node = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.act or self.add or self.norm

    @property
    def pattern(self) -> str:
        """As the report shows it."""
        return " + ".join(["bn", *(["add"] if self.add else []), *([self.phi[0]] if self.phi != IDENTITY else [])])


def follow(norm: fx.Node, modules: dict[str, nn.Module], inner: Phi = IDENTITY, residuals: bool = True) -> Chain:
    """The chain that begins with a call of a norm; ``inner`` is the activation that the norm's own module has already."""
    if inner != IDENTITY:
        return Chain(norm, phi=inner)
    readers = users(norm, modules)
    if len(readers) != 1:
        return Chain(norm)
    (reader,) = readers
    phi = activation_of(reader, modules)
    if phi is not None:
        return Chain(norm, act=reader, phi=phi)
    residual = _other_operand(reader, norm, modules) if residuals else None
    if residual is None:
        return Chain(norm)
    readers = users(reader, modules)
    phi = activation_of(readers[0], modules) if len(readers) == 1 else None
    if phi is None:
        return Chain(norm, add=reader, residual=residual)
    return Chain(norm, add=reader, residual=residual, act=readers[0], phi=phi)


def _other_operand(node: fx.Node, value: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """What a sum adds to a value, if it is a sum, of two tensors, neither scaled."""
    name = name_of(node, modules)
    is_add = (
        node.target in _ADDS if node.op == "call_function" else node.op == "call_method" and name in ("add", "add_")
    )
    if not is_add or len(node.args) != 2 or node.kwargs:
        return None
    sides = [source(side, modules) for side in node.args]
    if not all(isinstance(side, fx.Node) for side in sides) or sides[0] is sides[1]:
        return None
    other = node.args[1] if sides[0] is value else node.args[0]
    # a += b writes over a: as a residual, a would have to stay.
    if not isinstance(other, fx.Node) or other.op == "get_attr" or edits(node, source(other, modules), modules):
        return None
    # Of another shape, or no tensor at all, as far as a name tells.
    if other.op != "call_module" and name_of(other, modules) in (*_VIEWS, "mean", "sum", "size", "getattr"):
        return None
    return other


def edits_between(first: fx.Node, last: fx.Node, chain: Collection[fx.Node | None]) -> bool:
    """Whether anything is written between two steps, but for those of a chain."""
    while first is not last:
        first = first.next
        if first not in chain and _writes(first):
            return True
    return False


def why_not_norm(module: nn.Module) -> str | None:
    """A reason why a batch norm is none that can be replaced; None where it can."""
    if isinstance(module, _LazyNormBase):
        return "LAZY: run the model once first"
    if is_hooked(module):
        return "HOOKED: a hook watches it"
    if inner_activation(module) is None or "forward" in vars(module):
        return f"SUBCLASS: {type(module).__name__} is a norm of its own"
    if any(
        isinstance(module.__dict__.get(name), Tensor) or name not in module._parameters for name in ("weight", "bias")
    ):
        return "SUBCLASS: its weight or bias is computed"
    return None


def inner_activation(module: nn.Module) -> Phi | None:
    """The activation within a norm of timm's kind (``BatchNormAct2d``); None for norms of other kinds, or if unknown."""
    act, drop = getattr(module, "act", None), getattr(module, "drop", None)
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        return IDENTITY
    timms = type(module).__module__.startswith("timm.") and type(module).__name__ in (
        "BatchNormAct2d",
        "SyncBatchNormAct",
    )
    if not timms or not isinstance(drop, nn.Identity):
        return None
    if isinstance(act, nn.Identity):
        return IDENTITY
    return _of_module(act) if isinstance(act, nn.Module) and not is_hooked(act) else None

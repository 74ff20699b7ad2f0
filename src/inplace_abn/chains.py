"""Finding batch norms and what follows them in a model, by symbolic tracing, without running it.

A chain is a batch norm, perhaps a sum with a residual, perhaps an activation, each read by the next alone. Values are followed
through the whole model, across the borders of its modules. A module that cannot be traced (its code depends on numbers) is one
step of unknown effect; what is inside of it is traced apart.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from .modules import ABN

__all__ = [
    "Chain",
    "Phi",
    "Section",
    "Tracer",
    "calls",
    "edits_between",
    "follow",
    "inner_activation",
    "is_hooked",
    "is_kept_by_readers",
    "reader_that_edits",
    "sections",
    "source",
    "unchanged",
    "users",
    "why_not_norm",
    "why_not_overwritten",
]

Phi = tuple[str, float]

_MODULES: dict[type[nn.Module], Callable[[Any], Phi]] = {
    nn.ReLU: lambda m: ("relu", 0.0),
    nn.ReLU6: lambda m: ("relu6", 0.0),
    nn.LeakyReLU: lambda m: ("leaky_relu", m.negative_slope),
    nn.ELU: lambda m: ("elu", m.alpha),
    nn.CELU: lambda m: ("celu", m.alpha),
    nn.SELU: lambda m: ("selu", 0.0),
    nn.SiLU: lambda m: ("silu", 0.0),
    nn.GELU: lambda m: ("gelu" if m.approximate == "none" else "gelu_tanh", 0.0),
    nn.Mish: lambda m: ("mish", 0.0),
    nn.Hardswish: lambda m: ("hardswish", 0.0),
    nn.Sigmoid: lambda m: ("sigmoid", 0.0),
    nn.Tanh: lambda m: ("tanh", 0.0),
}
# By name, for functions and methods alike; the second entry says where a parameter is and what it is by default.
_FUNCTIONS: dict[str, tuple[str, tuple[str, float] | None]] = {
    "relu": ("relu", None),
    "relu6": ("relu6", None),
    "leaky_relu": ("leaky_relu", ("negative_slope", 0.01)),
    "elu": ("elu", ("alpha", 1.0)),
    "celu": ("celu", ("alpha", 1.0)),
    "selu": ("selu", None),
    "silu": ("silu", None),
    "gelu": ("gelu", None),
    "mish": ("mish", None),
    "hardswish": ("hardswish", None),
    "sigmoid": ("sigmoid", None),
    "tanh": ("tanh", None),
}
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


class _Proxy(fx.Proxy):
    """Records ``a += b`` as what it is; torch's own records a sum."""


def _edits(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)
    return lambda a, b: a.tracer.create_proxy("call_function", function, (a, b), {})


for _name in ("iadd", "isub", "imul", "itruediv"):
    setattr(_Proxy, f"__{_name}__", _edits(_name))


class Tracer(fx.Tracer):
    """Traces through all modules but torch's own, norms, activations, hooked ones, and those in ``opaque``.

    Code that a graph cannot express raises: what runs without gradients, under autocast or checkpointing of its own, and what
    draws random numbers.

    ``culprit`` is the innermost module whose code could not be traced, ``given`` the optional arguments with which modules were
    called. Every node's ``meta["owner"]`` is the path of the module whose code makes it.
    """

    # Code that reads a buffer is to read it at every call.
    proxy_buffer_attributes = True

    def __init__(
        self, opaque: set[nn.Module] | None = None, through: Callable[[nn.Module], bool] | None = None
    ) -> None:
        super().__init__()
        self.opaque = opaque or set()
        self.through = through
        self.culprit: nn.Module | None = None
        self.given: dict[nn.Module, frozenset[str]] = {}
        self._owners = [""]
        self._around = _surroundings()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """One that records edits."""
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call is a single step."""
        if self.through is not None:
            return not self.through(m)
        if m in self.opaque or isinstance(m, _BatchNorm | ABN) or type(m) in _MODULES or is_hooked(m):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As torch does, and know where one is."""
        path = self.path_of_module(m)
        leaf = self.is_leaf_module(m, path)
        if not leaf:
            self._owners.append(path)
            bound = inspect.signature(m.forward).bind(*args, **kwargs).arguments
            self.given[m] = self.given.get(m, frozenset()) | {
                name for name, value in bound.items() if value is not None
            }
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.culprit is None:
                self.culprit = m
            raise
        finally:
            if not leaf:
                self._owners.pop()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that knows its owner."""
        if _surroundings() != self._around:
            raise ValueError("part of it runs without gradients, or under autocast or checkpointing of its own")
        node = super().create_node(*args, **kwargs)
        node.meta["owner"] = self._owners[-1]
        return node

    def of(self, module: nn.Module, given: Collection[str] = ()) -> fx.Graph:
        """The graph of a call with these of the optional arguments; the others have their defaults."""
        parameters = inspect.signature(module.forward).parameters
        plain = (type(None), bool, int, float, str)
        left_out = {n: p.default for n, p in parameters.items() if isinstance(p.default, plain) and n not in given}
        self._around, state = _surroundings(), torch.get_rng_state()
        try:
            graph = self.trace(module, concrete_args=left_out or None)
            if not torch.equal(state, torch.get_rng_state()):
                raise ValueError("it draws random numbers")
            if any(str(node.target).startswith("_tensor_constant") for node in graph.nodes if node.op == "get_attr"):
                raise ValueError("it computes with tensors that are no parameters or buffers")
        finally:
            torch.set_rng_state(state)
            for name in [name for name in vars(module) if name.startswith("_tensor_constant")]:
                delattr(module, name)
        # Torch renames arguments that it fixes.
        for node in graph.nodes:
            name = str(node.target).rpartition("_")[0]
            if node.op == "placeholder" and node.target not in parameters and name in left_out:
                node.target = name
        return graph


def _surroundings() -> tuple[Any, ...]:
    """What code around a step may have set, and a graph does not know."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    cast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *cast, None if hooks is None else id(hooks[0])


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody watches its inputs, outputs or their gradients."""
    tables = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    # Those of recompute watch nothing.
    watching = [
        hook for table in tables for hook in table.values() if not hook.__module__.startswith(__package__ or "?")
    ]
    return bool(watching)


@dataclass
class Section:
    """A part of the model that could be traced in one piece."""

    path: str
    graph: fx.Graph
    modules: dict[str, nn.Module]
    given: dict[nn.Module, frozenset[str]]

    def named(self, path: str) -> str:
        """A path within the whole model."""
        return ".".join(filter(None, (self.path, path)))


def sections(model: nn.Module, training: bool = True) -> tuple[list[Section], dict[str, str]]:
    """The largest traceable parts of a model in a mode; and, by path, why a module could not be traced."""
    found: list[Section] = []
    failed: dict[str, str] = {}
    with _in_mode(model, training):
        _collect(model, "", found, failed)
    return found, failed


def _collect(model: nn.Module, path: str, found: list[Section], failed: dict[str, str]) -> None:
    opaque: set[nn.Module] = set()
    modules = dict(model.named_modules())
    paths = {module: name for name, module in modules.items()}

    def below(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        for name, child in module.named_children():
            if list(child.children()) and _is_called_whole(module, name, child):
                yield child, ".".join(filter(None, (path, paths[module], name)))

    while True:
        tracer = Tracer(opaque)
        try:
            with unchanged(modules.values()) as changed:
                graph = tracer.of(model)
            if changed:
                tracer.culprit = changed[0][0]
                raise ValueError(f"its code changes {changed[0][1]}")
        except Exception as error:
            culprit = tracer.culprit or model
            where = ".".join(filter(None, (path, paths.get(culprit, ""))))
            failed[where] = (
                f"{type(culprit).__name__}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
            if culprit is model or culprit in opaque or culprit not in paths:
                for child, name in below(model):
                    _collect(child, name, found, failed)
                return
            opaque.add(culprit)
            continue
        break
    found.append(Section(path, graph, modules, tracer.given))
    for module in opaque:
        for child, name in below(module):
            _collect(child, name, found, failed)
    for module in {modules[str(node.target)] for node in graph.nodes if node.op == "call_module"} - opaque:
        if is_hooked(module) and list(module.children()):
            _collect(module, ".".join(filter(None, (path, paths[module]))), found, failed)


# What every module has of its own.
_INTERNAL = frozenset(vars(nn.Module()))


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[list[tuple[nn.Module, str]]]:
    """Put attributes back that code changes while it is traced, as caches do; yields which, filled at the end."""

    def own(module: nn.Module) -> dict[str, Any]:
        return {k: v for k, v in vars(module).items() if k not in _INTERNAL and not k.startswith("_tensor_constant")}

    def inside(value: Any) -> Any:
        return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else None

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(a[k] is b[k] for k in a)
        return a is None or (len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True)))

    before = [(module, own(module), {k: inside(v) for k, v in own(module).items()}) for module in modules]
    changed: list[tuple[nn.Module, str]] = []
    try:
        yield changed
    finally:
        for module, attributes, contents in before:
            now = vars(module)
            for name in own(module).keys() | attributes.keys():
                if name not in attributes:
                    del now[name]
                elif now.get(name) is not attributes[name]:
                    now[name] = attributes[name]
                elif same(contents[name], inside(attributes[name])):
                    continue
                elif isinstance(attributes[name], dict):
                    attributes[name].clear()
                    attributes[name].update(contents[name])
                else:
                    attributes[name][:] = contents[name]
                changed.append((module, name))


def _is_called_whole(parent: nn.Module, name: str, child: nn.Module) -> bool:
    """Whether code that cannot be traced calls a child, and does not take a sequence apart."""
    if type(child).forward is not nn.Sequential.forward or isinstance(
        parent, nn.Sequential | nn.ModuleList | nn.ModuleDict
    ):
        return True
    try:
        source = inspect.getsource(type(parent))
    except (OSError, TypeError):
        return False
    pieces = (rf"self\.{name}\[", rf"in self\.{name}\b", rf"\(self\.{name}\b", rf"self\.{name}\.")
    return f"self.{name}(" in source and not any(re.search(piece, source) for piece in pieces)


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """All of it in training or evaluation for a while."""
    before = [(module, module.training) for module in model.modules()]
    for module, _ in before:
        module.training = training
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


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
        module = modules[str(node.target)]
        make = None if "forward" in vars(module) else _MODULES.get(type(module))
        return None if make is None else make(module)
    name = name_of(node, modules).rstrip("_")
    if node.op not in ("call_function", "call_method") or name not in _FUNCTIONS:
        return None
    phi, parameter = _FUNCTIONS[name]
    rest = dict(node.kwargs)
    # More than a parameter, or "in place", and it is another function.
    home = getattr(node.target, "__module__", None) or ""
    if node.op == "call_function" and not home.startswith(("torch.nn.functional", "torch._C", "torch")):
        return None
    extra = node.args[2 if parameter is not None else 1 :]
    if "OpOverload" in type(node.target).__name__ or not all(isinstance(value, bool) for value in extra):
        return None
    inplace = rest.pop("inplace", False)
    value: Any = 0.0
    if parameter is not None:
        value = rest.pop(parameter[0], node.args[1] if len(node.args) > 1 else parameter[1])
    elif phi == "gelu":
        phi = "gelu" if rest.pop("approximate", "none") == "none" else "gelu_tanh"
    known = isinstance(value, int | float) and isinstance(inplace, bool) and set(rest) <= {"input"}
    return (phi, float(value)) if known else None


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
    name = name_of(node, modules)
    is_edit = name in ("iadd", "isub", "imul", "itruediv", "setitem") or (
        name.endswith("_") and not name.endswith("__")
    )
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


def why_not_overwritten(x: Any, modules: dict[str, nn.Module]) -> str | None:
    """A reason not to write over the input of a norm; None where nobody else needs it."""
    x = source(x, modules)
    if not isinstance(x, fx.Node):
        return "INPUT_UNKNOWN"
    if x.op in ("placeholder", "get_attr"):
        return f"SHARED_INPUT: {x.op} of the traced part"
    if len(users(x, modules)) > 1:
        others = ", ".join(sorted({name_of(u, modules) for u in users(x, modules)}))
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
    phi: Phi = ("identity", 0.0)
    last: fx.Node = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.act or self.add or self.norm

    @property
    def pattern(self) -> str:
        """As the report shows it."""
        return " + ".join(["bn", *(["add"] if self.add else []), *([self.phi[0]] if self.act else [])])


def follow(
    norm: fx.Node, modules: dict[str, nn.Module], inner: Phi = ("identity", 0.0), residuals: bool = True
) -> Chain:
    """The chain that begins with a call of a norm; ``inner`` is the activation that the norm's own module has already."""
    if inner[0] != "identity":
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
    node = first
    while node is not last:
        node = node.next
        name = str(getattr(node.target, "__name__", node.target))
        writes = name in ("iadd", "isub", "imul", "itruediv", "setitem") or (
            name.endswith("_") and not name.endswith("__")
        )
        if (
            node not in chain
            and node.op in ("call_function", "call_method")
            and (writes or node.kwargs.get("inplace") is True)
        ):
            return True
    return False


def calls(graph: fx.Graph) -> Counter[str]:
    """How often every module is called."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_module")


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
        return ("identity", 0.0)
    timms = type(module).__module__.startswith("timm.") and type(module).__name__ in (
        "BatchNormAct2d",
        "SyncBatchNormAct",
    )
    if not timms or not isinstance(drop, nn.Identity):
        return None
    if isinstance(act, nn.Identity):
        return ("identity", 0.0)
    make = _MODULES.get(type(act)) if isinstance(act, nn.Module) and not is_hooked(act) else None
    return None if make is None else make(act)

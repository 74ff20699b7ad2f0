"""A model's code as graphs of ``torch.fx``, without running it: the largest parts that can be traced.

A module that cannot be traced (its code depends on numbers, or does what a graph cannot express) is one step of unknown effect;
what is inside of it is traced apart.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .modules import ABN

__all__ = ["EDITS", "Section", "Tracer", "calls", "is_hooked", "sections", "unchanged"]

# Operators that write over their first operand.
EDITS = ("iadd", "isub", "imul", "itruediv")


class _Proxy(fx.Proxy):
    """Records ``a += b`` as what it is; torch's own records a sum."""


def _edits(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)
    return lambda a, b: a.tracer.create_proxy("call_function", function, (a, b), {})


for _name in EDITS:
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
        if m in self.opaque or isinstance(m, _BatchNorm | ABN) or is_hooked(m):
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
            # A single step is what it is; the code that calls it is what cannot be traced.
            if self.culprit is None and not leaf:
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
        return joined(self.path, path)


def joined(*names: str) -> str:
    """A path of those that are not empty."""
    return ".".join(filter(None, names))


def sections(model: nn.Module, training: bool = True) -> tuple[list[Section], dict[str, str]]:
    """The largest traceable parts of a model in a mode; and, by path, why a module could not be traced."""
    found: list[Section] = []
    failed: dict[str, str] = {}
    with _in_mode(model, training):
        _collect(model, "", found, failed)
    return found, failed


def calls(parts: Iterable[Section]) -> dict[nn.Module, list[tuple[Section, fx.Node]]]:
    """Where every module is called that is a single step."""
    found: dict[nn.Module, list[tuple[Section, fx.Node]]] = {}
    for part in parts:
        for node in part.graph.nodes:
            if node.op == "call_module":
                found.setdefault(part.modules[str(node.target)], []).append((part, node))
    return found


def _collect(model: nn.Module, path: str, found: list[Section], failed: dict[str, str]) -> None:
    opaque: set[nn.Module] = set()
    modules = dict(model.named_modules())
    paths = {module: name for name, module in modules.items()}

    def below(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        for name, child in module.named_children():
            if _has_code(child):
                if list(child.children()) and _is_called_whole(module, name, child):
                    yield child, joined(path, paths[module], name)
            else:
                whole = _has_code(module) and _elements_are_called_whole(module, name)
                for element, where in below(child):
                    if whole or not _is_plain_sequence(element):
                        yield element, where

    if not _has_code(model):
        for child, name in below(model):
            _collect(child, name, found, failed)
        return
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
            where = joined(path, paths.get(culprit, ""))
            reason = (str(error) or type(error).__name__).splitlines()[0]
            failed[where] = f"{type(culprit).__name__}: {reason}"
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
            _collect(module, joined(path, paths[module]), found, failed)


# What every module has of its own, and those of it that hold what code may assign.
_INTERNAL = frozenset(vars(nn.Module()))
_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[list[tuple[nn.Module, str]]]:
    """Put back what code changes of modules while it is traced, as caches and counters do; yields which, filled at the end.

    Attributes, what lists and dicts among them hold, parameters, buffers and submodules.
    """

    def own(module: nn.Module) -> dict[str, Any]:
        return {k: v for k, v in vars(module).items() if k not in _INTERNAL and not k.startswith("_tensor_constant")}

    def inside(value: Any) -> Any:
        return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else None

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return not differing(a, b)
        return a is None or (len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True)))

    def differing(a: dict[Any, Any], b: dict[Any, Any]) -> list[Any]:
        missing = object()
        return [k for k in {**a, **b} if a.get(k, missing) is not b.get(k, missing)]

    before = []
    for module in modules:
        attributes = own(module)
        contents = {name: inside(value) for name, value in attributes.items()}
        # Scripted modules have theirs elsewhere.
        tables = {t: dict(vars(module)[t]) for t in _TABLES if isinstance(vars(module).get(t), dict)}
        before.append((module, attributes, contents, tables))
    changed: list[tuple[nn.Module, str]] = []
    try:
        yield changed
    finally:
        for module, attributes, contents, tables in before:
            now = vars(module)
            for table, was in tables.items():
                if names := differing(was, now[table]):
                    now[table].clear()
                    now[table].update(was)
                    changed += [(module, str(name)) for name in names]
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


def _has_code(module: nn.Module) -> bool:
    """Whether it can be called; lists and dicts of modules cannot."""
    return inspect.getattr_static(type(module), "forward", None) is not nn.Module.forward


def _is_plain_sequence(module: nn.Module) -> bool:
    return inspect.getattr_static(type(module), "forward", None) is nn.Sequential.forward


def _is_called_whole(parent: nn.Module, name: str, child: nn.Module) -> bool:
    """Whether a parent's code, which cannot be traced, calls a child, and does not take a sequence apart."""
    if not _is_plain_sequence(child) or _is_plain_sequence(parent) or not _has_code(parent):
        return True
    own, source = rf"\bself\.{re.escape(name)}", _source_of(parent)
    # Called, set, or handed to torch's checkpoint, which calls it; nothing else.
    calls = rf"{own}\(|(?<![\w.])(?!self\.)(?:\w+\.)*checkpoint\(\s*{own}\s*,"
    rest, many = re.subn(calls, "", source)
    return many > 0 and not re.search(rf"{own}\b", re.sub(rf"{own}\s*=(?!=)", "", rest))


def _elements_are_called_whole(owner: nn.Module, name: str) -> bool:
    """Whether the code that a list or dict of modules belongs to calls its elements, and does not take sequences apart."""
    own, source = rf"\bself\.{re.escape(name)}", _source_of(owner)
    # Set, filled, measured, or an element of it called.
    rest = re.sub(rf"{own}\s*=(?!=)|{own}\.(append|extend|update)\(|\blen\({own}\)", "", source)
    rest, many = re.subn(rf"{own}\[[^\[\]]*\]\(", "", rest)
    each = rf"\bfor\s+(?:\w+\s*,\s*)?(\w+)\s+in\s+(?:enumerate\(\s*)?{own}(?:\.values\(\)|\.items\(\))?\s*\)?"
    variables = {found[1] for found in re.finditer(each, rest)}
    rest = re.sub(each, "", rest)
    used = "|".join(rf"\b{variable}\b(?!\()" for variable in variables)
    known = many > 0 or bool(variables)
    return known and not re.search(rf"{own}\b", rest) and not (used and re.search(used, rest))


def _source_of(module: nn.Module) -> str:
    """The code of its classes but for what makes a module; nothing where some of it cannot be had."""
    found = []
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.nn.") or kind is object:
            continue
        try:
            source = inspect.getsource(kind)
            made = vars(kind).get("__init__")
            if made is not None:
                source = source.replace(inspect.getsource(made), "")
        except (OSError, TypeError):
            return ""
        found.append(source)
    return "\n".join(found)


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

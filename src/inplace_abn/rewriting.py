"""New code for a module: its own ``forward`` with sums and activations left to the norms before them, and back.

The module stays the same object and gets a class of its own, derived from the one it has, so that it still is what it was. Copies
and pickles are made of the class it had and the norms it was rewritten for, and rewritten anew.
"""

from __future__ import annotations

import itertools
import linecache
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from . import chains
from .tracing import Tracer, is_hooked, unchanged

__all__ = ["forward_of", "rewrite", "undo"]

Forward = Callable[..., Any]
# Modules that the code of one forward may ask for their mode, if it is to be written for each combination; of more, for training,
# evaluation, and what they are at conversion.
MODES = 3
# Files of generated code, for tracebacks.
_FILES = itertools.count()


def forward_of(
    module: nn.Module, norms: Sequence[str], given: frozenset[str], sums: Sequence[bool | None] | None = None
) -> Forward:
    """The module's own code, with the sums and activations after these norms left to them; an error where that cannot be.

    ``norms`` are paths inside of the module, ``given`` the optional arguments with which it is called. ``sums`` says, where it is
    known, which of the norms are to take a sum.
    """
    modules = dict(module.named_modules())
    if "forward" in module.__dict__:
        raise ValueError("its forward was replaced on the instance")
    inlined = _inlined(modules, norms)
    through = set(inlined.values()) - {module}
    before = [(m, m.training) for m in modules.values()]
    everything, as_they_are = frozenset(modules.values()), frozenset(m for m, training in before if training)
    asked: set[nn.Module] = set()
    written: dict[frozenset[nn.Module], tuple[str, dict[str, Any]]] = {}

    def write(in_training: frozenset[nn.Module]) -> None:
        """The code where these are in training, and the others are not."""
        for m, _ in before:
            m.training = m in in_training
        with unchanged(inlined.values()) as changed, _noting(asked):
            graph = Tracer(through=through.__contains__).of(module, given)
        if changed:
            raise ValueError(f"its code changes {', '.join(name for _, name in changed)}")
        if asked - everything:
            raise ValueError("its code asks a module outside of it whether it is in training")
        for path, has_sum in zip(norms, sums or [None] * len(norms), strict=True):
            _take_over(graph, modules, path, has_sum)
        code = graph.python_code("self")
        written[in_training] = code.src, code.globals

    try:
        for in_training in dict.fromkeys((everything, frozenset[nn.Module](), as_they_are)):
            write(in_training)
        known: list[nn.Module] = []
        # One mode may lead to where another is asked for.
        while len(known) < len(asked) <= MODES:
            known = [m for m in modules.values() if m in asked]
            for some in itertools.product((False, True), repeat=len(known)):
                wanted = {m for m, training in zip(known, some, strict=True) if training}
                # What is not asked for is the same to the code.
                if all(in_training & set(known) != wanted for in_training in written):
                    write(everything - (set(known) - wanted))
    finally:
        for m, was in before:
            m.training = was
    return _by_modes(type(module).__name__, modules, asked, written)


def _by_modes(
    name: str,
    modules: dict[str, nn.Module],
    asked: set[nn.Module],
    written: dict[frozenset[nn.Module], tuple[str, dict[str, Any]]],
) -> Forward:
    """The code for the modes that modules have when it is called."""
    if not asked or (len(asked) <= MODES and len({source for source, _ in written.values()}) == 1):
        return _compile(*next(iter(written.values())), name)
    paths = [path for path, m in modules.items() if m in asked]
    codes = {tuple([modules[path] in some for path in paths]): code for some, code in written.items()}
    compiled = {modes: _compile(*code, name) for modes, code in codes.items()}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        modes = tuple([self.get_submodule(path).training for path in paths])
        if modes not in compiled:
            raise RuntimeError(
                f"the converted code of {name} asks {len(paths)} modules whether they are in training ({', '.join(paths)}), "
                "and was not written for the modes that they have now: bring all into one, or revert the model, set the "
                "modes, and convert it again"
            )
        return compiled[modes](self, *args, **kwargs)

    return forward


@contextmanager
def _noting(asked: set[nn.Module]) -> Iterator[None]:
    """Note whose mode this thread asks for. All modules there are get it by way of this, and notice nothing."""
    own = threading.get_ident()

    def get(self: nn.Module) -> bool:
        if threading.get_ident() == own:
            asked.add(self)
        if "training" not in vars(self):
            # Of a scripted module, which has it elsewhere.
            raise AttributeError("training")
        return bool(vars(self)["training"])

    def put(self: nn.Module, training: bool) -> None:
        vars(self)["training"] = training

    nn.Module.training = property(get, put)  # type: ignore[assignment]
    try:
        yield
    finally:
        del nn.Module.training


def _inlined(modules: dict[str, nn.Module], norms: Sequence[str]) -> dict[str, nn.Module]:
    """By path, the modules whose code becomes part of the new one: the root, and what lies between it and the norms."""
    found = {"": modules[""]}
    for path in norms:
        while "." in path:
            path = path.rpartition(".")[0]
            if is_hooked(modules[path]):
                raise ValueError(f"a hook watches {path}")
            found[path] = modules[path]
    if any(isinstance(m, fx.GraphModule) for m in found.values()):
        raise ValueError("it is a torch.fx.GraphModule, which writes its own code; convert what it was traced from")
    return found


def _take_over(graph: fx.Graph, modules: dict[str, nn.Module], path: str, has_sum: bool | None) -> None:
    """Let the call of a norm do what follows it."""
    nodes = [node for node in graph.nodes if node.op == "call_module" and node.target == path]
    if len(nodes) != 1:
        raise ValueError(f"it calls {path} {len(nodes)} times")
    chain = chains.follow(nodes[0], modules)
    if chain.last is chain.norm or has_sum not in (None, chain.add is not None):
        raise ValueError(f"what follows {path} is elsewhere")
    if chains.edits_between(chain.norm, chain.last, (chain.add, chain.act)):
        raise ValueError(f"something is written to between {path} and what follows it")
    with graph.inserting_before(chain.last):
        kwargs: dict[str, Any] = {} if chain.residual is None else {"residual": chain.residual}
        together = graph.call_module(path, (chain.norm.args[0],), kwargs)
    chain.last.replace_all_uses_with(together)
    # The sum, the activation, and the identities between them.
    value: fx.Node = chain.last
    while True:
        before = [n for n in value.all_input_nodes if n is not chain.residual]
        graph.erase_node(value)
        if value is chain.norm:
            return
        (value,) = before


def _compile(source: str, space: dict[str, Any], name: str) -> Forward:
    file = f"<{name}.forward, converted, {next(_FILES)}>"
    exec(compile(source, file, "exec"), space)
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    forward: Forward = space["forward"]
    return forward


def rewrite(module: nn.Module, norms: tuple[str, ...], given: frozenset[str], forward: Forward | None = None) -> None:
    """Give the module new code, of :func:`forward_of` unless it is there already."""
    if earlier := undo(module):
        norms, given, forward = (*earlier[0], *norms), earlier[1], None
    kind = type(module)
    own = {
        "forward": forward or forward_of(module, norms, given),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": _reduce,
        "_rewritten": (kind, norms, given),
    }
    module.__class__ = type(kind.__name__, (kind,), own)


def undo(module: Any) -> tuple[tuple[str, ...], frozenset[str]] | None:
    """Give a rewritten module the class it had; the norms and arguments it was rewritten for. None for any other module."""
    if "_rewritten" not in vars(type(module)):
        return None
    kind, norms, given = type(module)._rewritten
    module.__class__ = kind
    return norms, given


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """For copies and pickles: what it was, and the norms with which to do it again."""
    return _again, self._rewritten, self.__dict__


def _again(kind: type[nn.Module], norms: tuple[str, ...], given: frozenset[str]) -> nn.Module:
    def restore(self: nn.Module, state: dict[str, Any]) -> None:
        self.__class__ = kind
        kind.__setstate__(self, state)
        rewrite(self, norms, given)

    waiting: Any = type(kind.__name__, (kind,), {"__setstate__": restore})
    new: nn.Module = waiting.__new__(waiting)
    return new

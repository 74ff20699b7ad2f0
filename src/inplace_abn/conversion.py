"""A model of plain batch norms to in-place ones and back: :func:`convert`, :func:`revert`, :func:`fuse`.

What is changed in a model: norms become layers of this package that have their very parameters and buffers; an activation
module that only one norm leads to becomes an identity; and where an activation is a function, is shared, or follows a sum, the
module whose code calls it gets a new ``forward``, generated from its own by ``torch.fx``. Names, tensors, hooks, flags and
everybody's references stay. :func:`revert` takes all of it back.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import linecache
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from . import chains
from .activations import resolve
from .chains import Chain, Phi, Section
from .doctor import columns
from .functions import WEIGHT_FLOOR
from .memory import saved_bytes
from .modules import ABN, InPlaceABN, InPlaceABNSync
from .recompute import recompute, unmark

__all__ = ["Line", "Report", "convert", "fuse", "revert"]

# Activations that keep their own input for backward, beside the output that the next layer keeps.
KEEPS_Y = {"silu", "gelu", "gelu_tanh", "mish", "hardswish", "relu6", "softplus"}


@dataclass(frozen=True)
class Line:
    """One batch norm: where it is, what follows it, what was done, why not, and the bytes it no longer keeps.

    Attributes:
        layer: its path in the model.
        pattern: "bn", "bn + relu", "bn + add + relu", …
        decision: "in place", "recompute" (keeps the norm's input and computes its output again in backward) or "left".
        reason: a code, and a word about it; empty where there is nothing to say.
        bytes_saved: at the example's shape, by how many maps autograd keeps for such a chain; None without an example.
        map_bytes: the size of its output there.
    """

    layer: str
    pattern: str
    decision: str
    reason: str = ""
    bytes_saved: int | None = None
    map_bytes: int | None = None


@dataclass(frozen=True)
class Report:
    """What :func:`convert` did, norm by norm; prints as a table.

    Attributes:
        lines: one for every batch norm of the model.
        before: bytes autograd kept for a backward pass of the example; None without one.
        after: the same of the converted model.
        rewritten: paths of the modules whose ``forward`` is generated now.
    """

    lines: tuple[Line, ...]
    before: int | None = None
    after: int | None = None
    rewritten: tuple[str, ...] = ()

    @property
    def converted(self) -> int:
        """How many norms were converted."""
        return sum(line.decision != "left" for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "before_bytes": self.before,
            "after_bytes": self.after,
            "norms": len(self.lines),
            "converted": self.converted,
            "rewritten": list(self.rewritten),
            "lines": [asdict(line) for line in self.lines],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        head = ("layer", "pattern", "decision", "saved", "reason")
        rows = [
            (line.layer or "(model)", line.pattern, line.decision, mebibytes(line.bytes_saved), line.reason)
            for line in self.lines
        ]
        return "\n".join([*columns(head, rows), self.summary()])

    def summary(self) -> str:
        """The totals in a sentence."""
        text = f"{self.converted} of {len(self.lines)} batch norms converted"
        if self.before is not None and self.after is not None:
            share = self.after / max(self.before, 1)
            text += f"; kept for backward: {mebibytes(self.before)} before, {mebibytes(self.after)} after ({share:.0%})"
        return text


def mebibytes(size: int | None) -> str:
    """As people read it; empty for None."""
    return "" if size is None else f"{size / 2**20:.1f} MiB"


def convert(
    model: nn.Module,
    *,
    example: Any = None,
    relu: Literal["exact", "leaky", "keep"] = "exact",
    residual: bool = True,
    sync: bool = False,
    preserve: Iterable[str] = (),
    dry_run: bool = False,
) -> tuple[nn.Module, Report]:
    """Make the batch norms and activations of a model keep one map each where they keep two or three.

    Batch norms (1d, 2d, 3d, synchronised ones, timm's ``BatchNormAct2d``) are found with the sums and activations that follow
    them, be these modules, functions, methods or operators. With an invertible activation, or none, they become
    :class:`inplace_abn.InPlaceABN` layers that overwrite their input; with ReLU, GELU, SiLU and the like, layers that keep
    their input and compute their output again in backward (:func:`inplace_abn.recompute`, with which the model is marked).
    Neither changes the function: outputs in evaluation are the same to the bit. Whatever would be wrong is left as it is, with
    a reason in the report: every batch norm has its line.

    The model is changed and returned; only if it is itself a batch norm is another one returned. Code of rewritten modules
    (``report.rewritten``) is fixed as it ran at conversion, apart for training and evaluation: flags that it reads
    (``self.aux_logits``) must be set before. :func:`revert` undoes everything.

    Args:
        model: any module, in any mode, on any device.
        example: an input, or a tuple of them, for which the report counts bytes; nothing is computed with it, only its shape
            and dtype matter. Without one the columns are empty.
        relu: what a ReLU becomes: "exact" stays a ReLU; "leaky" is a leaky ReLU of slope 0.01 as in the paper, which needs no
            recomputation; "keep" leaves norms with a ReLU alone.
        residual: take sums into the layers.
        sync: make layers with statistics over all ranks; those of ``SyncBatchNorm`` are in any case.
        preserve: paths of modules to leave alone, with all that is in them; ``*`` and ``?`` match as in file names.
        dry_run: only report.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3))
        >>> net, report = convert(net, example=torch.randn(2, 3, 130, 130))
        >>> print(report)
        layer  pattern    decision   saved    reason
        1      bn + relu  recompute  1.0 MiB
        1 of 1 batch norms converted; kept for backward: 2.0 MiB before, 1.0 MiB after (50%)
    """
    if relu not in ("exact", "leaky", "keep"):
        raise ValueError(f"relu is {relu!r}; one of: exact, leaky, keep")
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes an nn.Module, not {type(model).__name__}")
    kept = [preserve] if isinstance(preserve, str) else list(preserve)
    decided = _decide(model, relu, residual, kept)
    maps: dict[str, int] = {}
    before = after = None
    if example is not None:
        before, maps = _kept_bytes(model, example, [d.line.layer for d in decided])
    target = on_meta(model) if dry_run else model
    rewritten, target = _apply(target, decided, sync)
    if example is not None:
        after, _ = _kept_bytes(target, example, [])
    lines = [d.line for d in decided]
    if example is not None:
        for i, d in enumerate(decided):
            size = maps.get(d.line.layer, 0)
            lines[i] = replace(d.line, bytes_saved=size * d.maps_saved, map_bytes=size)
    return (model if dry_run else target), Report(tuple(lines), before, after, rewritten)


@dataclass
class _Decision:
    """What to do with one norm, and in whose code."""

    line: Line
    phi: Phi = ("identity", 0.0)
    merged: str | None = None
    owner: str | None = None
    maps_saved: int = 0
    given: frozenset[str] = frozenset()


def _decide(model: nn.Module, relu: str, residual: bool, preserve: list[str]) -> list[_Decision]:
    parts, failed = chains.sections(model)
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    called: dict[nn.Module, list[tuple[Section, fx.Node]]] = {}
    for part in parts:
        for node in part.graph.nodes:
            if node.op == "call_module":
                called.setdefault(part.modules[str(node.target)], []).append((part, node))
    decided: dict[str, _Decision] = {}
    found: dict[str, tuple[Section, Chain]] = {}
    sums: dict[fx.Node, list[str]] = {}
    for module, names in paths.items():
        if not isinstance(module, _BatchNorm):
            continue
        path = names[0]
        reason = chains.why_not_norm(module)
        if _is_kept(path, preserve):
            reason = "PRESERVED"
        elif reason is None and (len(names) > 1 or len(called.get(module, ())) > 1):
            reason = "SHARED_MODULE: called in several places"
        elif reason is None and module not in called:
            reason = _why_not_called(path, failed)
        if reason is not None:
            decided[path] = _Decision(Line(path, "bn", "left", reason))
            continue
        part, node = called[module][0]
        if len(node.args) != 1 or node.kwargs:
            decided[path] = _Decision(Line(path, "bn", "left", "CALLED_BY_KEYWORD: call it with its input alone"))
            continue
        inner = chains.inner_activation(module)
        assert inner is not None
        chain = chains.follow(node, part.modules, inner, residual)
        found[path] = part, chain
        # The lines are to be in the model's order.
        decided[path] = _Decision(Line(path, "bn", "left"))
        if chain.add is not None:
            sums.setdefault(chain.add, []).append(path)
    for rivals in sums.values():
        # Of two norms that are added one takes the sum, and the other is its residual: best where all is in the same code.
        rivals.sort(key=lambda path: found[path][1].norm.meta["owner"] != found[path][1].last.meta["owner"])
        for path in rivals[1:]:
            part, chain = found[path]
            found[path] = part, chains.follow(chain.norm, part.modules, residuals=False)
    outside = _held_outside(model)
    for path, (part, chain) in found.items():
        act = part.modules[str(chain.act.target)] if chain.act is not None and chain.act.op == "call_module" else None
        decided[path] = _judge(path, model.get_submodule(path), part, chain, relu, called, paths)
        if {model.get_submodule(path), act} & outside:
            decided[path] = _Decision(
                replace(decided[path].line, decision="left", reason="SHARED_MODULE: held in a list")
            )
        elif act is not None and _is_kept(paths[act][0], preserve):
            decided[path] = _Decision(replace(decided[path].line, decision="left", reason="PRESERVED: its activation"))
    _compare_with_evaluation(model, decided, found, residual)
    _group(model, decided, found)
    _spare(decided, found)
    return list(decided.values())


def _is_kept(path: str, preserve: list[str]) -> bool:
    return any(fnmatch.fnmatch(path, p) or fnmatch.fnmatch(path, f"{p}.*") for p in preserve)


def _held_outside(model: nn.Module) -> set[nn.Module | None]:
    """Modules in plain lists, tuples and dicts of attributes, from where code may call them."""
    held: set[nn.Module | None] = set()
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_modules", "_was") and isinstance(value, list | tuple | dict):
                inside = value.values() if isinstance(value, dict) else value
                held |= {m for m in inside if isinstance(m, nn.Module)}
    return held


def _compare_with_evaluation(
    model: nn.Module, decided: dict[str, _Decision], found: Mapping[str, tuple[Section, Chain]], residual: bool
) -> None:
    """Leave norms alone that are followed by something else in evaluation, or whose input is read by others there."""
    parts, _ = chains.sections(model, training=False)
    modules = {module: path for path, module in model.named_modules()}
    for part in parts:
        for node in part.graph.nodes:
            module = part.modules[str(node.target)] if node.op == "call_module" else None
            path = modules.get(module, "") if module is not None else ""
            if module is None or path not in found or decided[path].line.decision == "left":
                continue
            chain, inner = found[path][1], chains.inner_activation(module)
            assert inner is not None
            there = chains.follow(node, part.modules, inner, residual and chain.add is not None)
            alike = [(c.phi, c.add is None, c.act is None or (c.act.op, str(c.act.target))) for c in (there, chain)]
            in_place = decided[path].line.decision == "in place"
            why = in_place and chains.why_not_overwritten(node.args[0], part.modules)
            if alike[0] != alike[1] or (why and "traced part" not in why):
                reason = "DIFFERS: in evaluation something else follows, or reads its input"
                decided[path] = _Decision(replace(decided[path].line, decision="left", reason=reason))


def _why_not_called(path: str, failed: Mapping[str, str]) -> str:
    around = [where for where in failed if not where or path == where or path.startswith(where + ".")]
    if not around:
        return "NOT_CALLED: the model's forward does not reach it"
    return f"UNTRACEABLE: {failed[max(around, key=len)]}"


def _judge(
    path: str,
    norm: nn.Module,
    part: Section,
    chain: Chain,
    relu: str,
    called: Mapping[nn.Module, list[Any]],
    paths: Mapping[nn.Module, list[str]],
) -> _Decision:
    """What to do with a norm whose chain is known, as far as the chain itself tells."""
    name, parameter = chain.phi
    note = ""
    pattern = chain.pattern if chain.act or name == "identity" else f"{chain.pattern} + {name}"

    def left(reason: str) -> _Decision:
        return _Decision(Line(path, pattern, "left", reason), chain.phi)

    act = part.modules[str(chain.act.target)] if chain.act is not None and chain.act.op == "call_module" else None
    if act is not None and chains.is_hooked(act):
        return left("HOOKED: a hook watches the activation")
    if name == "relu" and relu == "keep":
        return left("KEPT: relu='keep'")
    if name == "relu" and relu == "leaky":
        name, parameter, note = "leaky_relu", 0.01, "SUBSTITUTED: leaky_relu, slope 0.01, for relu"
    try:
        phi, a = resolve(name, parameter)
    except ValueError as error:
        return left(f"NOT_INVERTIBLE: {error}")
    if editor := chains.reader_that_edits(chain.last, part.modules):
        return left(f"INPLACE_CONSUMER: {editor} writes over the output")
    if chain.residual is not None:
        # The sum is not counted: it writes over the norm's output, if anything.
        r = chains.source(chain.residual, part.modules)
        if editor := chains.reader_that_edits(r, part.modules):
            return left(f"INPLACE_CONSUMER: {editor} writes over the residual")
    if phi.inverse is not None:
        if reason := chains.why_not_overwritten(chain.norm.args[0], part.modules):
            return left(reason)
        weight = norm.weight
        if isinstance(weight, Tensor) and not weight.is_meta and bool((weight.detach().abs() < WEIGHT_FLOOR).any()):
            return left(f"ILL_CONDITIONED: γ within {WEIGHT_FLOOR:g} of zero cannot be divided by")
    is_kept = chains.is_kept_by_readers(chain.last, part.modules)
    if name == "identity" and chain.add is None and not is_kept:
        return left("NOTHING_TO_SAVE: nobody keeps the output")
    merged = owner = None
    given: frozenset[str] = frozenset()
    if act is not None and chain.add is None and len(called[act]) == 1 and len(paths[act]) == 1:
        merged = paths[act][0]
    elif chain.act is not None or chain.add is not None:
        inside = str(chain.last.meta["owner"])
        owner, given = part.named(inside), part.given.get(part.modules[inside], given)
    decision = "recompute" if phi.inverse is None else "in place"
    # x is kept in any case; the output if somebody needs it, be it φ; what φ reads if it needs that.
    saved = int(is_kept or name not in ("identity", *KEEPS_Y)) + int(name in KEEPS_Y)
    return _Decision(Line(path, pattern, decision, note), (phi.name, a), merged, owner, saved, given)


def _group(model: nn.Module, decided: dict[str, _Decision], found: Mapping[str, tuple[Section, Chain]]) -> None:
    """See whether the code of every owner can be rewritten; leave its norms alone if not."""
    owners: dict[str, list[str]] = {}
    for path, d in decided.items():
        if d.owner is not None:
            owners.setdefault(d.owner, []).append(path)
    modules = dict(model.named_modules())

    def why_not(owner: str, some: list[str]) -> str | None:
        try:
            inside = [_relative(path, owner) for path in some]
            _forward_of(
                modules[owner], inside, decided[some[0]].given, [found[path][1].add is not None for path in some]
            )
        except Exception as error:
            return f"SPLIT: {type(modules[owner]).__name__} cannot be rewritten: {error}"
        return None

    for owner, norms in owners.items():
        if why_not(owner, norms) is None:
            continue
        alone = {path: why_not(owner, [path]) for path in norms}
        together = why_not(owner, [path for path in norms if alone[path] is None])
        for path in norms:
            if reason := alone[path] or together:
                d = decided[path]
                decided[path] = _Decision(replace(d.line, decision="left", reason=reason))


def _spare(decided: dict[str, _Decision], found: Mapping[str, tuple[Section, Chain]]) -> None:
    """A norm alone whose output nobody keeps has nothing to save, but for the one that is a residual, and so kept."""
    residuals = set()
    for path, (part, chain) in found.items():
        if decided[path].line.decision != "left" and chain.residual is not None:
            residuals.add(chains.source(chain.residual, part.modules))
    for path, (_, chain) in found.items():
        d = decided[path]
        if chain.norm in residuals and d.line.reason.startswith("NOTHING_TO_SAVE"):
            decided[path] = _Decision(replace(d.line, decision="in place", reason=""), d.phi)


def _relative(path: str, owner: str) -> str:
    if owner and not path.startswith(owner + "."):
        raise ValueError(f"{path} is not inside of {owner}")
    return path[len(owner) + 1 :] if owner else path


def _apply(model: nn.Module, decided: list[_Decision], sync: bool) -> tuple[tuple[str, ...], nn.Module]:
    """Carry the decisions out."""
    owners: dict[str, list[str]] = {}
    given: dict[str, frozenset[str]] = {}
    done = [d for d in decided if d.line.decision != "left"]
    for d in done:
        if d.owner is not None:
            owners.setdefault(d.owner, []).append(_relative(d.line.layer, d.owner))
            given[d.owner] = d.given
    for owner, norms in owners.items():
        _rewrite(model.get_submodule(owner), tuple(norms), given[owner])
    for d in done:
        model = _put(model, d.line.layer, _layer(model.get_submodule(d.line.layer), d.phi, sync))
        if d.merged is not None:
            model = _put(model, d.merged, Merged(model.get_submodule(d.merged), d.line.layer))
    if any(d.line.decision == "recompute" for d in done):
        recompute(model)
    return tuple(owners), model


def _put(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """The model with another module at this path."""
    if not path:
        return module
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module
    return model


def _layer(norm: Any, phi: Phi, sync: bool) -> InPlaceABN:
    """The layer for a batch norm, with its tensors."""
    own: dict[str, Any] = {"activation": phi[0], "activation_param": phi[1], "device": "meta"}
    shape = (norm.num_features, norm.eps, norm.momentum, False, norm.track_running_stats)
    if sync or isinstance(norm, nn.SyncBatchNorm):
        layer: InPlaceABN = InPlaceABNSync(*shape, **own, group=getattr(norm, "process_group", None))
    else:
        layer = InPlaceABN(*shape, **own)
    layer.affine = norm.affine
    _hand_over(norm, layer)
    layer.__dict__["_was"] = _shell(norm)
    return layer


def _hand_over(old: nn.Module, new: nn.Module) -> None:
    """Tensors, mode and the hooks of state dicts."""
    for name in ("weight", "bias"):
        # Where a layer was made without one.
        new.__dict__.pop(name, None)
        new._parameters[name] = old._parameters.get(name)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        new._buffers[name] = old._buffers[name]
    new.training = old.training
    for name in (
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    ):
        new.__dict__[name] = old.__dict__[name]


def _shell(norm: nn.Module) -> nn.Module:
    """The norm without its tensors."""
    shell = type(norm).__new__(type(norm))
    shell.__dict__.update(norm.__dict__)
    for table in ("_parameters", "_buffers"):
        shell.__dict__[table] = dict.fromkeys(norm.__dict__[table])
    return shell


class Merged(nn.Identity):
    """What is left of an activation that a layer has taken over."""

    def __init__(self, was: nn.Module, layer: str) -> None:
        super().__init__()
        self.layer = layer
        self.training = was.training
        self.__dict__["_was"] = was

    def __getattr__(self, name: str) -> Any:
        # Code may ask an activation for its slope.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_was"], name)

    def extra_repr(self) -> str:
        """Who has it."""
        return f"{self.__dict__['_was']} in {self.layer}"


def _forward_of(
    module: nn.Module, norms: Sequence[str], given: frozenset[str], sums: Sequence[bool | None] | None = None
) -> Callable[..., Any]:
    """The module's own code, with the sums and activations after these norms left to them."""
    modules = dict(module.named_modules())
    if "forward" in module.__dict__:
        raise ValueError("its forward was replaced on the instance")
    inlined = set()
    for path in norms:
        while "." in path:
            path = path.rpartition(".")[0]
            if chains.is_hooked(modules[path]):
                raise ValueError(f"a hook watches {path}")
            inlined.add(modules[path])
    before = [(m, m.training) for m in (module, *inlined)]
    forwards: dict[bool, tuple[str, dict[str, Any]]] = {}
    try:
        for training in (True, False):
            for m, _ in before:
                m.training = training
            with chains.unchanged((module, *inlined)) as changed:
                graph = chains.Tracer(through=inlined.__contains__).of(module, given)
            if changed:
                raise ValueError(f"its code changes {', '.join(name for _, name in changed)}")
            for path, has_sum in zip(norms, sums or [None] * len(norms), strict=True):
                _take_over(graph, modules, path, has_sum)
            code = graph.python_code("self")
            forwards[training] = code.src, code.globals
    finally:
        for m, was in before:
            m.training = was
    name = type(module).__name__
    compiled = {training: _compile(src, space, name) for training, (src, space) in forwards.items()}
    if forwards[True][0] == forwards[False][0]:
        return compiled[True]
    in_training, in_evaluation = compiled[True], compiled[False]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (in_training if self.training else in_evaluation)(self, *args, **kwargs)

    return forward


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


def _compile(source: str, space: dict[str, Any], name: str) -> Callable[..., Any]:
    file = f"<{name}.forward, converted, {len(linecache.cache)}>"
    exec(compile(source, file, "exec"), space)
    # For tracebacks, which show the lines.
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    forward: Callable[..., Any] = space["forward"]
    return forward


def _rewrite(module: nn.Module, norms: tuple[str, ...], given: frozenset[str]) -> None:
    """Give the module a class of its own, derived from the one it has, with a new forward."""
    if "_rewritten" in type(module).__dict__:
        earlier, given = _as_before(module)
        norms = (*earlier, *norms)
    kind = type(module)
    own = {
        "forward": _forward_of(module, norms, given),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": _reduce,
        "_rewritten": (kind, norms, given),
    }
    module.__class__ = type(kind.__name__, (kind,), own)


def _as_before(module: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """Give a rewritten module the class it had; the norms and arguments with which it was rewritten."""
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
        _rewrite(self, norms, given)

    waiting: Any = type(kind.__name__, (kind,), {"__setstate__": restore})
    new: nn.Module = waiting.__new__(waiting)
    return new


def revert(model: nn.Module) -> nn.Module:
    """Undo :func:`convert`: plain batch norms and activations again, with the parameters and buffers as they are now.

    Layers of this package that were built by hand become :class:`inplace_abn.ABN`, batch norm and activation as torch has
    them. The model is changed and returned, unless it is itself a layer; its state dict has the same keys and values.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        >>> print(revert(convert(net)[0])[1:])
        Sequential(
          (1): BatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
          (2): ReLU(inplace=True)
        )
    """
    unmark(model)
    made: dict[nn.Module, nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if "_rewritten" in type(module).__dict__:
            _as_before(module)
        if isinstance(module, InPlaceABN | Merged):
            if module not in made:
                made[module] = _before(module)
            model = _put(model, path, made[module])
    return model


def _before(module: InPlaceABN | Merged) -> nn.Module:
    was = module.__dict__.get("_was")
    if isinstance(module, Merged):
        assert isinstance(was, nn.Module)
        return was.train(module.training)
    if was is None:
        shape = (module.num_features, module.eps, module.momentum, False, module.track_running_stats)
        was = ABN(*shape, activation=module.activation, activation_param=module.activation_param, device="meta")
        was.affine = module.affine
    else:
        was.eps, was.momentum, was.track_running_stats = module.eps, module.momentum, module.track_running_stats
    _hand_over(module, was)
    return was


class Activated(nn.Module):
    """φ(x), or φ(x + residual): what is left of a layer whose norm went into the convolution before it."""

    def __init__(self, activation: str | None, activation_param: float) -> None:
        super().__init__()
        self.activation, self.activation_param = activation, activation_param

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """φ of the input, or of the sum."""
        phi, a = resolve(self.activation, self.activation_param)
        return phi.plain(x.clone() if residual is None else x + residual, a)

    def extra_repr(self) -> str:
        """Which φ."""
        return f"{self.activation}, {self.activation_param}"


def fuse(model: nn.Module) -> nn.Module:
    """Fold batch norms into the convolutions before them, for inference: y = (γ·W/σ)·x + (β + (b − μ)·γ/σ).

    Takes plain, converted and hand-built models in evaluation mode, changes the model and returns it. Norms that nothing can
    take up (no convolution before them, or its output has other readers) stay. What is folded cannot be trained as before.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), InPlaceABN(8)).eval()
        >>> x = torch.randn(2, 3, 9, 9)
        >>> z = net(x)
        >>> torch.allclose(fuse(net)(x), z, atol=1e-6), net
        (True, Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): Activated(leaky_relu, 0.01)
        ))
    """
    if model.training:
        raise ValueError("fuse needs the model in evaluation mode, whose statistics are fixed: call model.eval() first")
    folds = []
    # Before anything is undone: layers know more than what they came from.
    model = revert(model)
    parts, _ = chains.sections(model, training=False)
    outside = _held_outside(model)
    several = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    counted: Counter[nn.Module] = Counter()
    for part in parts:
        for path, many in chains.calls(part.graph).items():
            counted[part.modules[path]] += many
    for part in parts:
        for node in part.graph.nodes:
            if node.op != "call_module" or not node.args:
                continue
            norm = part.modules[str(node.target)]
            before = chains.source(node.args[0], part.modules)
            if not isinstance(norm, _BatchNorm | ABN) or not isinstance(before, fx.Node) or before.op != "call_module":
                continue
            conv = part.modules[str(before.target)]
            alone = len(chains.users(before, part.modules)) == 1 and counted[norm] == counted[conv] == 1
            alone = alone and several[norm] == several[conv] == 1 and not {norm, conv} & outside
            read = any(
                n.op == "get_attr" and str(n.target).startswith((f"{before.target}.", f"{node.target}."))
                for n in part.graph.nodes
            )
            if alone and not read and _can_take_up(conv, norm):
                folds.append((part.named(str(node.target)), conv, norm))
    for path, conv, norm in folds:
        _fold(conv, norm)
        model = _put(model, path, _rest(norm))
    return model


def _can_take_up(conv: nn.Module, norm: Any) -> bool:
    # Not a linear layer, whose channels are last, wherever a norm's are.
    known = type(conv) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and "forward" not in vars(conv)
    known = known and isinstance(conv._parameters.get("weight"), nn.Parameter) and not chains.is_hooked(conv)
    plain = type(norm) is ABN or chains.why_not_norm(norm) is None
    return known and plain and norm.running_mean is not None and not norm.training


@torch.no_grad()
def _fold(conv: Any, norm: Any) -> None:
    # In float64, so that rounding happens once.
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale *= norm.weight.double()
    shift = -norm.running_mean.double() * scale
    if norm.bias is not None:
        shift += norm.bias.double()
    if conv.bias is not None:
        shift += conv.bias.double() * scale
    weight = conv.weight.double() * scale.reshape(-1, *[1] * (conv.weight.dim() - 1))
    conv.weight = nn.Parameter(weight.to(conv.weight.dtype), conv.weight.requires_grad)
    conv.bias = nn.Parameter(shift.to(conv.weight.dtype), conv.weight.requires_grad)


def _rest(norm: Any) -> nn.Module:
    """What is left to do after a norm was folded."""
    if isinstance(norm, ABN):
        name, parameter = norm.activation, norm.activation_param
    else:
        inner = chains.inner_activation(norm)
        assert inner is not None
        name, parameter = inner
        if name == "identity":
            return nn.Identity()
    return Activated(name, parameter).eval()


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model without numbers."""
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def _kept_bytes(model: nn.Module, example: Any, norms: list[str]) -> tuple[int, dict[str, int]]:
    """Bytes kept for backward in training; and the size of each norm's output."""
    there = on_meta(model).train()
    inputs = tree_map_only(Tensor, lambda t: t.to("meta"), example if isinstance(example, tuple) else (example,))
    sizes: dict[str, int] = {}
    for path in norms:

        def note(module: nn.Module, arguments: Any, output: Any, path: str = path) -> None:
            sizes[path] = output.nbytes

        there.get_submodule(path).register_forward_hook(note)
    try:
        return saved_bytes(there, *inputs).total, sizes
    except Exception:
        # Code that looks at numbers, or has tensors of its own: run it, as it is.
        real = example if isinstance(example, tuple) else (example,)
        if any(isinstance(t, Tensor) and t.is_meta for t in real):
            raise
        there = copy.deepcopy(model).train()
        for path in norms:
            there.get_submodule(path).register_forward_hook(
                lambda module, arguments, output, path=path: sizes.__setitem__(path, output.nbytes)
            )
        return saved_bytes(there, *real).total, sizes

"""A model of plain batch norms to in-place ones and back: :func:`convert`, :func:`revert`, :func:`fuse`.

What is changed in a model: norms become layers of this package that have their very parameters and buffers; an activation
module that only one norm leads to becomes an identity; and where an activation is a function, is shared, or follows a sum, the
module whose code calls it gets a new ``forward`` (:mod:`inplace_abn.rewriting`). Names, tensors, hooks, flags and everybody's
references stay. :func:`revert` takes all of it back.
"""

from __future__ import annotations

import copy
import fnmatch
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from . import chains
from .activations import ACTIVATIONS, SLOPE, resolve
from .chains import IDENTITY, Chain, Phi
from .doctor import columns
from .memory import readable, saved_bytes
from .modules import ABN, InPlaceABN, InPlaceABNSync
from .recompute import recompute, unmark
from .rewriting import Forward, forward_of, rewrite, undo
from .settings import WEIGHT_FLOOR
from .tracing import Section, calls, is_hooked, sections

__all__ = ["Line", "Report", "convert", "fuse", "revert"]

# Activations that keep their own input for backward, beside the output that the next layer keeps.
KEEPS_Y = {name for name, phi in ACTIVATIONS.items() if phi.inverse is None} - {"relu"}


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
        earlier: how many norms had been converted before, and stay so.
    """

    lines: tuple[Line, ...]
    before: int | None = None
    after: int | None = None
    rewritten: tuple[str, ...] = ()
    earlier: int = 0

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
            "converted_before": self.earlier,
            "rewritten": list(self.rewritten),
            "lines": [asdict(line) for line in self.lines],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        head = ("layer", "pattern", "decision", "saved", "reason")
        rows = [
            (line.layer or "(model)", line.pattern, line.decision, readable(line.bytes_saved), line.reason)
            for line in self.lines
        ]
        return "\n".join([*columns(head, rows), self.summary()])

    def summary(self) -> str:
        """The totals in a sentence."""
        text = f"{self.converted} of {len(self.lines)} batch norms converted"
        if self.before is not None and self.after is not None:
            share = self.after / max(self.before, 1)
            text += f"; kept for backward: {readable(self.before)} before, {readable(self.after)} after ({share:.0%})"
        if self.earlier:
            text += f"; {self.earlier} had been converted before: to convert them anew, revert the model first"
        return text


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
    Neither changes the function: outputs in evaluation, without gradients, are the same to the bit (docs/converting.md names
    two exceptions). Whatever would be wrong is left as it is, with a reason in the report: every batch norm has its line.

    The model is changed and returned. Code of rewritten modules (``report.rewritten``) is fixed as it ran at conversion, apart
    for training and evaluation: flags that it reads (``self.aux_logits``) must be set before. Exact activations are computed
    again where the model is called; a part that is called by itself wants a mark of its own, by :func:`inplace_abn.recompute`.
    :func:`revert` undoes everything.

    Args:
        model: any module, in any mode, on any device.
        example: an input, or a tuple of them, for which the report counts bytes. Its shape and dtype are enough, be it on the
            meta device, unless the model's code looks at numbers; then a copy of the model runs. Without one the columns are
            empty.
        relu: what a ReLU becomes: "exact" stays a ReLU; "leaky" is a leaky ReLU of slope 0.01 as in the paper, which needs no
            recomputation; "keep" leaves norms with a ReLU alone.
        residual: take sums into the layers.
        sync: make layers with statistics over all ranks; those of ``SyncBatchNorm`` are in any case.
        preserve: paths of modules to leave alone, with all that is in them; ``*`` and ``?`` match as in file names. An error if
            one is that of no module.
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
    decided, codes = _decide(model, relu, residual, patterns_of(model, preserve), model)
    lines = [d.line for d in decided]
    earlier = sum("_was" in m.__dict__ for m in model.modules() if isinstance(m, InPlaceABN))
    before = after = None
    if example is not None:
        before, maps = _kept_bytes(model, example, [line.layer for line in lines])
        # Of a copy, before anything is changed: should it not run, the model is as it was.
        after, _ = _kept_bytes(model, example, [], lambda copied: _apply(copied, decided, codes, sync))
        for i, d in enumerate(decided):
            size = maps.get(d.line.layer, 0)
            lines[i] = replace(d.line, bytes_saved=size * d.maps_saved, map_bytes=size)
    if not dry_run:
        model = _apply(model, decided, codes, sync)
    return model, Report(tuple(lines), before, after, tuple(codes), earlier)


def patterns_of(model: nn.Module, preserve: Iterable[str]) -> list[str]:
    """The patterns of paths to preserve, or an error if one is that of no module."""
    patterns = [preserve] if isinstance(preserve, str) else list(preserve)
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        if not fnmatch.filter(paths, pattern):
            raise ValueError(f"preserve has {pattern!r}, which is the path of no module; see model.named_modules()")
    return patterns


@dataclass
class _Decision:
    """What to do with one norm, and in whose code."""

    line: Line
    phi: Phi = IDENTITY
    merged: str | None = None
    owner: str | None = None
    maps_saved: int = 0

    def left(self, reason: str) -> _Decision:
        """Nothing, and why."""
        return _Decision(replace(self.line, decision="left", reason=reason), self.phi)


@dataclass
class _Code:
    """New code for a module: of these norms inside of it, called with these optional arguments."""

    norms: tuple[str, ...]
    given: frozenset[str]
    forward: Forward


@dataclass
class _Model:
    """A model as it is read: where its modules are and are called in training, and which are held by other means, too.

    ``numbers`` is a model of the same paths whose γ count.
    """

    root: nn.Module
    numbers: nn.Module
    paths: dict[nn.Module, list[str]]
    called: dict[nn.Module, list[tuple[Section, fx.Node]]]
    failed: dict[str, str]
    outside: set[nn.Module]
    preserve: list[str]
    relu: str
    residual: bool

    def is_preserved(self, path: str) -> bool:
        return any(fnmatch.fnmatch(path, p) or fnmatch.fnmatch(path, f"{p}.*") for p in self.preserve)


def _decide(
    root: nn.Module, relu: str, residual: bool, preserve: list[str], numbers: nn.Module
) -> tuple[list[_Decision], dict[str, _Code]]:
    """What to do with every norm, in the model's order; and, by path, the code that modules get."""
    parts, failed = sections(root)
    paths: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    model = _Model(root, numbers, paths, calls(parts), failed, _held_outside(root), preserve, relu, residual)
    decided: dict[str, _Decision] = {}
    found: dict[str, tuple[Section, Chain]] = {}
    for module, names in paths.items():
        if isinstance(module, _BatchNorm):
            reason = _why_not_read(module, model)
            decided[names[0]] = _Decision(Line(names[0], "bn", "left", reason or ""))
            if reason is None:
                part, node = model.called[module][0]
                found[names[0]] = part, _follow(module, part, node, residual)
    _settle_sums(found)
    for path, (part, chain) in found.items():
        decided[path] = _judge(path, part, chain, model)
    _compare_with_evaluation(model, decided, found)
    codes = _write(model, decided, found)
    _spare(decided, found)
    return list(decided.values()), codes


def _why_not_read(norm: nn.Module, model: _Model) -> str | None:
    """A reason to leave a norm alone that has nothing to do with what follows it."""
    path, *others = model.paths[norm]
    if norm is model.root:
        return "NOTHING_TO_SAVE: nothing follows it"
    if model.is_preserved(path):
        return "PRESERVED"
    if reason := chains.why_not_norm(norm):
        return reason
    if norm not in model.called:
        return _why_not_called(path, model.failed)
    if others or len(model.called[norm]) > 1 or norm in model.outside:
        return "SHARED_MODULE: called in several places, or held in a list"
    _, node = model.called[norm][0]
    if len(node.args) != 1 or node.kwargs:
        return "CALLED_BY_KEYWORD: call it with its input alone"
    return None


def _why_not_called(path: str, failed: Mapping[str, str]) -> str:
    around = [where for where in failed if not where or path == where or path.startswith(where + ".")]
    if not around:
        return "NOT_CALLED: the model's forward does not reach it"
    return f"UNTRACEABLE: {failed[max(around, key=len)]}"


def _held_outside(root: nn.Module) -> set[nn.Module]:
    """Modules in plain lists, tuples and dicts of attributes, from where code may call them."""
    held: set[nn.Module] = set()
    for module in root.modules():
        for name, value in vars(module).items():
            if name != "_modules" and isinstance(value, list | tuple | dict):
                inside = value.values() if isinstance(value, dict) else value
                held |= {m for m in inside if isinstance(m, nn.Module)}
    return held


def _follow(norm: nn.Module, part: Section, node: fx.Node, residual: bool) -> Chain:
    inner = chains.inner_activation(norm)
    assert inner is not None
    return chains.follow(node, part.modules, inner, residual)


def _settle_sums(found: dict[str, tuple[Section, Chain]]) -> None:
    """Of two norms that are added one takes the sum, and the other is its residual: best where all is in the same code."""
    sums: dict[fx.Node, list[str]] = {}
    for path, (_, chain) in found.items():
        if chain.add is not None:
            sums.setdefault(chain.add, []).append(path)
    for rivals in sums.values():
        rivals.sort(key=lambda path: found[path][1].norm.meta["owner"] != found[path][1].last.meta["owner"])
        for path in rivals[1:]:
            part, chain = found[path]
            found[path] = part, chains.follow(chain.norm, part.modules, residuals=False)


def _judge(path: str, part: Section, chain: Chain, model: _Model) -> _Decision:
    """What to do with a norm whose chain is known, as far as training tells."""
    name, parameter = chain.phi
    so_far = _Decision(Line(path, chain.pattern, "left"), chain.phi)
    act = part.modules[str(chain.act.target)] if chain.act is not None and chain.act.op == "call_module" else None
    if act is not None:
        if model.is_preserved(model.paths[act][0]):
            return so_far.left("PRESERVED: its activation")
        if is_hooked(act):
            return so_far.left("HOOKED: a hook watches the activation")
        if act in model.outside:
            return so_far.left("SHARED_MODULE: its activation is held in a list")
    note = ""
    if name == "relu" and model.relu == "keep":
        return so_far.left("KEPT: relu='keep'")
    if name == "relu" and model.relu == "leaky":
        name, parameter, note = "leaky_relu", SLOPE, f"SUBSTITUTED: leaky_relu, slope {SLOPE}, for relu"
    try:
        phi, a = resolve(name, parameter)
    except ValueError as error:
        return so_far.left(f"NOT_INVERTIBLE: {error}")
    if reason := _why_not_safe(path, part, chain, phi.inverse is not None, model):
        return so_far.left(reason)
    is_kept = chains.is_kept_by_readers(chain.last, part.modules)
    if name == "identity" and chain.add is None and not is_kept:
        return so_far.left("NOTHING_TO_SAVE: nobody keeps the output")
    merged = owner = None
    if act is not None and chain.add is None and len(model.called[act]) == len(model.paths[act]) == 1:
        merged = model.paths[act][0]
    elif chain.act is not None or chain.add is not None:
        owner = part.named(str(chain.last.meta["owner"]))
    decision = "recompute" if phi.inverse is None else "in place"
    # x is kept in any case; the output if somebody needs it, be it φ; what φ reads if it needs that.
    saved = int(is_kept or name not in ("identity", *KEEPS_Y)) + int(name in KEEPS_Y)
    return _Decision(Line(path, chain.pattern, decision, note), (phi.name, a), merged, owner, saved)


def _why_not_safe(path: str, part: Section, chain: Chain, in_place: bool, model: _Model) -> str | None:
    """Who writes over what has to stay, or reads what is written over."""
    if editor := chains.reader_that_edits(chain.last, part.modules):
        return f"INPLACE_CONSUMER: {editor} writes over the output"
    if chain.residual is not None:
        r = chains.source(chain.residual, part.modules)
        if editor := chains.reader_that_edits(r, part.modules):
            return f"INPLACE_CONSUMER: {editor} writes over the residual"
    if not in_place:
        return None
    if reason := chains.why_not_overwritten(chain.norm.args[0], part.modules):
        return reason
    weight = model.numbers.get_submodule(path).weight
    if isinstance(weight, Tensor) and not weight.is_meta and bool((weight.detach().abs() < WEIGHT_FLOOR).any()):
        return (
            f"ILL_CONDITIONED: γ within {WEIGHT_FLOOR:g} of zero cannot be divided by; convert after loading weights, or after "
            "a first step"
        )
    return None


def _compare_with_evaluation(
    model: _Model, decided: dict[str, _Decision], found: Mapping[str, tuple[Section, Chain]]
) -> None:
    """Leave norms alone that are followed by something else in evaluation, or whose input is read by others there."""
    parts, failed = sections(model.root, training=False)
    called = calls(parts)
    for path, (_, chain) in found.items():
        d = decided[path]
        if d.line.decision == "left":
            continue
        norm = model.root.get_submodule(path)
        if norm not in called:
            # Not reached in evaluation, which is right, or not seen.
            reason = _why_not_called(path, failed)
            if reason.startswith("UNTRACEABLE"):
                decided[path] = d.left(reason)
            continue
        for part, node in called[norm]:
            there = _follow(norm, part, node, model.residual and chain.add is not None)
            one, other = ((c.phi, c.add is None, c.act and (c.act.op, str(c.act.target))) for c in (there, chain))
            in_place = d.line.decision == "in place"
            if one != other or (in_place and chains.why_not_overwritten(node.args[0], part.modules)):
                decided[path] = d.left("DIFFERS: in evaluation something else follows, or reads its input")


def _write(
    model: _Model, decided: dict[str, _Decision], found: Mapping[str, tuple[Section, Chain]]
) -> dict[str, _Code]:
    """New code of every module that needs it, by path; norms for which there cannot be any are left alone."""
    owners: dict[str, list[str]] = {}
    for path, d in decided.items():
        if d.owner is not None:
            owners.setdefault(d.owner, []).append(path)
    codes: dict[str, _Code] = {}

    def write(owner: str, norms: list[str]) -> str | None:
        """Write it, or say why not."""
        module, part = model.root.get_submodule(owner), found[norms[0]][0]
        given = part.given.get(module, frozenset())
        try:
            inside = tuple(_relative(path, owner) for path in norms)
            forward = forward_of(module, inside, given, [found[path][1].add is not None for path in norms])
        except Exception as error:
            return f"SPLIT: {type(module).__name__} cannot be rewritten: {error}"
        codes[owner] = _Code(inside, given, forward)
        return None

    for owner, norms in owners.items():
        if write(owner, norms) is None:
            continue
        reasons = {path: write(owner, [path]) for path in norms}
        codes.pop(owner, None)
        some = [path for path in norms if reasons[path] is None]
        together = write(owner, some) if some else None
        for path in norms:
            if reason := reasons[path] or together:
                decided[path] = decided[path].left(reason)
    return codes


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


def _apply(model: nn.Module, decided: list[_Decision], codes: Mapping[str, _Code], sync: bool) -> nn.Module:
    """Carry the decisions out on the model."""
    for owner, code in codes.items():
        rewrite(model.get_submodule(owner), code.norms, code.given, code.forward)
    done = [d for d in decided if d.line.decision != "left"]
    for d in done:
        model = _put(model, d.line.layer, _layer(model.get_submodule(d.line.layer), d.phi, sync))
        if d.merged is not None:
            model = _put(model, d.merged, Merged(model.get_submodule(d.merged), d.line.layer))
    if any(d.line.decision == "recompute" for d in done):
        recompute(model)
    return model


def _put(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """The model with another module at this path."""
    if not path:
        return module
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module
    return model


def _layer(norm: Any, phi: Phi, sync: bool) -> ABN:
    """The layer for a batch norm, with its tensors."""
    many = sync or isinstance(norm, nn.SyncBatchNorm)
    options = {"group": getattr(norm, "process_group", None)} if many else {}
    layer = _made_of(norm, InPlaceABNSync if many else InPlaceABN, phi, **options)
    layer.__dict__["_was"] = _shell(norm)
    return layer


def _made_of(norm: Any, kind: type[ABN], phi: tuple[str | None, float], **options: Any) -> ABN:
    """A layer of this kind with the settings and tensors of a norm."""
    shape = (norm.num_features, norm.eps, norm.momentum, False, norm.track_running_stats)
    layer = kind(*shape, activation=phi[0], activation_param=phi[1], device="meta", **options)
    layer.affine = norm.affine
    _hand_over(norm, layer)
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
    made: dict[nn.Module, nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        unmark(module)
        undo(module)
        if isinstance(module, InPlaceABN | Merged):
            if module not in made:
                made[module] = _before(module)
            model = _put(model, path, made[module])
    return model


def _before(module: InPlaceABN | Merged) -> nn.Module:
    was: nn.Module | None = module.__dict__.get("_was")
    if isinstance(module, Merged):
        assert isinstance(was, nn.Module)
        return was.train(module.training)
    if was is None:
        return _made_of(module, ABN, (module.activation, module.activation_param))
    for setting in ("eps", "momentum", "track_running_stats"):
        setattr(was, setting, getattr(module, setting))
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
    model = revert(model)
    parts, _ = sections(model, training=False)
    called, outside = calls(parts), _held_outside(model)
    several = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    folds = []
    for norm, places in called.items():
        part, node = places[0]
        before = chains.source(node.args[0], part.modules) if node.args else None
        if not isinstance(norm, _BatchNorm | ABN) or not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        conv = part.modules[str(before.target)]
        once = all(len(called[m]) == several[m] == 1 and m not in outside for m in (norm, conv))
        alone = once and len(chains.users(before, part.modules)) == 1
        names = (f"{before.target}.", f"{node.target}.")
        read = any(n.op == "get_attr" and str(n.target).startswith(names) for n in part.graph.nodes)
        if alone and not read and _can_take_up(conv, norm):
            folds.append((part.named(str(node.target)), conv, norm))
    for path, conv, norm in folds:
        _fold(conv, norm)
        model = _put(model, path, _rest(norm))
    return model


def _can_take_up(conv: nn.Module, norm: Any) -> bool:
    # Not a linear layer, whose channels are last, wherever a norm's are.
    known = type(conv) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and "forward" not in vars(conv)
    known = known and isinstance(conv._parameters.get("weight"), nn.Parameter) and not is_hooked(conv)
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


def converted_on_meta(model: nn.Module, relu: str, anew: bool = False) -> nn.Module:
    """A copy of the model without numbers, converted as the model itself would be; reverted before, if anew."""
    copied = revert(on_meta(model)) if anew else on_meta(model)
    decided, codes = _decide(copied, relu, True, [], model)
    return _apply(copied, decided, codes, sync=False)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model without numbers."""
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def _kept_bytes(
    model: nn.Module, example: Any, norms: list[str], change: Callable[[nn.Module], nn.Module] = lambda copied: copied
) -> tuple[int, dict[str, int]]:
    """Bytes that a copy of the model, changed, keeps for backward in training; and the size of each norm's output."""
    inputs = example if isinstance(example, tuple) else (example,)
    try:
        return _run(change(on_meta(model)), tree_map_only(Tensor, lambda t: t.to("meta"), inputs), norms)
    except Exception:
        # Code that looks at numbers, or has tensors of its own.
        if any(isinstance(t, Tensor) and t.is_meta for t in tree_leaves(inputs)):
            raise
        return _run(change(copy.deepcopy(model)), inputs, norms)


def _run(model: nn.Module, inputs: tuple[Any, ...], norms: list[str]) -> tuple[int, dict[str, int]]:
    sizes: dict[str, int] = {}
    for path in norms:

        def note(module: nn.Module, arguments: Any, output: Any, path: str = path) -> None:
            sizes[path] = output.nbytes

        model.get_submodule(path).register_forward_hook(note)
    return saved_bytes(model.train(), *inputs).total, sizes

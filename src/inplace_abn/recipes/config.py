"""What a run is made of: settings by dotted names, each with a default and a word of explanation."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..activations import ACTIVATIONS, SLOPE
from ..models import names

__all__ = ["Augment", "Config", "Data", "Loss", "Network", "Optim", "Train", "from_dict", "override", "settings"]

KINDS = ("folder", "idx", "scenes", "pairs", "camvid", "cityscapes", "coco-stuff", "vistas")
NORMS = ("standard", "inplace", "inplace-1", "sync")


def setting(default: Any, text: str, choices: Sequence[str] | None = None) -> Any:
    """A field with its explanation, and what it may be where that is a list."""
    return field(default=default, metadata={"text": text, "choices": choices})


@dataclass(frozen=True)
class Network:
    """What is trained."""

    name: str = setting("resnet18", "one of inplace_abn.models, or small, of nine convolutions", ("small", *names()))
    norm: str = setting("inplace", "batch norm: standard, in place (variant II), variant I, over all ranks", NORMS)
    activation: str = setting("leaky_relu", "behind every norm", tuple(ACTIVATIONS))
    activation_param: float = setting(SLOPE, "slope of leaky ReLU, α of ELU")
    output_stride: int = setting(8, "of a segmentation network's body: 8 or 16")
    body: str = setting("", "file to start the body from: a run's folder, a state dict, or a released file")
    body_scale: str = setting("", "what γ means in that file, if it is not a known one", ("", "signed", "abs+eps"))


@dataclass(frozen=True)
class Data:
    """What it is trained on."""

    kind: str = setting("folder", "how the data lie", KINDS)
    path: str = setting("", "folder of the data; embedded scenes need none")
    validation: str = setting("val", "the part that is evaluated")
    resize: int = setting(
        256, "smallest side of an image before it is cropped, in pixels; 0 leaves it; the height of scenes"
    )
    crop: int = setting(224, "side of the crop that is trained on")
    evaluate_resize: int = setting(256, "smallest side of an image that is evaluated, before its crop; 0 leaves it")
    evaluate_crop: int = setting(
        224, "side of the centre crop of an evaluation; 0 takes the whole image (classification)"
    )
    mean: tuple[float, ...] = setting((0.485, 0.456, 0.406), "subtracted from the channels of an image in [0, 1]")
    std: tuple[float, ...] = setting((0.229, 0.224, 0.225), "which the channels are divided by then")
    workers: int = setting(4, "processes that read; the result does not depend on it")
    cache: bool = setting(False, "decode all training images once and keep them in memory")
    corrupt: str = setting(
        "replace", "of a file that cannot be read: stop, leave it out, take another", ("raise", "skip", "replace")
    )
    corrupt_share: float = setting(0.05, "stop if more than this share of the files cannot be read")
    uniform: bool = setting(False, "draw images and crops uniformly over the classes (segmentation)")
    length: int = setting(0, "embedded scenes to train on; a quarter as many to evaluate")


@dataclass(frozen=True)
class Augment:
    """How a training image is varied."""

    crop: str = setting(
        "plain",
        "anywhere in the image; or of random size and shape, as in Inception (classification)",
        ("plain", "resized"),
    )
    pad: int = setting(0, "pixels of zeros around an image before it is cropped (classification)")
    flip: bool = setting(True, "mirror every other image")
    colour: float = setting(0.4, "spread of saturation, brightness and contrast; 0 for none")
    lighting: float = setting(0.1, "spread along the principal colours of ImageNet; 0 for none")
    scale_low: float = setting(0.7, "smallest random scale (segmentation)")
    scale_high: float = setting(2.0, "largest random scale (segmentation)")


@dataclass(frozen=True)
class Loss:
    """What is minimised: cross-entropy."""

    smoothing: float = setting(0.0, "of the labels (classification)")
    hardest: float = setting(1.0, "share of a crop's pixels that count, those of the largest loss (segmentation)")


@dataclass(frozen=True)
class Optim:
    """The optimizer and its schedule."""

    name: str = setting("sgd", "the optimizer", ("sgd", "adamw"))
    lr: float = setting(0.1, "initial rate, at every batch size")
    momentum: float = setting(0.9, "of SGD")
    nesterov: bool = setting(True, "look ahead (SGD)")
    weight_decay: float = setting(1e-4, "of the optimizer: in the gradient of SGD, of the weights themselves in AdamW")
    decay: str = setting("all", "what decays: all parameters, or not norms and biases", ("all", "weights"))
    schedule: str = setting("step", "how the rate falls", ("step", "linear", "poly", "cosine", "constant"))
    drop_every: int = setting(30, "epochs between two drops (step)")
    drop: float = setting(0.1, "factor of a drop (step)")
    final_lr: float = setting(0.0, "where the rate ends (linear, cosine)")
    power: float = setting(0.9, "of the fall (poly)")
    warmup: float = setting(0.0, "epochs in which the rate rises from 0")
    clip: float = setting(0.0, "largest norm of the gradient; 0 for none")
    ema: float = setting(0.0, "decay of an average of the weights, which is then evaluated; 0 for none")


@dataclass(frozen=True)
class Train:
    """How long, how much at once, and on what."""

    epochs: int = setting(90, "passes over the data")
    batch: int = setting(256, "images of a step, over all ranks")
    world_size: int = setting(1, "ranks this recipe is meant for; unsynchronised statistics depend on it")
    accumulate: int = setting(1, "parts a step's images are computed in, each with statistics of its own")
    seed: int = setting(0, "of weights, order and augmentation")
    dtype: str = setting("float32", "of autocast", ("float32", "bfloat16", "float16"))
    channels_last: bool = setting(True, "layout of maps")
    compile: bool = setting(False, "with torch.compile")
    deterministic: bool = setting(False, "only algorithms that give the same bits each time; slower on a GPU")
    evaluate_every: int = setting(1, "epochs between two evaluations; the last is always evaluated")
    evaluate_batch: int = setting(0, "images at once in evaluation, over all ranks; 0 for as many as in training")
    save_minutes: float = setting(
        10.0, "between two checkpoints; one is written at the end and when the run is told to stop, too"
    )
    keep: int = setting(2, "checkpoints that stay")
    log_every: int = setting(20, "steps between two lines of the log")


@dataclass(frozen=True)
class Config:
    """All of a run's settings."""

    recipe: str
    task: str
    network: Network = field(default_factory=Network)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    loss: Loss = field(default_factory=Loss)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


# Of config.json: counted up whenever a setting comes to mean something else. 2: segmentation heeds sizes and colours.
FORMAT = 2
# What may differ between a run and its continuation.
FREE = {"data.workers", "data.path", "train.save_minutes", "train.keep", "train.log_every", "train.evaluate_batch"}


def sections(config: Config) -> Iterator[tuple[str, Any]]:
    """The parts that have settings."""
    for part in dataclasses.fields(config):
        value = getattr(config, part.name)
        if dataclasses.is_dataclass(value):
            yield part.name, value


def settings(config: Config) -> dict[str, tuple[Any, str]]:
    """Value and explanation of every setting by its dotted name.

    >>> settings(Config("mine", "classification"))["optim.lr"]
    (0.1, 'initial rate, at every batch size')
    """
    found = {}
    for name, section in sections(config):
        for f in dataclasses.fields(section):
            choices = f.metadata["choices"]
            text = f.metadata["text"] + (f"; one of: {', '.join(filter(None, choices))}" if choices else "")
            found[f"{name}.{f.name}"] = (getattr(section, f.name), text)
    return found


def override(config: Config, assignments: Iterable[str]) -> Config:
    """The config with settings replaced, each written "section.name=value".

    >>> override(Config("mine", "classification"), ["optim.lr=0.05"]).optim.lr
    0.05
    """
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        known = settings(config)
        if not equals or name not in known:
            wrong = f"setting {name!r} is unknown" if equals else f"{assignment!r} is not written NAME=VALUE"
            raise ValueError(f"{wrong}; names: {', '.join(known)}")
        part, _, leaf = name.partition(".")
        section = getattr(config, part)
        kind = typing.get_type_hints(type(section))[leaf]
        section = dataclasses.replace(section, **{leaf: _parse(name, text, kind)})
        config = dataclasses.replace(config, **{part: section})
    check(config)
    return config


def _parse(name: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError(f"{name} is {text!r}; it is true or false")
        return text.lower() in ("true", "1", "yes")
    try:
        if typing.get_origin(kind) is tuple:
            return tuple(float(part) for part in text.split(","))
        return kind(text)
    except ValueError:
        wanted = (
            "numbers with commas between them" if isinstance(kind, types.GenericAlias) else f"of type {kind.__name__}"
        )
        raise ValueError(f"{name} is {text!r}; it must be {wanted}") from None


def from_dict(plain: dict[str, Any]) -> Config:
    """The config that :meth:`Config.to_dict` was called on; names that are not known or missing are an error."""
    if not isinstance(plain, dict) or not all(isinstance(v, (dict, str)) for k, v in plain.items() if k != "format"):
        raise ValueError("the config is not one of a run: settings by section are expected")
    if plain.get("format") != FORMAT:
        raise ValueError(
            f"the config has format {plain.get('format', 1)}, in which settings mean something else; this version reads {FORMAT}"
        )
    parts: dict[str, Any] = {"recipe": plain.get("recipe", ""), "task": plain.get("task", "")}
    for name, section in sections(Config("", "")):
        given = dict(plain.get(name, {}))
        expected = {f.name for f in dataclasses.fields(section)}
        if given.keys() != expected:
            raise ValueError(
                f"the config's {name!r} lacks {sorted(expected - given.keys())} and has {sorted(given.keys() - expected)} beyond "
                "what this version knows; it was written by another version"
            )
        parts[name] = type(section)(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    config = Config(**parts)
    check(config)
    return config


def check(config: Config) -> None:
    """Raise ValueError where a value cannot be meant."""
    for name, section in sections(config):
        for f in dataclasses.fields(section):
            value, choices = getattr(section, f.name), f.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(f"{name}.{f.name} is {value!r}; one of: {', '.join(c or 'nothing' for c in choices)}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}.{f.name} is {value}; it must be finite")
            if isinstance(value, (int, float)) and value < 0 and f.name != "seed":
                raise ValueError(f"{name}.{f.name} is {value}; it must not be negative")
    for name, value in (
        ("train.epochs", config.train.epochs),
        ("train.batch", config.train.batch),
        ("train.accumulate", config.train.accumulate),
        ("train.log_every", config.train.log_every),
        ("train.evaluate_every", config.train.evaluate_every),
        ("train.keep", config.train.keep),
        ("train.world_size", config.train.world_size),
        ("data.crop", config.data.crop),
        ("optim.drop_every", config.optim.drop_every),
        ("loss.hardest", config.loss.hardest),
    ):
        if value <= 0:
            raise ValueError(f"{name} is {value}; it must be positive")
    if config.loss.smoothing >= 1:
        raise ValueError(f"loss.smoothing is {config.loss.smoothing}; it is a share, below 1")
    if config.data.kind == "scenes" and config.data.resize < 8:
        raise ValueError(f"data.resize is {config.data.resize}; scenes are drawn 8 pixels high at least")
    if config.loss.hardest > 1:
        raise ValueError(f"loss.hardest is {config.loss.hardest}; it is a share, at most 1")
    if config.network.output_stride not in (8, 16):
        raise ValueError(f"network.output_stride is {config.network.output_stride}; it is 8 or 16")
    if not 0 < config.augment.scale_low <= config.augment.scale_high:
        raise ValueError(
            f"augment.scale_low is {config.augment.scale_low}; it must be positive and at most augment.scale_high, "
            f"{config.augment.scale_high}"
        )
    if len(config.data.mean) != 3 or len(config.data.std) != 3:
        raise ValueError(
            f"data.mean and data.std have 3 numbers each, not {len(config.data.mean)} and {len(config.data.std)}"
        )


def to_json(config: Config) -> str:
    """For the run's folder."""
    return json.dumps(config.to_dict(), indent=2)

"""``inplace-abn``: info, convert, plan, export, doctor, recipes, train, evaluate, predict.

Models are named ``torchvision:resnet50``, ``timm:resnet50``, or ``module:callable`` for one's own code, which is imported from
the current directory and called without arguments.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import json
import platform
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXTRA = "the command line needs rich: pip install 'inplace_abn[cli]'"
DTYPES = ("float32", "bfloat16", "float16")


class Mistake(Exception):
    """Something the user can put right."""


def parser() -> argparse.ArgumentParser:
    """What can be typed. Made without importing torch."""
    top = argparse.ArgumentParser(
        prog="inplace-abn", description="Half the activation memory of convolutional networks."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    def of_model(sub: argparse.ArgumentParser, shape: str | None) -> None:
        sub.add_argument("model", help="torchvision:NAME, timm:NAME, or module:callable")
        sub.add_argument("--weights", type=Path, metavar="FILE", help="state dict to load: .pt, .pth or .safetensors")
        if shape is not None:
            sub.add_argument("--input", default=shape, metavar="N,C,H,W", help=f"shape of a batch (default {shape})")

    def of_device(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--device", metavar="NAME", help="cuda, cuda:1, cpu (default: a GPU where there is one)")

    def of_views(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--scales", default="1", metavar="S,S", help="of images to segment, such as 0.7,1,1.2")
        sub.add_argument("--flip", action="store_true", help="segment the mirror image, too")

    command("info", "Show the environment, which backend runs, and why.")
    sub = command("convert", "Convert a model and report norm by norm what it saves.")
    of_model(sub, "8,3,224,224")
    sub.add_argument("--relu", choices=("exact", "leaky", "keep"), default="exact", help="what a ReLU becomes")
    sub.add_argument("--no-residual", action="store_true", help="leave sums outside of the layers")
    sub.add_argument("--preserve", nargs="+", default=[], metavar="PATH", help="modules to leave alone")
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    sub.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page with a chart")
    sub = command("plan", "Forecast the memory of a training step, without a GPU.")
    of_model(sub, "32,3,224,224")
    sub.add_argument("--memory", metavar="SIZE", help="of the card, such as 24GB: search the largest batch and crop")
    sub.add_argument("--dtype", choices=DTYPES, default="float32", help="what maps are stored in")
    sub.add_argument("--optimizer-states", type=int, default=1, metavar="N", help="1 for SGD with momentum, 2 for Adam")
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the plan as JSON")
    sub = command("export", "Write a model as ONNX for inference.")
    of_model(sub, "1,3,224,224")
    sub.add_argument("file", type=Path, help="where to, such as model.onnx")
    sub.add_argument("--fused", action="store_true", help="fold batch norms into the convolutions")
    sub = command("doctor", "Estimate how well each layer of a converted model can be inverted.")
    of_model(sub, None)
    sub.add_argument("--dtype", choices=DTYPES, default="float32", help="what maps are stored in")
    sub.add_argument("--relu", choices=("exact", "leaky", "keep"), default="leaky", help="what a ReLU becomes")
    sub = command("recipes", "List the training recipes, or the settings of one.")
    sub.add_argument("recipe", nargs="?", help="its settings, with what they mean")
    sub = command("train", "Train a recipe; stopped at any moment, it goes on with --resume.")
    sub.add_argument("recipe", help="its name; inplace-abn recipes lists them")
    sub.add_argument("--data", metavar="FOLDER", help="short for --set data.path=FOLDER")
    sub.add_argument("--body", metavar="FILE", help="short for --set network.body=FILE: weights to start from")
    sub.add_argument("--out", type=Path, metavar="FOLDER", help="of the run (default runs/RECIPE)")
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a setting; inplace-abn recipes RECIPE lists them",
    )
    sub.add_argument("--resume", action="store_true", help="go on with the run in --out")
    of_device(sub)
    sub.add_argument("--find-batch-size", action="store_true", help="forecast the largest batch that fits, and stop")
    sub.add_argument("--memory", metavar="SIZE", help="of the device, such as 24GB, for --find-batch-size")
    sub = command("evaluate", "Score a run on its validation data.")
    sub.add_argument("run", type=Path, help="folder of the run")
    sub.add_argument("--data", metavar="FOLDER", help="where the data lie now")
    sub.add_argument(
        "--view", default="centre", help="of an image to classify: centre, ten (crops), or 320 (a larger centre)"
    )
    of_views(sub)
    sub.add_argument("--activation", metavar="NAME", help="behind the norms instead of the one that was trained with")
    sub.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting")
    of_device(sub)
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the scores as JSON")
    sub = command("predict", "Segment a folder of images with a run, or with the released Vistas network.")
    sub.add_argument("source", type=Path, help="folder of a run, or the released file, with --vistas")
    sub.add_argument("images", type=Path, help="an image, or a folder of them")
    sub.add_argument("out", type=Path, help="folder for the results")
    sub.add_argument(
        "--vistas", type=Path, metavar="FILE", help="config.json of Mapillary Vistas: its classes and colours"
    )
    kinds = ("palette", "raw", "prob")
    sub.add_argument("--output", choices=kinds, default="palette", help="colours, class numbers, or confidences, too")
    of_views(sub)
    sub.add_argument("--fusion", choices=("mean", "voting", "max"), default="mean", help="of several views")
    sub.add_argument("--longest", type=int, metavar="PIXELS", help="side to bring images to (default 2048 for Vistas)")
    sub.add_argument("--tile", type=int, default=0, metavar="PIXELS", help="predict in tiles, for large images")
    of_device(sub)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command: 0, or 1 after an error, which is told in a line."""
    given = parser().parse_args(arguments)
    try:
        import rich  # noqa: F401
    except ImportError:
        print(EXTRA, file=sys.stderr)
        return 1
    commands = (info, convert, plan, export, doctor, recipes, train, evaluate, predict)
    try:
        {run.__name__: run for run in commands}[given.command](given)
    except Mistake as error:
        print(f"inplace-abn: {error}", file=sys.stderr)
        return 1
    return 0


def show(head: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """A table, as wide as it needs to be where it goes to a file."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console = Console()
    Console(width=None if console.is_terminal else 200).print(table)


def _package() -> Any:
    """Torchvision, which timm needs, too."""
    from . import outside

    try:
        return outside.torchvision()
    except ImportError as error:
        raise Mistake(str(error)) from error


def load(name: str, weights: Path | None = None) -> Any:
    """The model of this name."""
    from torch import nn

    from . import checkpoints

    source, _, rest = name.partition(":")
    if not rest:
        raise Mistake(f"model {name!r}: write torchvision:NAME, timm:NAME, or module:callable")
    if source == "torchvision":
        torchvision = _package()
        options: dict[str, Any] = {"weights": None}
        try:
            builder = torchvision.models.get_model_builder(rest)
        except ValueError as error:
            raise Mistake(f"torchvision has no model {rest!r}; see torchvision.models.list_models()") from error
        # Not from a hub: of detection and segmentation, the backbone's weights, too.
        if "weights_backbone" in inspect.signature(builder).parameters:
            options["weights_backbone"] = None
        if rest in ("googlenet", "inception_v3"):
            options["init_weights"] = True
        model = builder(**options)
    elif source == "timm":
        _package()
        try:
            timm: Any = importlib.import_module("timm")
        except ModuleNotFoundError as error:
            raise Mistake(f"{error}: pip install timm") from error
        try:
            model = timm.create_model(rest)
        except RuntimeError as error:
            raise Mistake(f"timm has no model {rest!r}; see timm.list_models()") from error
    else:
        model = _own(source, rest)
    if not isinstance(model, nn.Module):
        raise Mistake(f"{name} gives {type(model).__name__}, not an nn.Module")
    if weights is not None:
        try:
            checkpoints.load(model, weights, scale="signed")
        except (OSError, ValueError, RuntimeError) as error:
            raise Mistake(str(error)) from error
    return model


def _own(source: str, name: str) -> Any:
    """What a function of the user's own gives; its errors are the user's, and come with their place."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise Mistake(f"model '{source}:{name}': {error}") from error
        made = getattr(module, name, None)
        if made is None:
            raise Mistake(f"model '{source}:{name}': {source} has no {name!r}")
        try:
            inspect.signature(made).bind()
        except (TypeError, ValueError) as error:
            raise Mistake(f"model '{source}:{name}' must be callable without arguments: {error}") from error
        # It may import more from here.
        return made()
    finally:
        sys.path.remove(here)


@contextmanager
def running(given: argparse.Namespace) -> Iterator[None]:
    """While a model runs on a batch of the shape that was given, or the default one, which need not suit it."""
    try:
        yield
    except Mistake:
        raise
    except Exception as error:
        said, last = (
            (str(error).strip() or "no more is said").splitlines()[0],
            traceback.extract_tb(error.__traceback__)[-1],
        )
        raise Mistake(
            f"{given.model} does not run on a batch of shape {given.input}: {type(error).__name__}: {said} "
            f"({Path(last.filename).name}, line {last.lineno}). --input gives another shape; models of several inputs are "
            "converted in Python, by inplace_abn.convert"
        ) from error


def shape_of(text: str) -> tuple[int, ...]:
    """Numbers out of "8,3,224,224"."""
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if len(shape) < 2 or min(shape) < 1:
        raise Mistake(f"--input {text!r}: write the shape of a batch, such as 8,3,224,224")
    return shape


def info(given: argparse.Namespace) -> None:
    """The environment."""
    import torch

    import inplace_abn

    try:
        import triton

        has_triton = str(triton.__version__)
    except ImportError:
        has_triton = "not installed"
    if torch.cuda.is_available():
        where = [f"{torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
        backend = (
            "Triton kernels on GPU tensors" if has_triton != "not installed" else "plain torch: triton is not installed"
        )
    else:
        where, backend = ["none that torch can use"], "plain torch: there is no GPU"
    rows = [
        ("inplace_abn", inplace_abn.__version__),
        ("python", platform.python_version()),
        ("system", platform.platform()),
        ("torch", torch.__version__),
        ("triton", has_triton),
        ("CUDA of torch", str(torch.version.cuda)),
        ("GPUs", ", ".join(where)),
        ("backend", backend),
        ("threads", str(torch.get_num_threads())),
    ]
    for name in ("torchvision", "timm", "onnx", "onnxruntime", "safetensors"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        rows.append((name, version))
    show(("", ""), rows)


def convert(given: argparse.Namespace) -> None:
    """The report."""
    import torch

    from . import conversion, pages
    from .memory import readable

    model = load(given.model, given.weights)
    example = torch.empty(shape_of(given.input), device="meta")
    try:
        preserve = conversion.patterns_of(model, given.preserve)
    except ValueError as error:
        raise Mistake(str(error)) from error
    options = {"relu": given.relu, "residual": not given.no_residual, "preserve": preserve}
    with running(given):
        _, report = conversion.convert(model, example=example, dry_run=True, **options)
    rows = [
        (line.layer or "(model)", line.pattern, line.decision, readable(line.bytes_saved), line.reason)
        for line in report.lines
    ]
    show(("layer", "pattern", "decision", "saved", "reason"), rows, given.model)
    print(report.summary())
    if given.json is not None:
        write(given.json, report.to_json())
    if given.html is not None:
        write(given.html, pages.page(report, f"{given.model}, {given.input}"))


def write(path: Path, text: str) -> None:
    """To a file, and say so."""
    try:
        path.write_text(text)
    except OSError as error:
        raise Mistake(f"cannot write {path}: {error.strerror}") from error
    print(path)


def plan(given: argparse.Namespace) -> None:
    """The forecast."""
    import torch
    from rich.console import Console

    from . import planning

    model = load(given.model, given.weights)
    shape = shape_of(given.input)
    if given.optimizer_states < 0:
        raise Mistake(f"--optimizer-states {given.optimizer_states}: 0 or more for each parameter")
    try:
        memory = None if given.memory is None else planning.size_in_bytes(given.memory)
    except ValueError as error:
        raise Mistake(str(error)) from error
    with Console(stderr=True).status("planning") as status, running(given):
        forecast = planning.plan(
            model,
            shape,
            memory,
            dtype=getattr(torch, given.dtype),
            optimizer_states=given.optimizer_states,
            progress=lambda text: status.update(text),
        )
    print(forecast)
    if given.json is not None:
        write(given.json, json.dumps(forecast.to_dict(), indent=2))


def export(given: argparse.Namespace) -> None:
    """An ONNX file, and how near its outputs are."""
    import torch
    from torch.utils._pytree import tree_leaves

    from . import conversion

    model = load(given.model, given.weights).eval()
    x = torch.randn(shape_of(given.input), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), running(given):
        want = model(x)
    model = conversion.fuse(model) if given.fused else conversion.revert(model)
    try:
        # Optimising folds batch norms, too.
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False, optimize=given.fused)
    except ImportError as error:
        raise Mistake(f"{error}: pip install 'inplace_abn[export]'") from error
    assert program is not None
    try:
        program.save(given.file)
    except OSError as error:
        raise Mistake(f"cannot write {given.file}: {error.strerror}") from error
    print(given.file)
    try:
        got = program(x)
    except ImportError:
        print("not compared: onnxruntime is not installed")
        return
    wanted = [t for t in tree_leaves(want) if isinstance(t, torch.Tensor)]
    if len(got) != len(wanted):
        print(f"not compared: {len(got)} outputs in the file, {len(wanted)} of the model")
        return
    furthest = max(float((mine - theirs).abs().max()) for mine, theirs in zip(got, wanted, strict=True))
    print(f"largest difference of onnxruntime's outputs: {furthest:.1e}")


def doctor(given: argparse.Namespace) -> None:
    """The table of conditioning."""
    import torch

    from . import conversion
    from .doctor import doctor as examine

    model, report = conversion.convert(load(given.model, given.weights), relu=given.relu)
    print(examine(model, getattr(torch, given.dtype)))
    print(report.summary())


def recipes(given: argparse.Namespace) -> None:
    """The recipes, one per line, or what one of them is made of."""
    from .recipes import named, names
    from .recipes.config import settings

    if given.recipe is None:
        if not sys.stdout.isatty():
            print("\n".join(names()))
            return
        every = [named(name) for name in names()]
        rows = [
            (c.recipe, c.network.name, c.network.norm, c.data.kind, f"{c.train.batch} × {c.data.crop}²") for c in every
        ]
        show(("recipe", "network", "norm", "data", "batch × crop"), rows)
        return
    try:
        config = named(given.recipe)
    except ValueError as error:
        raise Mistake(str(error)) from error
    show(
        ("setting", "value", "meaning"), [(name, str(value), text) for name, (value, text) in settings(config).items()]
    )


def train(given: argparse.Namespace) -> None:
    """A run from its beginning or its last checkpoint to its end."""
    import torch

    from .planning import size_in_bytes
    from .recipes import loop, named, processes, sizing, task_of
    from .recipes.config import override

    try:
        changes = [f"data.path={given.data}"] if given.data else []
        changes += [f"network.body={given.body}"] if given.body else []
        config = override(named(given.recipe), [*changes, *given.set])
        task = task_of(config)
        device = _device(given.device)
        if given.find_batch_size:
            memory = size_in_bytes(given.memory) if given.memory else _memory(device)
            print(sizing.advice(config, task, _class_count(config, task), memory, processes.world_size()))
            return
        folder = given.out or Path("runs") / config.recipe
        try:
            scores = loop.train(config, task, folder, resume=given.resume, device=device)
        except torch.OutOfMemoryError as error:
            table = sizing.advice(config, task, _class_count(config, task), _memory(device), processes.world_size())
            raise Mistake(f"out of memory: {str(error).splitlines()[0]}\n\n{table}") from error
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        raise Mistake(_plainly(error)) from error
    if processes.rank() == 0:
        _print_scores(scores)


def _device(name: str | None) -> Any:
    """By its name; None for what there is."""
    import torch

    try:
        return torch.device(name) if name else None
    except RuntimeError as error:
        raise Mistake(f"--device {name}: {str(error).splitlines()[0]}") from error


def _plainly(error: Exception) -> str:
    """What an error says, without the traceback of the worker that it comes from."""
    text = str(error).strip()
    return text.splitlines()[-1].partition(": ")[2] if "Original Traceback" in text else text


def _class_count(config: Any, task: Any) -> int:
    """Of the data; of ImageNet or Vistas where there are none yet."""
    try:
        return len(task.samples(config, "val").classes)
    except ValueError:
        return 1000 if config.task == "classification" else 65


def _memory(device: Any) -> int:
    """Of the device, in bytes."""
    import torch

    if (device is None or device.type == "cuda") and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device or 0).total_memory)
    raise Mistake("this device's memory is not known: give --memory, such as --memory 24GB")


def _print_scores(scores: dict[str, float]) -> None:
    show(("score", "value"), [(name, f"{value:.4f}") for name, value in scores.items()])


def evaluate(given: argparse.Namespace) -> None:
    """Scores of a run's last checkpoint."""
    from .recipes import evaluation, processes, task_of
    from .recipes.config import Config, override
    from .recipes.files import write_png

    changes = [f"data.path={given.data}"] if given.data else []
    changes += [f"network.activation={given.activation}"] if given.activation else []

    def change(config: Config) -> Config:
        return override(config, [*changes, *given.set])

    try:
        scales = _scales(given.scales)
        with processes.Ranks(_device(given.device)) as ranks:
            config, model, _ = evaluation.restored(given.run, task_of, ranks.device, change)
            task = task_of(config, given.view, scales, given.flip)
            val = task.samples(config, "val")
            scores = evaluation.evaluate(config, task, model, val, ranks)
    except (ValueError, OSError, ImportError) as error:
        raise Mistake(_plainly(error)) from error
    if ranks.rank:
        # The first one speaks for all.
        return
    _print_scores(scores)
    shown = evaluation.picture(config, task, model, val, ranks.device)
    if shown is not None:
        write_png(shown, given.run / "evaluation.png")
        print(given.run / "evaluation.png")
    if given.json is not None:
        write(given.json, json.dumps(scores, indent=2))


def _scales(text: str) -> list[float]:
    """Of the images that are segmented."""
    try:
        scales = [float(part) for part in text.split(",")]
    except ValueError:
        scales = []
    if not scales or not all(0 < scale <= 8 for scale in scales):
        raise ValueError(f"--scales {text!r}: numbers above 0, at most 8, with commas between them, such as 0.7,1,1.2")
    return scales


def predict(given: argparse.Namespace) -> None:
    """Label files for images."""
    from rich.progress import track

    from .recipes import prediction, processes
    from .recipes.segmentation import Segmentation

    try:
        scales = _scales(given.scales)
        # Files are shared among ranks, which have nothing to tell each other.
        rank, count, device = processes.rank(), processes.world_size(), processes.own_device(_device(given.device))
        predictor = prediction.load(given.source, given.vistas, device)
        if given.longest is not None:
            predictor.longest, predictor.smallest = given.longest, 0
        paths = prediction.images_in(given.images)
        if given.out.resolve() in {path.parent.resolve() for path in paths}:
            raise ValueError(f"{given.out} holds the images themselves; choose another folder for the results")
        twice = sorted(stem for stem, count in Counter(path.stem for path in paths).items() if count > 1)
        if twice:
            raise ValueError(f"results would have the same name: {', '.join(twice[:5])}")
        if given.tile < 0 or given.tile % 32 or predictor.longest < 0:
            raise ValueError("--tile and --longest are numbers of pixels, 0 for none; tiles are multiples of 32")
        given.out.mkdir(parents=True, exist_ok=True)
        task = Segmentation(given.tile)
        own = paths[rank::count]
        for path in track(own, description="predicting", disable=bool(rank) or not sys.stderr.isatty()):
            classes, sure = predictor(path, scales, given.flip, given.fusion, task)
            prediction.write(given.out / path.stem, classes, sure, given.output, predictor.labels)
    except (ValueError, OSError, ImportError) as error:
        raise Mistake(str(error)) from error
    print(f"{len(own)}{f' of {len(paths)}' if count > 1 else ''} predictions in {given.out}")


if __name__ == "__main__":
    sys.exit(main())

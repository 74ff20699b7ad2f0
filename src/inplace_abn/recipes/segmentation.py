"""Semantic segmentation: the cells of the paper's Tables 3 and 4 by name, recipes for real machines, and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import deeplabv3
from . import pixels
from .building import norm_act, start_body
from .classes import Classes
from .config import Augment, Config, Data, Loss, Network, Optim, Train
from .losses import bootstrapped
from .metrics import confusion, ious, mean_iou, pixel_accuracy
from .small import Small

__all__ = ["RECIPES", "Segmentation", "fused", "predicted", "tiled"]


# Samples of a contact sheet, and the most pixels across.
SHOWN, WIDEST = 6, 1800
# What a tile sees beyond its edges, in pixels, and the smallest tile.
MARGIN, LEAST = 128, 64


class Segmentation:
    """A class for every pixel. Networks give logits at their own stride, which are upsampled where they are needed.

    Args:
        tile: side of the tiles that images are evaluated in, a multiple of 32; 0 for whole images. Where the memory does not
            suffice for a single image, it is cut into tiles, or smaller ones, and so are all from then on.
        scales: of an image in an evaluation. Of several views, the mean of their probabilities decides.
        flip: evaluate the mirror image as well, at every scale.
    """

    def __init__(self, tile: int = 0, scales: Sequence[float] = (1.0,), flip: bool = False) -> None:
        self.tile, self.scales, self.flip = tile, tuple(scales), flip

    def build(self, config: Config, classes: int) -> nn.Module:
        """DeepLabV3 on the network, its body from a file if the config names one."""
        if config.network.name == "small":
            if config.network.body:
                raise ValueError("network.body: the small network has no body to load; choose another network.name")
            return Small(classes, norm_act(config.network), pixels=True)
        stride = config.network.output_stride
        model = deeplabv3(config.network.name, classes, norm_act(config.network), stride, upsample=False)
        start_body(model.body, config.network)
        return model

    def samples(self, config: Config, split: str) -> pixels.Pixels:
        """Images and labels."""
        return pixels.segmentation(config, split)

    def loss(self, config: Config, output: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of the hardest pixels."""
        return bootstrapped(output, targets, config.loss.hardest)

    @torch.no_grad()
    def output(self, model: nn.Module, x: Tensor, say: Callable[[str], None]) -> Tensor:
        """Logits at the network's stride; of several views, mean probabilities at the image's size."""
        if self.scales == (1.0,) and not self.flip:
            return self.logits(model, x, say)
        # One image at a time, added up where they stay: probabilities of its size are large.
        total: Tensor | None = None
        for i, image in enumerate(x.split(1)):
            for seen in views(lambda view: self.logits(model, view, say), image, self.scales, self.flip):
                total = seen.new_zeros(len(x), *seen.shape[1:]) if total is None else total
                total[i] += seen[0]
        assert total is not None
        return total.div_(len(self.scales) * (1 + self.flip))

    @torch.no_grad()
    def logits(self, model: nn.Module, x: Tensor, say: Callable[[str], None]) -> Tensor:
        """At the network's stride, of the whole or out of tiles."""
        try:
            logits: Tensor = tiled(model, x, self.tile, MARGIN) if self.tile else model(x)
            return logits
        except torch.OutOfMemoryError:
            smaller = self._smaller(max(x.shape[2:]))
            if len(x) == 1 and not smaller:
                raise
        # Out of the handler, whose exception holds on to what the network had computed.
        if len(x) > 1:
            return torch.cat([self.logits(model, part, say) for part in x.chunk(2)])
        self.tile = smaller
        say(f"images of {x.shape[3]}×{x.shape[2]} pixels do not fit into the memory: in tiles of {self.tile}² now")
        return self.logits(model, x, say)

    def _smaller(self, side: int) -> int:
        """The next tile that makes an image of this side smaller, margins included; 0 if there is none."""
        tile = self.tile or side
        while tile > LEAST:
            tile = max(LEAST, -(-tile // 2 // LEAST) * LEAST)
            if tile + 2 * MARGIN < side:
                return tile
        return 0

    def nothing(self, classes: int) -> Tensor:
        """The counts of no pixel."""
        return torch.zeros(classes, classes, dtype=torch.long)

    def counts(self, output: Tensor, targets: Tensor, classes: int) -> Tensor:
        """Pixels by true and predicted class."""
        # One image at a time: upsampled logits are large.
        each = [_argmax(one[None], label.shape) for one, label in zip(output, targets, strict=True)]
        return confusion(torch.cat(each).flatten(), targets.flatten().long(), classes)

    def scores(self, counts: Tensor, classes: Sequence[str]) -> dict[str, float]:
        """Mean IoU over the classes that occur in labels or predictions, the share of right pixels, and every class's IoU."""
        each = ious(counts)
        named = {f"iou/{name}": float(value) for name, value in zip(classes, each, strict=True) if value == value}
        return {"miou": mean_iou(counts), "pixel_accuracy": pixel_accuracy(counts), **named}

    def picture(self, samples: pixels.Pixels, predict: Callable[[Tensor], Tensor]) -> Tensor:
        """Image, labels and prediction of the first few samples, a row each."""
        rows = []
        for draw in samples.order(0, 0)[:SHOWN]:
            image, label, _ = samples[draw]
            if image is None or not isinstance(label, Tensor):
                continue
            guess = _argmax(predict(image[None]), label.shape)[0]
            image = pixels.resampled(image, label.shape)
            rows.append(torch.cat([image, coloured(label, samples.labels), coloured(guess, samples.labels)], 2))
        return sheet(rows)


def coloured(label: Tensor, classes: Classes) -> Tensor:
    """Classes as colours, void black: uint8 of shape (3, H, W)."""
    palette = torch.zeros(256, 3, dtype=torch.uint8)
    palette[: len(classes.colours)] = torch.tensor(classes.colours, dtype=torch.uint8)
    return palette[label.cpu().long()].permute(2, 0, 1)


def sheet(rows: Sequence[Tensor]) -> Tensor:
    """Pictures of shape (3, h, w) below each other, narrower ones padded with black; large ones are thinned out."""
    if not rows:
        return torch.zeros(3, 1, 1, dtype=torch.uint8)
    small = [row[:, :: max(1, -(-row.shape[2] // WIDEST)), :: max(1, -(-row.shape[2] // WIDEST))] for row in rows]
    width = max(row.shape[2] for row in small)
    return torch.cat([F.pad(row, [0, width - row.shape[2]]) for row in small], 1)


def _argmax(logits: Tensor, size: Sequence[int]) -> Tensor:
    return F.interpolate(logits, tuple(size), mode="bilinear", align_corners=False).argmax(1)


def tiled(model: nn.Module, x: Tensor, tile: int, margin: int) -> Tensor:
    """Logits at the network's stride, computed tile by tile: of each, with ``margin`` pixels around it, the middle is taken.

    Both are multiples of the network's stride, so that a tile is sampled as the whole is. The same as of the whole image wherever
    the network looks no further than the margin; global pooling sees a tile only.
    """
    # Sides that are no multiple of it are rounded up or down, as the network likes.
    stride = LEAST // model(x.new_zeros(1, x.shape[1], LEAST, LEAST)).shape[3]
    rows: list[Tensor] = []
    for top in range(0, x.shape[2], tile):
        columns: list[Tensor] = []
        for left in range(0, x.shape[3], tile):
            first, start = max(0, top - margin), max(0, left - margin)
            part = x[:, :, first : top + tile + margin, start : left + tile + margin]
            logits = model(part)
            above, before, side = (top - first) // stride, (left - start) // stride, tile // stride
            columns.append(logits[:, :, above : above + side, before : before + side])
        rows.append(torch.cat(columns, 3))
    return torch.cat(rows, 2)


@torch.no_grad()
def predicted(
    logits_of: Callable[[Tensor], Tensor],
    x: Tensor,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
    fusion: str = "mean",
) -> tuple[Tensor, Tensor]:
    """Classes and confidences, of shape (N, H, W), over an image at several scales, mirrored or not.

    Args:
        logits_of: the network, whose logits have any stride.
        x: prepared images (N, 3, H, W).
        scales: of the image, before the network sees it.
        flip: look at the mirror image as well, at every scale.
        fusion: "mean" of the probabilities; "voting", where every view has a vote for each pixel and summed probabilities decide
            between equals; "max", the view that is most confident.
    """
    return fused(list(views(logits_of, x, scales, flip)), fusion)


def views(logits_of: Callable[[Tensor], Tensor], x: Tensor, scales: Sequence[float], flip: bool) -> Iterator[Tensor]:
    """Probabilities (N, C, H, W) by every view of images x, at their size; the arguments are those of :func:`predicted`."""
    for scale in scales:
        size = [max(1, round(scale * side)) for side in x.shape[2:]]
        at = x if scale == 1 else F.interpolate(x, size, mode="bilinear", align_corners=False)
        for mirrored in (False, True) if flip else (False,):
            logits = logits_of(at.flip(3) if mirrored else at).float()
            logits = F.interpolate(logits, x.shape[2:], mode="bilinear", align_corners=False)
            yield (logits.flip(3) if mirrored else logits).softmax(1)


def fused(views: Sequence[Tensor], fusion: str) -> tuple[Tensor, Tensor]:
    """Class and confidence of every pixel out of several views' probabilities (N, C, H, W).

    >>> one, two = torch.tensor([0.6, 0.4]), torch.tensor([0.1, 0.9])
    >>> fused([v.view(1, 2, 1, 1) for v in (one, one, two)], "voting")[0].item()
    0
    """
    if fusion == "mean":
        best = (sum(views[1:], views[0]) / len(views)).max(1)
        return best.indices, best.values
    if fusion == "max":
        sure = torch.stack([view.max(1).values for view in views])
        most = sure.max(0)
        classes = torch.stack([view.argmax(1) for view in views]).gather(0, most.indices[None])[0]
        return classes, most.values
    if fusion == "voting":
        total = sum(views[1:], views[0])
        votes = sum(
            (F.one_hot(view.argmax(1), view.shape[1]).movedim(-1, 1) for view in views), torch.zeros_like(views[0])
        )
        # Probabilities sum to less than one vote after the division, and decide only between equals.
        chosen = (votes + total / (total.max() + 1) / 2).argmax(1)
        return chosen, (total / len(views)).gather(1, chosen[:, None])[:, 0]
    raise ValueError(f"fusion {fusion!r} is unknown; one of: mean, voting, max")


# The paper's protocol (§4.2): four cards; crops are those of all of them. No auxiliary loss; the hardest quarter of the pixels.
_OPTIM = Optim(lr=2.5e-3, nesterov=False, schedule="poly", power=0.9)
_AUGMENT = Augment(flip=True, colour=0.0, lighting=0.0, scale_low=0.7, scale_high=2.0)
_EPOCHS = {"cityscapes": 360, "coco-stuff": 30, "vistas": 90}
_NETWORKS = {"resnext101": "resnext101", "resnext152": "resnext152", "wide-resnet38": "wide_resnet38_a2"}


def _paper(kind: str, network: str, norm: str, crops: int, crop: int, uniform: bool = False) -> Config:
    name = f"{kind}-{network}-{norm}-{crops}x{crop}{'-uniform' if uniform else ''}"
    return Config(
        name,
        "segmentation",
        Network(_NETWORKS[network], norm),
        Data(kind, resize=0, crop=crop, evaluate_resize=0, workers=8, uniform=uniform),
        _AUGMENT,
        Loss(hardest=0.25),
        replace(_OPTIM, lr=3.5e-3) if kind == "vistas" else _OPTIM,
        Train(epochs=_EPOCHS[kind], batch=crops, world_size=4, evaluate_every=10, evaluate_batch=4),
    )


# Table 3: standard, in place with more crops, in place with larger crops, synchronised.
_TABLE_3: dict[tuple[str, str], tuple[tuple[str, int, int], ...]] = {
    ("cityscapes", "resnext101"): (
        ("standard", 16, 512),
        ("inplace", 28, 512),
        ("inplace", 16, 672),
        ("sync", 16, 672),
    ),
    ("cityscapes", "wide-resnet38"): (
        ("standard", 20, 512),
        ("inplace", 28, 512),
        ("inplace", 20, 640),
        ("sync", 20, 640),
    ),
    ("coco-stuff", "resnext101"): (
        ("standard", 16, 480),
        ("inplace", 24, 480),
        ("inplace", 16, 600),
        ("sync", 16, 600),
    ),
    ("coco-stuff", "wide-resnet38"): (
        ("standard", 20, 496),
        ("inplace", 28, 496),
        ("inplace", 20, 576),
        ("sync", 20, 576),
    ),
}
_TABLE_4: tuple[tuple[Any, ...], ...] = (
    ("cityscapes", "resnext152", "sync", 12, 680),
    ("cityscapes", "wide-resnet38", "inplace", 16, 712),
    ("cityscapes", "wide-resnet38", "sync", 16, 712),
    ("cityscapes", "wide-resnet38", "sync", 12, 872),
    ("cityscapes", "wide-resnet38", "sync", 12, 872, True),
    ("vistas", "wide-resnet38", "sync", 12, 776, True),
)

RECIPES: tuple[Config, ...] = (
    *(_paper(kind, network, *cell) for (kind, network), cells in _TABLE_3.items() for cell in cells),
    *(_paper(*cell) for cell in _TABLE_4),
    Config(
        "embedded-segment",
        "segmentation",
        Network("small"),
        Data("scenes", resize=64, crop=64, evaluate_resize=0, length=320, workers=0, cache=True),
        Augment(colour=0.0, lighting=0.0, scale_low=1.0, scale_high=1.0),
        Loss(hardest=1.0),
        Optim("adamw", lr=4e-3, weight_decay=1e-2, decay="weights", schedule="cosine", warmup=1),
        Train(epochs=16, batch=16, log_every=20, evaluate_every=8),
    ),
    # 480×360 pixels, enlarged twice: at output stride 16 that is 8 of the image's own, out of a body that sees poles and signs.
    Config(
        "camvid",
        "segmentation",
        Network("resnet18", output_stride=16),
        Data("camvid", resize=720, crop=512, evaluate_resize=720, workers=12, cache=True),
        Augment(colour=0.4, lighting=0.0, scale_low=0.7, scale_high=2.0),
        Loss(hardest=1.0),
        Optim("adamw", lr=1e-3, weight_decay=0.5, decay="weights", schedule="poly", warmup=1),
        Train(epochs=250, batch=16, dtype="bfloat16", evaluate_every=25, evaluate_batch=8),
    ),
)

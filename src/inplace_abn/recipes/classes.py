"""The classes of segmentation data sets: names, colours, and what the values in label files mean."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .scenes import VOID

__all__ = ["CAMVID", "CITYSCAPES", "COCO_STUFF", "Classes", "hues", "plain", "vistas_classes"]


@dataclass(frozen=True)
class Classes:
    """Names and colours of a data set's classes, and what the values in its label files mean."""

    names: Sequence[str]
    colours: Sequence[tuple[int, int, int]]
    # Value in a file → class, or VOID. Other values are an error.
    meaning: dict[int, int]

    def table(self) -> Tensor:
        """The class of each of 256 values; −1 where a value has no meaning."""
        table = torch.full((256,), -1, dtype=torch.int16)
        for value, label in self.meaning.items():
            table[value] = label
        return table


def plain(names: Sequence[str], colours: Sequence[tuple[int, int, int]], void: Sequence[int] = (VOID,)) -> Classes:
    """Classes whose values are their numbers."""
    return Classes(names, colours, {**{i: i for i in range(len(names))}, **dict.fromkeys(void, VOID)})


CAMVID = plain(
    ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"),
    (
        (128, 128, 128),
        (128, 0, 0),
        (192, 192, 128),
        (128, 64, 128),
        (60, 40, 222),
        (128, 128, 0),
        (192, 128, 128),
        (64, 64, 128),
        (64, 0, 128),
        (64, 64, 0),
        (0, 128, 192),
    ),
    # Void is 11 in the set as it was published.
    void=(11, VOID),
)
# Name, colour, and the value in *_gtFine_labelIds.png; other values of the 34 are void.
_CITYSCAPES = (
    ("road", (128, 64, 128), 7),
    ("sidewalk", (244, 35, 232), 8),
    ("building", (70, 70, 70), 11),
    ("wall", (102, 102, 156), 12),
    ("fence", (190, 153, 153), 13),
    ("pole", (153, 153, 153), 17),
    ("traffic light", (250, 170, 30), 19),
    ("traffic sign", (220, 220, 0), 20),
    ("vegetation", (107, 142, 35), 21),
    ("terrain", (152, 251, 152), 22),
    ("sky", (70, 130, 180), 23),
    ("person", (220, 20, 60), 24),
    ("rider", (255, 0, 0), 25),
    ("car", (0, 0, 142), 26),
    ("truck", (0, 0, 70), 27),
    ("bus", (0, 60, 100), 28),
    ("train", (0, 80, 100), 31),
    ("motorcycle", (0, 0, 230), 32),
    ("bicycle", (119, 11, 32), 33),
)
CITYSCAPES = Classes(
    [name for name, *_ in _CITYSCAPES],
    [colour for _, colour, _ in _CITYSCAPES],
    {**dict.fromkeys([*range(34), 255], VOID), **{value: i for i, (*_, value) in enumerate(_CITYSCAPES)}},
)
# Values 92 to 182 of the pixel maps of 2017, in this order; things (1 to 91), other (183) and unlabelled (0) are void.
_STUFF = """
banner blanket branch bridge building-other bush cabinet cage cardboard carpet ceiling-other ceiling-tile cloth
clothes clouds counter cupboard curtain desk-stuff dirt door-stuff fence floor-marble floor-other floor-stone
floor-tile floor-wood flower fog food-other fruit furniture-other grass gravel ground-other hill house leaves light
mat metal mirror-stuff moss mountain mud napkin net paper pavement pillow plant-other plastic platform playingfield
railing railroad river road rock roof rug salad sand sea shelf sky-other skyscraper snow solid-other stairs stone
straw structural-other table tent textile-other towel tree vegetable wall-brick wall-concrete wall-other wall-panel
wall-stone wall-tile wall-wood water-other waterdrops window-blind window-other wood
"""


def hues(count: int) -> list[tuple[int, int, int]]:
    """As many colours, told apart where that is possible, for sets that have none of their own."""
    digest = [hashlib.blake2b(str(i).encode(), digest_size=3).digest() for i in range(count)]
    return [(d[0], d[1], d[2]) for d in digest]


COCO_STUFF = Classes(
    _STUFF.split(), hues(91), {**dict.fromkeys([*range(92), 183, 255], VOID), **{92 + i: i for i in range(91)}}
)


def vistas_classes(path: Path) -> Classes:
    """The classes of Mapillary Vistas out of its config: those that are evaluated; the others are void."""
    try:
        labels = json.loads(path.read_text())["labels"]
        known = [(i, one) for i, one in enumerate(labels) if one.get("evaluate", True)]
        names = [str(one["readable"]) for _, one in known]
        colours = [(int(one["color"][0]), int(one["color"][1]), int(one["color"][2])) for _, one in known]
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the config of the data set") from None
    except (json.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} cannot be understood: {type(error).__name__}: {error}") from error
    meaning = {**dict.fromkeys([*range(len(labels)), 255], VOID), **{value: i for i, (value, _) in enumerate(known)}}
    return Classes(names, colours, meaning)

"""The paper's networks, which take their norm-and-activation layer as an argument.

By name, :func:`create`; for pixels, :func:`deeplabv3`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..modules import InPlaceABN
from .deeplab import DeepLabV3, Head
from .densenet import DenseNet, densenet121, densenet169, densenet201, densenet264
from .residual import (
    IdentityBlock,
    NormAct,
    ResidualBlock,
    ResNet,
    ResNeXt,
    WideResNet,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnext50,
    resnext101,
    resnext101_64x4d,
    resnext152,
    wide_resnet16,
    wide_resnet16_a2,
    wide_resnet20,
    wide_resnet20_a2,
    wide_resnet38,
    wide_resnet38_a2,
)

__all__ = [
    "DeepLabV3",
    "DenseNet",
    "Head",
    "IdentityBlock",
    "ResNeXt",
    "ResNet",
    "ResidualBlock",
    "WideResNet",
    "create",
    "deeplabv3",
    "densenet121",
    "densenet169",
    "densenet201",
    "densenet264",
    "names",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50",
    "resnext101",
    "resnext101_64x4d",
    "resnext152",
    "wide_resnet16",
    "wide_resnet16_a2",
    "wide_resnet20",
    "wide_resnet20_a2",
    "wide_resnet38",
    "wide_resnet38_a2",
]

_BUILDERS: dict[str, Callable[..., Any]] = {
    name: globals()[name] for name in __all__ if name.startswith(("resnet", "resnext", "wide_resnet", "densenet"))
}


def names() -> list[str]:
    """What :func:`create` makes.

    >>> len(names()), "resnext101" in names()
    (19, True)
    """
    return sorted(_BUILDERS)


def create(
    name: str,
    classes: int = 1000,
    norm_act: NormAct = InPlaceABN,
    dilation: int | Sequence[int] = 1,
    input_3x3: bool | None = None,
) -> Any:
    """A network by name.

    Args:
        name: one of :func:`names`.
        classes: of the classifier; 0 for features.
        norm_act: makes norms: :class:`inplace_abn.ABN`, :class:`inplace_abn.InPlaceABN`, :class:`inplace_abn.InPlaceABNSync`, or
            a function that does. The same weights load with all.
        dilation: of the stages, 1 for none; of a wide ResNet a2, those of its last three stages, or of four, whose first is 1.
        input_3x3: begin with three 3×3 convolutions; None for what the released files have.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     sum(p.numel() for p in create("resnext101").parameters())
        42902312
    """
    if name not in _BUILDERS:
        raise ValueError(f"network {name!r} is unknown; one of: {', '.join(names())}")
    options: dict[str, Any] = {"classes": classes, "norm_act": norm_act}
    if dilation != 1:
        options["dilation"] = dilation
        if name.startswith("wide_resnet") and not isinstance(dilation, int):
            options["dilation"] = dilation[-3:]
    if input_3x3 is not None:
        if not (name.startswith("densenet") or name in ("resnext50", "resnext101", "resnext152")):
            raise ValueError(f"{name} has one way to begin; leave input_3x3 out")
        options["input_3x3"] = input_3x3
    return _BUILDERS[name](**options)


def deeplabv3(
    name: str, classes: int, norm_act: NormAct = InPlaceABN, output_stride: int = 8, **options: Any
) -> DeepLabV3:
    """DeepLabV3 on a network by name, dilated to the output stride 8 or 16; options are those of
    :class:`DeepLabV3` and :class:`Head`."""
    if output_stride not in (8, 16):
        raise ValueError(f"output_stride is {output_stride}; it is 8 or 16")
    if name.startswith("wide_resnet"):
        dilation: tuple[int, ...] = (2, 4, 4) if output_stride == 8 else (1, 2, 2)
    else:
        dilation = (1, 1, 2, 4) if output_stride == 8 else (1, 1, 1, 2)
    return DeepLabV3(create(name, 0, norm_act, dilation), classes, norm_act, **options)

"""ResNets with the activation behind the sum (He et al., 2016), their strides in the 3×3 convolutions.

Modules are named as in torchvision, whose state dicts load. ``norm_act`` makes every norm and activation: it is called with the
number of channels, and with ``activation="identity"`` too for projected shortcuts; the layer behind a sum is called with
``residual=``. :class:`inplace_abn.ABN`, :class:`inplace_abn.InPlaceABN` and :class:`inplace_abn.InPlaceABNSync` are such layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..modules import InPlaceABN

__all__ = ["ResNet", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]

NormAct = Callable[..., nn.Module]


def _conv(inside: int, outside: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)


class Basic(nn.Module):
    """3×3, 3×3, and the shortcut."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int, norm_act: NormAct, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _conv(inside, width, 3, stride)
        self.bn1 = norm_act(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = norm_act(width)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """φ(BN(conv₂(…)) + shortcut(x))."""
        h = self.conv2(self.bn1(self.conv1(x)))
        z: Tensor = self.bn2(h, residual=x if self.downsample is None else self.downsample(x))
        return z


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 to four times the width, and the shortcut."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int, norm_act: NormAct, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _conv(inside, width, 1)
        self.bn1 = norm_act(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = norm_act(width)
        self.conv3 = _conv(width, 4 * width, 1)
        self.bn3 = norm_act(4 * width)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """φ(BN(conv₃(…)) + shortcut(x))."""
        h = self.conv2(self.bn1(self.conv1(x)))
        h = self.conv3(self.bn2(h))
        z: Tensor = self.bn3(h, residual=x if self.downsample is None else self.downsample(x))
        return z


class ResNet(nn.Module):
    """A stem, four stages of blocks, global pooling, a linear classifier.

    Args:
        block: :class:`Basic` or :class:`Bottleneck`.
        depths: blocks per stage.
        num_classes: outputs of the classifier.
        norm_act: makes the norm and activation of so many channels.
        zero_init_residual: start every block as its shortcut, with γ = 0 in its last norm.

    Example:
        >>> ResNet(Basic, (1, 1, 1, 1), num_classes=10)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        block: type[Basic] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        num_classes: int = 1000,
        norm_act: NormAct = InPlaceABN,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = norm_act(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, inside = [], 64
        for i, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for j in range(depth):
                width, stride = 64 << i, 2 if i > 0 and j == 0 else 1
                outside = width * block.expansion
                shortcut = None
                if stride != 1 or inside != outside:
                    shortcut = nn.Sequential(
                        _conv(inside, outside, 1, stride), norm_act(outside, activation="identity")
                    )
                blocks.append(block(inside, width, stride, norm_act, shortcut))
                inside = outside
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, Basic | Bottleneck):
                last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
                assert isinstance(last.weight, Tensor)
                nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of images of shape (N, 3, H, W)."""
        x = self.maxpool(self.bn1(self.conv1(x)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        scores: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return scores


def resnet18(**options: Any) -> ResNet:
    """ResNet-18; options as in :class:`ResNet`."""
    return ResNet(Basic, (2, 2, 2, 2), **options)


def resnet34(**options: Any) -> ResNet:
    """ResNet-34; options as in :class:`ResNet`."""
    return ResNet(Basic, (3, 4, 6, 3), **options)


def resnet50(**options: Any) -> ResNet:
    """ResNet-50; options as in :class:`ResNet`."""
    return ResNet(Bottleneck, (3, 4, 6, 3), **options)


def resnet101(**options: Any) -> ResNet:
    """ResNet-101; options as in :class:`ResNet`."""
    return ResNet(Bottleneck, (3, 4, 23, 3), **options)


def resnet152(**options: Any) -> ResNet:
    """ResNet-152; options as in :class:`ResNet`."""
    return ResNet(Bottleneck, (3, 8, 36, 3), **options)

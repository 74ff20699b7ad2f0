"""ResNets, ResNeXts and wide ResNets, as the paper trains them, under the names of the released files.

``norm_act`` makes every norm and activation. It is called with the number of channels, and with ``activation="identity"`` too for
projected shortcuts; its layers take ``residual=`` and ``overwrite=``. :class:`inplace_abn.ABN`, :class:`inplace_abn.InPlaceABN`
and :class:`inplace_abn.InPlaceABNSync` are such layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..activations import SLOPE
from ..modules import ABN, InPlaceABN

__all__ = ["IdentityBlock", "ResNeXt", "ResNet", "ResidualBlock", "WideResNet", "classifier", "initialize", "stem"]

NormAct = Callable[..., nn.Module]
Dilation = int | Sequence[int]


def conv(inside: int, outside: int, size: int, stride: int = 1, dilation: int = 1, groups: int = 1) -> nn.Conv2d:
    """Without a bias, which the norm has; padded so that stride 1 keeps the size."""
    return nn.Conv2d(inside, outside, size, stride, dilation * (size // 2), dilation, groups, bias=False)


def initialize(module: nn.Module, slope: float = SLOPE) -> None:
    """As the paper's code does: Xavier for leaky ReLU in convolutions, a tenth of it in the classifier."""
    gain = nn.init.calculate_gain("leaky_relu", slope)
    for m in module.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.xavier_normal_(m.weight, gain)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
        elif isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight, 0.1)
            nn.init.zeros_(m.bias)


def classifier(channels: int, classes: int) -> nn.Module:
    """Global mean, and a linear layer."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["avg_pool"], parts["flat"], parts["fc"] = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    return nn.Sequential(parts)


def stem(width: int, norm_act: NormAct, input_3x3: bool) -> nn.Module:
    """A 7×7 convolution, or three of 3×3 with norms between them; to a quarter of the size."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if input_3x3:
        parts["conv1"], parts["bn1"] = conv(3, width, 3, 2), norm_act(width)
        parts["conv2"], parts["bn2"] = conv(width, width, 3), norm_act(width)
        parts["conv3"] = conv(width, width, 3)
    else:
        parts["conv1"] = conv(3, width, 7, 2)
    parts["pool"] = nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(parts)


def at(dilation: Dilation, i: int) -> int:
    """Of stage i."""
    return dilation if isinstance(dilation, int) else dilation[i]


class ResidualBlock(nn.Module):
    """Convolutions, and the activation behind the sum with the shortcut: φ(BN(conv(…)) + shortcut), as one layer.

    Args:
        inside: channels of the input.
        channels: of the two 3×3 convolutions, or of the 1×1, 3×3 and 1×1 ones.
        stride: of the first 3×3 convolution, and of the shortcut.
        dilation: of the 3×3 convolutions.
        groups: of the 3×3 convolution in the middle of three.
        norm_act: makes norms.
    """

    def __init__(
        self,
        inside: int,
        channels: Sequence[int],
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        norm_act: NormAct = InPlaceABN,
    ) -> None:
        super().__init__()
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if len(channels) == 2:
            shapes = [(3, stride, dilation, 1), (3, 1, dilation, 1)]
        else:
            shapes = [(1, 1, 1, 1), (3, stride, dilation, groups), (1, 1, 1, 1)]
        before = inside
        for i, (outside, shape) in enumerate(zip(channels, shapes, strict=True), 1):
            parts[f"conv{i}"], parts[f"bn{i}"] = conv(before, outside, *shape), norm_act(outside)
            before = outside
        self.convs = nn.Sequential(parts)
        self.proj_conv = self.proj_bn = None
        if stride != 1 or inside != before:
            self.proj_conv, self.proj_bn = conv(inside, before, 1, stride), norm_act(before, activation="identity")

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        *inner, last = self.convs
        h = x
        for part in inner:
            h = part(h)
        r = x if self.proj_conv is None or self.proj_bn is None else self.proj_bn(self.proj_conv(x))
        z: Tensor = last(h, residual=r)
        return z


class IdentityBlock(nn.Module):
    """Norms and activations in front of the convolutions; nothing behind the sum.

    Args: as :class:`ResidualBlock`; of three convolutions the first has the stride. ``dropout`` is a factory of what stands in
    front of the last convolution.
    """

    def __init__(
        self,
        inside: int,
        channels: Sequence[int],
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        norm_act: NormAct = InPlaceABN,
        dropout: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.bn1 = norm_act(inside)
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if len(channels) == 2:
            shapes = [(3, stride, dilation, 1), (3, 1, dilation, 1)]
        else:
            shapes = [(1, stride, 1, 1), (3, 1, dilation, groups), (1, 1, 1, 1)]
        before = inside
        for i, (outside, shape) in enumerate(zip(channels, shapes, strict=True), 1):
            if i > 1:
                parts[f"bn{i}"] = norm_act(before)
            if i == len(channels) and dropout is not None:
                parts["dropout"] = dropout()
            parts[f"conv{i}"] = conv(before, outside, *shape)
            before = outside
        self.convs = nn.Sequential(parts)
        self.proj_conv = conv(inside, before, 1, stride) if stride != 1 or inside != before else None

    def forward(self, x: Tensor) -> Tensor:
        """convs(φ(BN(x))) + shortcut."""
        if self.proj_conv is None:
            # The sum reads x: it stays, without a copy.
            out: Tensor = self.convs(self.bn1(x, overwrite=False))
            return out.add_(x)
        h = self.bn1(x)
        shortcut = self.proj_conv(h)
        out = self.convs(h)
        return out.add_(shortcut)


class _Staged(nn.Module):
    """Stages mod1, mod2, … in a row, a last norm if there is one, and a classifier unless there are no classes."""

    def __init__(self, channels: int, classes: int, bn_out: nn.Module | None) -> None:
        super().__init__()
        self.out_channels = channels
        if bn_out is not None:
            self.bn_out = bn_out
        if classes:
            self.classifier = classifier(channels, classes)

    def stages(self) -> list[nn.Module]:
        """What features run through, in order."""
        return [module for name, module in self.named_children() if name not in ("bn_out", "classifier")]

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of images of shape (N, 3, H, W), or features of a network without classes."""
        for stage in self.stages():
            x = stage(x)
        if "bn_out" in self._modules:
            x = self.bn_out(x)
        return self.classifier(x) if "classifier" in self._modules else x

    def _finish(self) -> None:
        """The order in which the released files have their parts; and numbers to begin with."""
        for name in ("bn_out", "classifier"):
            if name in self._modules:
                self._modules[name] = self._modules.pop(name)
        initialize(self)


def _stage(
    blocks: int, inside: int, channels: Sequence[int], make: Callable[..., nn.Module], stride: int, dilation: int
) -> nn.Sequential:
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for j in range(blocks):
        parts[f"block{j + 1}"] = make(inside if j == 0 else channels[-1], channels, stride if j == 0 else 1, dilation)
    return nn.Sequential(parts)


class ResNet(_Staged):
    """Post-activation residual networks; ``groups`` and ``width`` make them the ResNeXts of Xie et al.

    Args:
        structure: blocks of each of the four stages.
        bottleneck: three convolutions in a block.
        classes: of the classifier; 0 for features.
        norm_act: makes norms.
        dilation: of each stage; a dilated one does not halve the size.
        groups: of the 3×3 convolutions.
        width: channels of a bottleneck in the first stage.
        zero_init_residual: start every block as its shortcut, with γ = 0 in its last norm.

    Example:
        >>> import torch
        >>> ResNet((1, 1, 1, 1), bottleneck=False, classes=10)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        structure: Sequence[int],
        bottleneck: bool = True,
        classes: int = 1000,
        norm_act: NormAct = InPlaceABN,
        dilation: Dilation = 1,
        groups: int = 1,
        width: int = 64,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__(2048 if bottleneck else 512, classes, None)
        parts: OrderedDict[str, nn.Module] = OrderedDict(conv1=conv(3, 64, 7, 2), bn1=norm_act(64))
        if at(dilation, 0) == 1:
            parts["pool1"] = nn.MaxPool2d(3, 2, 1)
        self.mod1 = nn.Sequential(parts)
        inside = 64

        def make(inside: int, channels: Sequence[int], stride: int, dilation: int) -> nn.Module:
            return ResidualBlock(inside, channels, stride, dilation, groups, norm_act)

        for i, blocks in enumerate(structure):
            channels = (width << i, width << i, 256 << i) if bottleneck else (64 << i, 64 << i)
            d = at(dilation, i)
            self.add_module(f"mod{i + 2}", _stage(blocks, inside, channels, make, 2 if i > 0 and d == 1 else 1, d))
            inside = channels[-1]
        self._finish()
        if zero_init_residual:
            for m in self.modules():
                if isinstance(m, ResidualBlock):
                    last = m.convs[-1]
                    assert isinstance(last, ABN) and last.weight is not None
                    nn.init.zeros_(last.weight)


class ResNeXt(_Staged):
    """The paper's ResNeXts: pre-activation bottlenecks with grouped 3×3 convolutions.

    Args: as :class:`ResNet`; ``base`` are the channels of a block in the first stage; ``input_3x3`` begins with three 3×3
    convolutions in place of one 7×7.
    """

    def __init__(
        self,
        structure: Sequence[int],
        classes: int = 1000,
        norm_act: NormAct = InPlaceABN,
        dilation: Dilation = 1,
        groups: int = 64,
        base: Sequence[int] = (128, 128, 256),
        input_3x3: bool = True,
    ) -> None:
        last = base[-1] << (len(structure) - 1)
        super().__init__(last, classes, norm_act(last))
        self.mod1 = stem(64, norm_act, input_3x3)
        inside = 64

        def make(inside: int, channels: Sequence[int], stride: int, dilation: int) -> nn.Module:
            return IdentityBlock(inside, channels, stride, dilation, groups, norm_act)

        for i, blocks in enumerate(structure):
            channels = [c << i for c in base]
            d = at(dilation, i)
            self.add_module(f"mod{i + 2}", _stage(blocks, inside, channels, make, 2 if i > 0 and d == 1 else 1, d))
            inside = channels[-1]
        self._finish()


WIDE = ((128, 128), (256, 256), (512, 512), (512, 1024), (512, 1024, 2048), (1024, 2048, 4096))


class WideResNet(_Staged):
    """Wide ResNets of Wu et al.: pre-activation, six stages of up to 4096 channels.

    Args:
        structure: blocks of each of the six stages.
        classes: of the classifier; 0 for features.
        norm_act: makes norms.
        a2: halve the size by strides, not pools, from the third stage on, and drop channels in the last two stages.
        dilation: with ``a2``, those of the last three stages, of which dilated ones do not halve the size: 2, 4, 4 for an
            output stride of 8, and 1, 2, 2 for 16.
    """

    def __init__(
        self,
        structure: Sequence[int],
        classes: int = 1000,
        norm_act: NormAct = InPlaceABN,
        a2: bool = False,
        dilation: Sequence[int] | None = None,
    ) -> None:
        if dilation is not None and not a2:
            raise ValueError("a wide ResNet halves the size by pools, which cannot be dilated; build the a2 variant")
        super().__init__(WIDE[-1][-1], classes, norm_act(WIDE[-1][-1]))
        self.mod1 = nn.Sequential(OrderedDict(conv1=conv(3, 64, 3)))
        dilations = (1, 1, 1, *(dilation or (1, 1, 1)))
        inside = 64
        for i, (blocks, channels) in enumerate(zip(structure, WIDE, strict=True)):
            if i < (2 if a2 else 5):
                self.add_module(f"pool{i + 2}", nn.MaxPool2d(3, 2, 1))
            stride = 2 if a2 and i in (2, 3, 4) and dilations[i] == 1 else 1
            rate = {4: 0.3, 5: 0.5}.get(i) if a2 else None

            def make(
                inside: int, channels: Sequence[int], stride: int, dilation: int, rate: float | None = rate
            ) -> nn.Module:
                dropout = None if rate is None else (lambda: nn.Dropout2d(rate))
                return IdentityBlock(inside, channels, stride, dilation, 1, norm_act, dropout)

            self.add_module(f"mod{i + 2}", _stage(blocks, inside, channels, make, stride, dilations[i]))
            inside = channels[-1]
        self._finish()


def _partial(make: Callable[..., Any], text: str, *args: Any, **fixed: Any) -> Callable[..., Any]:
    def build(**options: Any) -> Any:
        return make(*args, **{**fixed, **options})

    build.__doc__ = text
    return build


resnet18 = _partial(ResNet, "ResNet-18; options as in :class:`ResNet`.", (2, 2, 2, 2), bottleneck=False)
resnet34 = _partial(ResNet, "ResNet-34; options as in :class:`ResNet`.", (3, 4, 6, 3), bottleneck=False)
resnet50 = _partial(ResNet, "ResNet-50; options as in :class:`ResNet`.", (3, 4, 6, 3))
resnet101 = _partial(ResNet, "ResNet-101; options as in :class:`ResNet`.", (3, 4, 23, 3))
resnet152 = _partial(ResNet, "ResNet-152; options as in :class:`ResNet`.", (3, 8, 36, 3))
resnext101_64x4d = _partial(
    ResNet, "ResNeXt-101 64×4d of Xie et al.; options as in :class:`ResNet`.", (3, 4, 23, 3), groups=64, width=256
)
resnext50 = _partial(ResNeXt, "ResNeXt-50 of the paper; options as in :class:`ResNeXt`.", (3, 4, 6, 3))
resnext101 = _partial(ResNeXt, "ResNeXt-101 of the paper; options as in :class:`ResNeXt`.", (3, 4, 23, 3))
resnext152 = _partial(ResNeXt, "ResNeXt-152 of the paper; options as in :class:`ResNeXt`.", (3, 8, 36, 3))
wide_resnet16 = _partial(WideResNet, "WideResNet-16; options as in :class:`WideResNet`.", (1, 1, 1, 1, 1, 1))
wide_resnet20 = _partial(WideResNet, "WideResNet-20; options as in :class:`WideResNet`.", (1, 1, 1, 3, 1, 1))
wide_resnet38 = _partial(WideResNet, "WideResNet-38; options as in :class:`WideResNet`.", (3, 3, 6, 3, 1, 1))
wide_resnet16_a2 = _partial(WideResNet, "The a2 variant of :func:`wide_resnet16`.", (1, 1, 1, 1, 1, 1), a2=True)
wide_resnet20_a2 = _partial(WideResNet, "The a2 variant of :func:`wide_resnet20`.", (1, 1, 1, 3, 1, 1), a2=True)
wide_resnet38_a2 = _partial(WideResNet, "The a2 variant of :func:`wide_resnet38`.", (3, 3, 6, 3, 1, 1), a2=True)

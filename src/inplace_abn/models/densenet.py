"""DenseNets under the names of the released files: every layer reads all maps before it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..modules import InPlaceABN
from .residual import Dilation, NormAct, _partial, _Staged, at, conv, stem

__all__ = ["DenseNet", "densenet121", "densenet169", "densenet201", "densenet264"]


def _normed(inside: int, outside: int, size: int, dilation: int, norm_act: NormAct) -> nn.Sequential:
    parts: OrderedDict[str, nn.Module] = OrderedDict(bn=norm_act(inside))
    parts["conv"] = conv(inside, outside, size, 1, dilation)
    return nn.Sequential(parts)


class DenseModule(nn.Module):
    """Layers that each add ``growth`` channels to what all before them gave."""

    def __init__(self, inside: int, growth: int, layers: int, dilation: int, norm_act: NormAct) -> None:
        super().__init__()
        widths = [inside + i * growth for i in range(layers)]
        self.convs1 = nn.ModuleList([_normed(width, 4 * growth, 1, 1, norm_act) for width in widths])
        self.convs3 = nn.ModuleList([_normed(4 * growth, growth, 3, dilation, norm_act) for _ in widths])

    def forward(self, x: Tensor) -> Tensor:
        """All maps, side by side."""
        maps = [x]
        for one, three in zip(self.convs1, self.convs3, strict=True):
            # A new tensor each time, which the norm may overwrite; of a single map it would be that map.
            together = torch.cat(maps, dim=1)
            maps.append(three(one(together)))
        return torch.cat(maps, dim=1)


class DenseNet(_Staged):
    """Dense modules with halvings between them.

    Args:
        structure: layers of each of the four modules.
        classes: of the classifier; 0 for features.
        norm_act: makes norms.
        dilation: of each module; a dilated one is not halved in front.
        growth: channels that a layer adds.
        theta: share of the channels that a transition keeps.
        input_3x3: begin with three 3×3 convolutions in place of one 7×7.
    """

    def __init__(
        self,
        structure: Sequence[int],
        classes: int = 1000,
        norm_act: NormAct = InPlaceABN,
        dilation: Dilation = 1,
        growth: int = 32,
        theta: float = 0.5,
        input_3x3: bool = False,
    ) -> None:
        width = 2 * growth
        for i, layers in enumerate(structure):
            width = (int(width * theta) if i else width) + layers * growth
        super().__init__(width, classes, norm_act(width))
        inside = 2 * growth
        self.mod1 = stem(inside, norm_act, input_3x3)
        for i, layers in enumerate(structure):
            d = at(dilation, i)
            if i:
                outside = int(inside * theta)
                parts: OrderedDict[str, nn.Module] = OrderedDict(bn=norm_act(inside), conv=conv(inside, outside, 1))
                if d == 1:
                    parts["pool"] = nn.AvgPool2d(2, 2)
                self.add_module(f"tra{i + 1}", nn.Sequential(parts))
                inside = outside
            self.add_module(f"mod{i + 2}", DenseModule(inside, growth, layers, d, norm_act))
            inside += layers * growth
        self._finish()


densenet121 = _partial(DenseNet, "DenseNet-121; options as in :class:`DenseNet`.", (6, 12, 24, 16))
densenet169 = _partial(DenseNet, "DenseNet-169; options as in :class:`DenseNet`.", (6, 12, 32, 32))
densenet201 = _partial(DenseNet, "DenseNet-201; options as in :class:`DenseNet`.", (6, 12, 48, 32))
densenet264 = _partial(
    DenseNet, "DenseNet-264 of the released files; options as in :class:`DenseNet`.", (6, 12, 64, 48), input_3x3=True
)

"""DeepLabV3 as the paper has it: a body at output stride 8 or 16, five views of its features, and logits of the image's size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules import InPlaceABN
from .residual import NormAct, conv, initialize

__all__ = ["DeepLabV3", "Head"]


class Head(nn.Module):
    """Four convolutions of growing dilation side by side with the pooled features, brought together by 1×1 convolutions.

    The 1×1 convolution of the five stacked views is the sum of ``red_conv`` of four and ``pool_red_conv`` of the fifth, which
    is computed before it is spread out.

    Args:
        inside: channels of the features.
        outside: channels of the output.
        hidden: channels of each view.
        dilations: of the three 3×3 convolutions; the first is 1×1.
        norm_act: makes norms.
        pooling_size: in evaluation, pool over windows of this size rather than the whole, as when images are larger than the
            crops of training.
    """

    def __init__(
        self,
        inside: int,
        outside: int = 256,
        hidden: int = 256,
        dilations: tuple[int, int, int] = (12, 24, 36),
        norm_act: NormAct = InPlaceABN,
        pooling_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.pooling_size = pooling_size
        self.out_channels = outside
        self.map_convs = nn.ModuleList([conv(inside, hidden, 1), *(conv(inside, hidden, 3, 1, d) for d in dilations)])
        self.map_bn = norm_act(4 * hidden)
        self.global_pooling_conv = conv(inside, hidden, 1)
        self.global_pooling_bn = norm_act(hidden)
        self.red_conv = conv(4 * hidden, outside, 1)
        self.pool_red_conv = conv(hidden, outside, 1)
        self.red_bn = norm_act(outside)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Features of ``outside`` channels, of the same size."""
        out: Tensor = self.red_conv(self.map_bn(torch.cat([view(x) for view in self.map_convs], dim=1)))
        pool: Tensor = self.pool_red_conv(self.global_pooling_bn(self.global_pooling_conv(self._pooled(x))))
        z: Tensor = self.red_bn(out.add_(pool))
        return z

    def _pooled(self, x: Tensor) -> Tensor:
        if self.training or self.pooling_size is None:
            return x.mean((2, 3), keepdim=True)
        size = [min(wanted, has) for wanted, has in zip(self.pooling_size, x.shape[2:], strict=True)]
        # Back to the full size by repeating what is at the borders.
        (top, left), (bottom, right) = ([(k - 1) // 2 for k in size], [k // 2 for k in size])
        return F.pad(F.avg_pool2d(x, size, stride=1), [left, right, top, bottom], mode="replicate")


class DeepLabV3(nn.Module):
    """A body, a head, and a classifier of pixels; parts named as in the released Vistas file.

    Args:
        body: a network without classes.
        classes: of pixels.
        norm_act: makes the head's norms.
        upsample: to the image's size; without, logits are left at the body's stride, for a loss that does it itself.
        options: of the :class:`Head`.
    """

    def __init__(
        self, body: Any, classes: int, norm_act: NormAct = InPlaceABN, upsample: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.upsample = upsample
        self.body = body
        self.head = Head(body.out_channels, norm_act=norm_act, **options)
        self.cls = nn.Conv2d(self.head.out_channels, classes, 1)
        initialize(self.cls)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (N, classes, H, W)."""
        logits: Tensor = self.cls(self.head(self.body(x)))
        if not self.upsample:
            return logits
        return F.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)

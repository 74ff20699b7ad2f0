"""A network for a CPU: nine convolutions at half resolution, each with a norm and an activation behind it."""

from __future__ import annotations

from torch import Tensor, nn

from ..models.residual import NormAct

__all__ = ["Small"]


class Small(nn.Module):
    """Conv, norm, activation again and again, with growing dilation.

    Args:
        classes: of images, or pixels; 0 for features.
        norm_act: makes norms.
        pixels: whether every pixel has a class, rather than the image.
        width: channels.
    """

    def __init__(self, classes: int, norm_act: NormAct, pixels: bool = False, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 5, 2, 2, bias=False), norm_act(width)]
        for dilation in (1, 1, 2, 2, 4, 4, 8, 1):
            layers += [nn.Conv2d(width, width, 3, 1, dilation, dilation, bias=False), norm_act(width)]
        self.layers = nn.Sequential(*layers)
        self.out_channels = width
        self.classifier: nn.Module = (
            nn.Identity() if not classes else nn.Conv2d(width, classes, 1) if pixels else nn.Linear(width, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (N, classes), or (N, classes, H/2, W/2) of pixels; or features."""
        x = self.layers(x)
        pooled = isinstance(self.classifier, nn.Linear)
        logits: Tensor = self.classifier(x.mean((2, 3)) if pooled else x)
        return logits

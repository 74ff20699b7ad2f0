"""Networks of torchvision and timm, small inputs for them, and numbers for their norms that look like trained ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from inplace_abn.cli import Mistake, torchvision_package


def torchvision() -> Any:
    """The package, or skip."""
    try:
        return torchvision_package()
    except Mistake as error:
        pytest.skip(str(error))


def timm() -> Any:
    """The package, which imports torchvision."""
    torchvision()
    return pytest.importorskip("timm")


def build(name: str, classes: int = 7) -> nn.Module:
    """A network by its name, ``torchvision:…`` or ``timm:…``, with numbers in its norms."""
    source, name = name.split(":")
    torch.manual_seed(0)
    if source == "timm":
        model: nn.Module = timm().create_model(name, num_classes=classes)
    else:
        options: dict[str, Any] = {"weights": None, "num_classes": classes}
        if "lraspp" in name or "deeplab" in name or "fcn" in name:
            options["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = False
        model = torchvision().models.get_model(name, **options)
    return lively(model)


def lively(model: nn.Module) -> nn.Module:
    """γ of both signs, β, and statistics; no dropout, so that two runs are one."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            for tensor, low, high in ((module.weight, 0.5, 1.5), (module.bias, -0.3, 0.3)):
                if tensor is not None:
                    nn.init.uniform_(tensor, low, high)
            if module.weight is not None:
                with torch.no_grad():
                    module.weight.mul_(torch.randint(0, 2, module.weight.shape) * 2 - 1)
            if module.running_mean is not None:
                nn.init.uniform_(module.running_mean, -0.2, 0.2)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        if type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    return model


def image(model: nn.Module, name: str, seed: int = 0, images: int = 6) -> torch.Tensor:
    """A batch as small as the network takes it."""
    fixed = getattr(model, "pretrained_cfg", {}).get("fixed_input_size", False)
    size = model.pretrained_cfg["input_size"][-1] if fixed else {"torchvision:inception_v3": 299}.get(name, 96)
    size = 224 if name.endswith(("maxvit_t", "_224")) else 256 if name.endswith("_256") else size
    return torch.randn(images, 3, size, size, generator=torch.Generator().manual_seed(seed))


def tensors(output: Any) -> list[torch.Tensor]:
    """What a network gives, auxiliary outputs included."""
    if isinstance(output, torch.Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output
    return [t for part in parts if part is not None for t in tensors(part)]


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Of a fixed random functional of all outputs, by every parameter that has one."""
    model.zero_grad(set_to_none=True)
    # Of dropout.
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    out = tensors(model(x))
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in out]
    sum(((t * w).mean() for t, w in zip(out, weights, strict=True)), torch.zeros(())).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def distance(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Relative, over all parameters together."""
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(mine, theirs, strict=True))
    size = sum(float(b.double().square().sum()) for b in theirs)
    return (off / size) ** 0.5

"""Networks of torchvision and timm, small inputs for them, and numbers for their norms that look like trained ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from inplace_abn import outside


def torchvision() -> Any:
    """The package, or skip."""
    try:
        return outside.torchvision()
    except ImportError as error:
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
    known = getattr(model, "pretrained_cfg", {})
    # Attention over blocks of pixels wants a multiple of their size at every stride.
    fixed = known.get("fixed_input_size", False) or "halo" in name or ":bat_" in name
    size = model.pretrained_cfg["input_size"][-1] if fixed else {"torchvision:inception_v3": 299}.get(name, 96)
    size = 224 if name.endswith(("maxvit_t", "_224")) else size
    size = 256 if name.endswith("_256") else size
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


# All networks with batch norm of torchvision 0.28, for classification and segmentation; of timm 1.0, the least of each kind.
TORCHVISION = """
    deeplabv3_mobilenet_v3_large deeplabv3_resnet101 deeplabv3_resnet50 densenet121 densenet161 densenet169
    densenet201 efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5
    efficientnet_b6 efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s fcn_resnet101 fcn_resnet50
    googlenet inception_v3 lraspp_mobilenet_v3_large maxvit_t mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3
    mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf
    regnet_x_400mf regnet_x_800mf regnet_x_8gf regnet_y_128gf regnet_y_16gf regnet_y_1_6gf regnet_y_32gf
    regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50
    resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5
    shufflenet_v2_x2_0 vgg11_bn vgg13_bn vgg16_bn vgg19_bn wide_resnet101_2 wide_resnet50_2
"""
TIMM = """
    bat_resnext26ts coatnet_pico_rw_224 cpubone_nano cs3darknet_focus_s cs3sedarknet_xdw cspdarknet53 cspresnet50
    cspresnet50d cspresnet50w cspresnext50 darknet17 densenet121 densenetblur121d dla102x dla46_c dla46x_c dla60x_c
    dpn48b dpn68 dpn68b eca_botnext26ts_256 eca_resnext26ts eca_vovnet39b ecaresnet101d_pruned ecaresnet26t
    ecaresnet50d_pruned ecaresnet50t ecaresnext26t_32x4d ecaresnext50t_32x4d efficientformer_l1 efficientnet_lite0
    efficientnetv2_rw_t efficientvim_m1 efficientvit_b0 ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 fbnetc_100
    fbnetv3_b gc_efficientnetv2_rw_t gcresnet33ts gcresnet50t gcresnext26ts gcresnext50ts gernet_s ghostnet_050
    ghostnetv3_050 halonet26t haloregnetz_b hardcorenas_b hgnet_tiny hgnetv2_b0 hrnet_w18_small iformer_t
    inception_next_atto inception_v3 lambda_resnet26t lcnet_035 lcnetv2_small legacy_seresnet18 legacy_xception
    levit_128s lowformer_b0 mixnet_s mnasnet_small mobilenet_edgetpu_100 mobilenetv2_035 mobilenetv3_small_050
    mobileone_s1 mobilevit_xxs mobilevitv2_050 regnetv_040 regnetx_002 regnety_002 regnetz_005 regnetz_b16
    repghostnet_050 repvgg_a0 repvit_m1 res2net50_14w_8s res2net50d res2next50 resnest14d resnest26d
    resnest50d_1s4x24d resnet10t resnet14t resnet18 resnet18d resnet26d resnet26t resnet32ts resnet33ts resnet34d
    resnet50_clip_gap resnet50c resnet50d resnet50s resnet50t resnetaa34d resnetaa50 resnetaa50d resnetblur18
    resnetblur50d resnetv2_18 resnext26ts resnext50_32x4d resnext50d_32x4d rexnet_100 rexnetr_100 sedarknet21
    sehalonet33ts semnasnet_050 seresnet18 seresnet33ts seresnet50t seresnetaa50d seresnext26d_32x4d
    seresnext26t_32x4d seresnext26ts seresnext50_32x4d shvit_s1 skresnet18 skresnet50d skresnext50_32x4d spnasnet_100
    starnet_s050 swiftformer_xs test_byobnet test_efficientnet test_resnet tf_mixnet_s tf_mobilenetv3_small_075
    tiny_vit_5m_224 tinynet_e visformer_tiny vovnet39a xception41 xception41p xcit_nano_12_p8_224
"""
NAMES = [f"torchvision:{name}" for name in TORCHVISION.split()] + [f"timm:{name}" for name in TIMM.split()]

"""The paper's networks: their sizes, names, gradients and bytes; and the released files, made here in their form."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from inplace_abn import ABN, InPlaceABN, InPlaceABNSync, checkpoints, models
from inplace_abn.planning import step_bytes

# Of networks with 1000 classes.
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50": 24_380_200,
    "resnext101": 42_902_312,
    "resnext152": 58_159_912,
    "resnext101_64x4d": 83_455_272,
    "wide_resnet16": 63_732_008,
    "wide_resnet20": 82_612_520,
    "wide_resnet38": 109_167_912,
    "wide_resnet16_a2": 63_732_008,
    "wide_resnet20_a2": 82_612_520,
    "wide_resnet38_a2": 109_167_912,
    "densenet121": 7_978_728,
    "densenet169": 14_149_352,
    "densenet201": 20_013_800,
    "densenet264": 33_403_880,
}
NORMS = {"resnet18": 20, "resnet34": 36, "resnet50": 53, "resnet101": 104, "resnet152": 155, "resnext101": 102}
NORMS |= {"resnext152": 153, "wide_resnet38": 37, "densenet264": 266}


def on_meta(name, **options):
    with torch.device("meta"):
        return models.create(name, **options)


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_every_name_has_its_size():
    assert set(models.names()) == set(PARAMETERS)
    for name, many in PARAMETERS.items():
        model = on_meta(name)
        assert count(model) == many, name
        if name in NORMS:
            assert sum(isinstance(m, ABN) for m in model.modules()) == NORMS[name]
    assert count(on_meta("resnext101", input_3x3=False)) == 42_836_008
    assert count(on_meta("wide_resnet38", classes=0)) == 105_070_912
    with torch.device("meta"):
        assert count(models.Head(4096)) == 30_739_456
    for wrong, message in (
        ({"name": "vgg"}, "resnext101"),
        ({"name": "resnet50", "input_3x3": True}, "one way to begin"),
    ):
        with pytest.raises(ValueError, match=message):
            models.create(**wrong)
    with pytest.raises(ValueError, match="a2 variant"):
        models.create("wide_resnet38", dilation=(2, 4, 4))
    with pytest.raises(ValueError, match="8 or 16"):
        models.deeplabv3("resnet50", 5, output_stride=32)


def test_names_of_the_released_files():
    expected = {
        "resnet50": "mod1.conv1.weight mod1.bn1.weight mod2.block1.convs.conv1.weight mod3.block1.proj_conv.weight "
        "mod3.block1.proj_bn.running_var mod5.block3.convs.bn3.bias classifier.fc.bias",
        "resnext101": "mod1.conv3.weight mod1.bn2.bias mod2.block1.bn1.weight mod2.block1.convs.bn3.weight "
        "mod2.block1.proj_conv.weight mod4.block23.convs.conv3.weight bn_out.running_mean classifier.fc.weight",
        "wide_resnet38_a2": "mod1.conv1.weight mod2.block3.convs.conv2.weight mod7.block1.convs.conv3.weight bn_out.weight",
        "densenet264": "mod1.conv3.weight mod2.convs1.0.bn.weight mod5.convs3.47.conv.weight tra2.bn.bias tra4.conv.weight "
        "bn_out.weight",
    }
    for name, keys in expected.items():
        state = on_meta(name).state_dict()
        assert not [key for key in keys.split() if key not in state]
        assert not [key for key in state if "dropout" in key or ".pool" in key]
    assert list(on_meta("wide_resnet38").state_dict()) == list(on_meta("wide_resnet38_a2").state_dict())


# One of each family, as small as it gets.
SMALL = {
    "post": lambda norm: models.ResNet((1, 2, 1, 1), classes=5, norm_act=norm),
    "post, basic": lambda norm: models.ResNet(
        (1, 1, 1, 1), bottleneck=False, classes=5, norm_act=norm, dilation=(1, 1, 2, 4)
    ),
    "64x4d": lambda norm: models.ResNet((1, 1, 1, 1), classes=5, norm_act=norm, groups=8, width=64),
    "resnext": lambda norm: models.ResNeXt((1, 2, 1, 1), 5, norm, groups=8, base=(16, 16, 32)),
    "resnext, dilated": lambda norm: models.ResNeXt((1, 1, 1, 1), 5, norm, (1, 1, 2, 4), 8, (16, 16, 32), False),
    "densenet": lambda norm: models.DenseNet((2, 2, 2, 2), 5, norm, growth=8, input_3x3=True),
    "deeplab": lambda norm: models.DeepLabV3(
        models.ResNeXt((1, 1, 1, 1), 0, norm, (1, 1, 2, 4), 8, (16, 16, 32)), 5, norm
    ),
}


def lively(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, ABN):
                m.weight.copy_(torch.rand(m.num_features, generator=generator) + 0.5)
                m.bias.copy_(0.2 * torch.randn(m.num_features, generator=generator))
                m.running_mean.copy_(0.1 * torch.randn(m.num_features, generator=generator))
            if isinstance(m, nn.Dropout2d):
                m.p = 0.0
    return model


@pytest.mark.filterwarnings("ignore:inplace_abn_sync")
@pytest.mark.parametrize("name", SMALL)
def test_all_norms_give_the_same(name):
    torch.manual_seed(0)
    nets = {norm: lively(SMALL[name](norm)).double() for norm in (ABN, InPlaceABN, InPlaceABNSync)}
    for net in nets.values():
        net.load_state_dict(nets[ABN].state_dict())
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    truth = zoo.gradients(copy.deepcopy(nets[ABN]), x)
    with torch.no_grad():
        want = nets[ABN].eval()(x)
        assert want.shape == ((4, 5, 64, 64) if name == "deeplab" else (4, 5))
        for net in nets.values():
            assert torch.equal(net.eval()(x), want)
    for net in nets.values():
        assert zoo.distance(zoo.gradients(net.train(), x), truth) < 1e-9
        assert torch.allclose(net.to(memory_format=torch.channels_last).eval()(x), net(x))


def test_wide_resnets_dilated_and_not():
    """Too wide to run here: shapes alone."""
    x = torch.empty(2, 3, 224, 224, device="meta")
    for name, options, size in (
        ("wide_resnet38", {}, 7),
        ("wide_resnet38_a2", {}, 7),
        ("wide_resnet38_a2", {"dilation": (2, 4, 4)}, 28),
        ("wide_resnet38_a2", {"dilation": (1, 2, 4, 4)}, 28),
        ("wide_resnet38_a2", {"dilation": (1, 2, 2)}, 14),
    ):
        body = on_meta(name, classes=0, **options)
        assert body(x).shape == (2, 4096, size, size)
    for name in ("resnet50", "resnext101", "wide_resnet38_a2", "densenet121"):
        for stride in (8, 16):
            with torch.device("meta"):
                net = models.deeplabv3(name, 19, output_stride=stride)
            assert net.body(x).shape[2] == 224 // stride and net(x).shape == (2, 19, 224, 224)


def kept(model, *shape):
    return step_bytes(model.train(), torch.empty(*shape, device="meta"))[0]


@pytest.mark.parametrize(
    "name, share",
    [
        ("resnext101", 0.54),
        ("resnext152", 0.54),
        ("densenet121", 0.54),
        pytest.param("densenet264", 0.54, marks=pytest.mark.long),
        ("resnet50", 0.57),
    ],
)
def test_bytes_kept(name, share):
    ours, plain = (kept(on_meta(name, norm_act=norm), 32, 3, 224, 224) for norm in (InPlaceABN, ABN))
    assert ours <= share * plain


def test_bytes_kept_of_the_segmentation_network():
    with torch.device("meta"):
        ours, plain = (models.deeplabv3("wide_resnet38_a2", 19, norm) for norm in (InPlaceABN, ABN))
    assert kept(ours, 4, 3, 512, 512) <= 0.60 * kept(plain, 4, 3, 512, 512)


def test_the_head_is_one_convolution_of_five_stacked_views():
    torch.manual_seed(0)
    head = lively(models.Head(8, 6, 4, norm_act=ABN)).double().eval()
    x = torch.randn(2, 8, 9, 11, dtype=torch.float64)
    views = head.map_bn(torch.cat([view(x) for view in head.map_convs], 1))
    pooled = head.global_pooling_bn(head.global_pooling_conv(x.mean((2, 3), keepdim=True))).expand(-1, -1, 9, 11)
    weight = torch.cat([head.red_conv.weight, head.pool_red_conv.weight], 1)
    assert weight.shape == (6, 20, 1, 1)
    assert torch.allclose(head(x), head.red_bn(F.conv2d(torch.cat([views, pooled], 1), weight)))


@pytest.mark.parametrize("size", [(3, 4), (5, 5), (40, 40)])
def test_pooling_over_windows(size):
    head = lively(models.Head(4, 3, 2, pooling_size=size, norm_act=ABN)).double().eval()
    x = torch.randn(1, 4, 9, 11, dtype=torch.float64)
    k = [min(a, b) for a, b in zip(size, (9, 11), strict=True)]
    pooled = head._pooled(x)
    assert pooled.shape == x.shape
    # A pixel in the middle sees the window around it.
    i, j = 4, 5
    top, left = i - (k[0] - 1) // 2, j - (k[1] - 1) // 2
    if top >= 0 and left >= 0 and top + k[0] <= 9 and left + k[1] <= 11:
        assert torch.allclose(pooled[..., i, j], x[..., top : top + k[0], left : left + k[1]].mean((2, 3)))
    assert torch.isfinite(head(x)).all()
    assert torch.equal(head.train()._pooled(x), x.mean((2, 3), keepdim=True))


def released(model, path, wrap):
    """A file of the same structure as the released ones, in the old format of torch.save, without counters."""
    state = {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save(wrap(state), path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("scale", ["abs+eps", "signed"])
def test_imagenet_files(tmp_path, scale):
    torch.manual_seed(0)
    source = lively(SMALL["resnext"](ABN))
    with torch.no_grad():
        for m in source.modules():
            if isinstance(m, ABN):
                m.weight.mul_(-1)
    path = tmp_path / "net.pth.tar"
    released(
        source,
        path,
        lambda s: {"epoch": 90, "arch": "net_resnext101", "state_dict": {f"module.{k}": v for k, v in s.items()}},
    )
    x = torch.randn(2, 3, 64, 64)
    outputs = []
    for norm in (ABN, InPlaceABN):
        net = SMALL["resnext"](norm).eval()
        checkpoints.load(net, path, scale=scale)
        for name, value in net.state_dict().items():
            if name.endswith("bn1.weight"):
                was = source.state_dict()[name]
                assert torch.allclose(value, was.abs() + 1e-5 if scale == "abs+eps" else was)
        with torch.no_grad():
            outputs.append(net(x))
    assert torch.equal(*outputs)
    with pytest.raises(ValueError, match="none of the released files"):
        checkpoints.load(net, path)


def test_the_vistas_file(tmp_path):
    torch.manual_seed(0)
    make = partial(SMALL["deeplab"], InPlaceABN)
    source, path = lively(make()), tmp_path / "vistas.pth.tar"

    def parts(state):
        nested = {part: {} for part in ("body", "head", "cls")}
        for name, value in state.items():
            part, _, rest = name.partition(".")
            nested[part][rest] = value
        return {"state_dict": nested, "training_meta": {"epoch": 1}}

    released(source, path, parts)
    net = make()
    checkpoints.load(net, path, scale="signed")
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(net.eval()(x), source.eval()(x))


def test_initialisation():
    torch.manual_seed(0)
    net = models.ResNeXt((1, 1, 1, 1), 10, groups=8, base=(64, 64, 128))
    weight = net.mod2.block1.convs.conv1.weight
    std = (2 / (1 + 0.01**2)) ** 0.5 * (2 / (64 + 64)) ** 0.5
    assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)
    assert float(net.classifier.fc.bias.detach().abs().max()) == 0
    zero = models.ResNet((1, 1, 1, 1), zero_init_residual=True)
    assert float(zero.mod3.block1.convs.bn3.weight.detach().abs().max()) == 0


@pytest.mark.parametrize("name", ["resnext", "post", "densenet"])
def test_compiled_and_exported(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, plain = (lively(SMALL[name](norm)).double() for norm in (InPlaceABN, ABN))
    plain.load_state_dict(net.state_dict())
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert zoo.distance(zoo.gradients(compiled, x), zoo.gradients(plain, x)) < 1e-9
    program = torch.export.export(net.eval(), (x,))
    assert torch.allclose(program.module()(x), net(x))

"""The calls that existing code makes: each written as its client writes it, and checked against plain batch norm."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import zoo
from inplace_abn import ABN, InPlaceABN, InPlaceABNSync
from inplace_abn.functions import inplace_abn, inplace_abn_sync

X = torch.randn(4, 6, 7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradient(function, *parameters):
    """Output, and gradients of the input and parameters, after an operation that may be overwritten."""
    x = X.clone().requires_grad_()
    z = function(x * 1)
    torch.manual_seed(1)
    return [z.detach(), *torch.autograd.grad(z, (x, *parameters), torch.randn(z.shape, dtype=z.dtype))]


def same(got, want):
    return all(torch.allclose(g, w, rtol=1e-10, atol=1e-12) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("function", [inplace_abn, inplace_abn_sync])
@pytest.mark.parametrize("act, param", [("leaky_relu", 0.01), ("elu", 1.0), ("identity", 0.01)])
def test_timm_calls_the_function_by_position(function, act, param):
    weight, bias = torch.rand(6).double().requires_grad_(), torch.randn(6).double().requires_grad_()
    mean, var = torch.zeros(6).double(), torch.ones(6).double()
    plain_mean, plain_var = mean.clone(), var.clone()

    def timm(x):
        output = function(x, weight, bias, mean, var, True, 0.1, 1e-5, act, param)
        # It takes the tuple of release 1.0, too.
        return output[0] if isinstance(output, tuple) else output

    def plain(x):
        y = F.batch_norm(x, plain_mean, plain_var, weight, bias, True, 0.1, 1e-5)
        return {
            "leaky_relu": lambda y: F.leaky_relu(y, param),
            "elu": lambda y: F.elu(y, param),
            "identity": lambda y: y,
        }[act](y)

    if function is inplace_abn_sync:
        with pytest.warns(UserWarning, match="not initialised"):
            got = gradient(timm, weight, bias)
    else:
        got = gradient(timm, weight, bias)
    assert same(got, gradient(plain, weight, bias))
    assert same([mean, var], [plain_mean, plain_var])


def test_segmentation_models_pytorch_builds_slope_zero():
    norm = InPlaceABN(6, activation="leaky_relu", activation_param=0.0).double()
    assert isinstance(norm, InPlaceABN)
    block = nn.Sequential(nn.Conv2d(6, 6, 1, bias=False).double(), norm, nn.Identity())
    with pytest.warns(UserWarning, match="no inverse"):
        got = gradient(block, *block.parameters())
    plain = nn.Sequential(block[0], nn.BatchNorm2d(6).double(), nn.ReLU())
    assert same(got, gradient(plain, *plain.parameters()))


def test_seamseg_subclasses_with_the_order_of_1_0():
    class ActivatedAffine(ABN):
        def __init__(
            self, num_features, eps=1e-5, momentum=0.1, affine=True, activation="leaky_relu", activation_param=0.01
        ):
            super().__init__(num_features, eps, momentum, affine, activation, activation_param)

        def forward(self, x):
            alpha = self.weight * torch.rsqrt(self.running_var + self.eps)
            beta = self.bias - self.running_mean * alpha
            return F.leaky_relu(x * alpha.view(1, -1, 1, 1) + beta.view(1, -1, 1, 1), self.activation_param)

    with pytest.warns(DeprecationWarning, match="fifth argument 'leaky_relu'"):
        layer = ActivatedAffine(6, 1e-5, 0.1, True, "leaky_relu", 0.2).double()
    assert (layer.activation, layer.activation_param, layer.track_running_stats) == ("leaky_relu", 0.2, True)
    assert nn.init.calculate_gain(layer.activation, layer.activation_param) > 0
    with pytest.warns(DeprecationWarning, match="fifth argument"):
        lean = InPlaceABN(6, 1e-5, 0.1, True, "leaky_relu", 0.2).double().eval()
    assert same(gradient(lean, *lean.parameters()), gradient(layer, *layer.parameters()))
    with pytest.warns(DeprecationWarning, match="fifth argument"):
        assert InPlaceABN(6, 1e-5, 0.1, True, "elu").activation_param == 0.01


def test_seamseg_takes_the_activation_out_of_a_block():
    layer = InPlaceABN(6).double()
    layer.activation = "identity"
    plain = nn.BatchNorm2d(6).double()
    assert same(gradient(layer, *layer.parameters()), gradient(plain, *plain.parameters()))


@pytest.mark.parametrize("name", ["identity", "none"])
def test_ccnet_binds_the_activation_and_looks_at_class_names(name):
    BatchNorm2d = partial(InPlaceABNSync, activation=name)
    net = nn.Sequential(nn.Conv2d(6, 6, 1, bias=False), BatchNorm2d(6), nn.ReLU(inplace=False)).double()
    frozen = [m.eval() for m in net.modules() if type(m).__name__.find("InPlaceABN") != -1]
    assert len(frozen) == 1 and not net[1].training
    plain = nn.Sequential(net[0], nn.BatchNorm2d(6).double().eval(), nn.ReLU())
    assert same(gradient(net, *net.parameters()), gradient(plain, *plain.parameters()))


def test_ccnet_followed_by_an_in_place_relu_raises_with_the_cure():
    net = nn.Sequential(InPlaceABN(6, activation="identity"), nn.ReLU(inplace=True)).double()
    with pytest.raises(RuntimeError, match="inplace=False for the next activation"):
        gradient(net)


def test_releases_0_x_spell_slope():
    with pytest.warns(DeprecationWarning, match="activation_param"):
        assert InPlaceABN(6, slope=0.3).activation_param == 0.3


def test_a_network_of_batch_norms_loads_strictly():
    plain = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))
    ours = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), InPlaceABN(6), nn.Conv2d(6, 6, 3), InPlaceABN(6))
    for layer in (plain[1], plain[3]):
        nn.init.normal_(layer.weight)
    assert str(ours.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    for layer in (ours[1], ours[3]):
        layer.activation = "identity"
    x = torch.randn(2, 3, 9, 9)
    assert torch.allclose(ours.eval()(x), plain.eval()(x), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:relu has no inverse")
def test_segmentation_models_pytorch_trains_with_it():
    """A decoder built with use_norm="inplace" against one of plain batch norms, in float64; where it is installed."""
    zoo.torchvision()
    smp = pytest.importorskip("segmentation_models_pytorch")

    def build(norm):
        torch.manual_seed(0)
        net = smp.Unet(
            "resnet18", encoder_weights=None, classes=3, decoder_channels=(32, 16, 16, 8, 8), decoder_use_norm=norm
        )
        return zoo.lively(net).double()

    ours, plain = build("inplace"), build("batchnorm")
    assert any(isinstance(m, InPlaceABN) for m in ours.modules())
    names = [name for name in ours.state_dict() if name in plain.state_dict()]
    plain.load_state_dict({name: ours.state_dict()[name] for name in names}, strict=False)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert zoo.distance(zoo.gradients(ours, x), zoo.gradients(plain, x)) < 1e-9

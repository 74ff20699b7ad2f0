"""Five strategies, one function: what each computes, and what each keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bounds import reordered
from inplace_abn import ABN, InPlaceABN, saved_bytes
from inplace_abn.strategies import STRATEGIES, BNActConv

C = 6
pytestmark = pytest.mark.filterwarnings("ignore:.*has no inverse")


def unit(strategy, dtype=torch.float64, **options):
    torch.manual_seed(0)
    one = BNActConv(nn.Conv2d(C, 4, 3, padding=1, bias=False), C, strategy, **options).to(dtype)
    with torch.no_grad():
        one.norm.weight.copy_(torch.linspace(-1.4, 1.5, C))
        one.norm.bias.copy_(torch.linspace(-0.5, 0.5, C))
    return one


def step(one, x, dout):
    x = x.clone().requires_grad_()
    out = one(x * 1)
    return [out.detach(), *torch.autograd.grad(out, [x, *one.parameters()], dout), *one.buffers()]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("activation", ["leaky_relu", "elu", "relu"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_outputs_gradients_and_statistics_are_the_same(strategy, layout, activation):
    x, dout = (draw(3, c, 8, 7, seed=c).contiguous(memory_format=layout) for c in (C, 4))
    options = {"activation": activation, "activation_param": 1.0 if activation == "elu" else 0.1}
    for got, want in zip(
        step(unit(strategy, **options), x, dout), step(unit("standard", **options), x, dout), strict=True
    ):
        assert (got - want).abs().max() <= reordered(torch.float64, x.numel() * 9) * (1 + want.abs().max())


def kept(strategy):
    """Maps and vectors that autograd holds, parameters and buffers aside, of a unit behind a producer that keeps nothing."""
    one, found = unit(strategy, torch.float32), {}
    known = {t.untyped_storage()._cdata for t in (*one.parameters(), *one.buffers())}

    def pack(t):
        # With the node's own output, the node would hold itself for good.
        t = t.detach()
        if t.untyped_storage()._cdata not in known:
            # Held, so that no other storage takes its place.
            found[t.untyped_storage()._cdata] = t
        return t

    x = torch.randn(2, C, 16, 16).requires_grad_() * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = one(x)
    del x
    sizes = [t.untyped_storage().nbytes() // 4 for t in found.values()]
    del out
    return sizes.count(2 * C * 16 * 16), sizes.count(C), len(sizes)


@pytest.mark.parametrize(
    "strategy, maps, vectors",
    [("standard", 2, 2), ("checkpoint", 1, 2), ("checkpoint_xhat", 1, 1), ("inplace_1", 1, 1), ("inplace_2", 1, 1)],
)
def test_what_is_kept(strategy, maps, vectors):
    """μ and σ, or σ alone."""
    assert kept(strategy) == (maps, vectors, maps + vectors)


class Identity(nn.Module):
    """The paper's Figure 1: activations in front of three convolutions, and a shortcut around them."""

    def __init__(self, norm):
        super().__init__()
        self.norms = nn.ModuleList([norm(C) for _ in range(3)])
        self.convs = nn.ModuleList([nn.Conv2d(C, C, 3, padding=1, bias=False) for _ in range(3)])

    def forward(self, x):
        shortcut = x.clone()
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = conv(norm(x))
        return x + shortcut


@pytest.mark.parametrize("norm, maps", [(ABN, 6), (InPlaceABN, 3)])
def test_an_identity_block_keeps_six_maps_or_three(norm, maps):
    x = torch.randn(2, C, 16, 16)
    net = nn.Sequential(nn.Conv2d(C, C, 1, bias=False), Identity(norm))
    # Beside the first convolution's input, which is not counted.
    assert saved_bytes(net, x).total // x.nbytes == maps


class Block(nn.Module):
    """ResNeXt's bottleneck with activations in front; shortcuts are projected behind the first of them."""

    def __init__(self, norm, inside, width, outside, stride):
        super().__init__()
        self.bn1, self.bn2, self.bn3 = norm(inside), norm(width), norm(width)
        self.conv1 = nn.Conv2d(inside, width, 1, stride, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=64, bias=False)
        self.conv3 = nn.Conv2d(width, outside, 1, bias=False)
        self.projected = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 or inside != outside else None

    def forward(self, x):
        if self.projected is None:
            shortcut, h = x.clone(), self.bn1(x)
        else:
            h = self.bn1(x)
            shortcut = self.projected(h)
        return self.conv3(self.bn3(self.conv2(self.bn2(self.conv1(h))))) + shortcut


def resnext50(norm):
    blocks, inside = [], 64
    for i, depth in enumerate((3, 4, 6, 3)):
        for j in range(depth):
            blocks.append(Block(norm, inside, 128 << i, 256 << i, 2 if i and not j else 1))
            inside = 256 << i
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, norm(2048), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def test_bytes_kept_by_a_network_with_activations_in_front():
    kept = []
    for norm in (InPlaceABN, lambda c: nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(inplace=True))):
        with torch.device("meta"):
            net = resnext50(norm)
        kept.append(saved_bytes(net, torch.empty(4, 3, 224, 224, device="meta")).total)
    assert kept[0] <= 0.53 * kept[1]


def test_running_statistics_move_once():
    for strategy in STRATEGIES:
        one = unit(strategy)
        step(one, draw(3, C, 8, 7), draw(3, 4, 8, 7))
        assert one.norm.num_batches_tracked == 1


def test_an_unknown_strategy_is_named():
    with pytest.raises(ValueError, match="checkpoint_xhat"):
        BNActConv(nn.Conv2d(2, 2, 1), 2, "inplace")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation(strategy):
    x = draw(2, C, 5, 5)
    assert torch.allclose(unit(strategy).eval()(x), unit("standard").eval()(x), rtol=reordered(torch.float64, 9 * C))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inside_a_checkpoint_statistics_move_once(strategy):
    one = unit(strategy)
    x = draw(3, C, 8, 7).requires_grad_()
    checkpoint(one, x, use_reentrant=False).sum().backward()
    assert one.norm.num_batches_tracked == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_value_per_channel_is_refused(strategy):
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        unit(strategy)(draw(1, C, 1, 1).requires_grad_() * 1)


def test_another_reader_of_what_xhat_overwrote_raises():
    h = draw(3, C, 8, 7).requires_grad_() * 1
    loss = unit("checkpoint_xhat")(h).sum() + h.square().sum()
    with pytest.raises(RuntimeError, match="hand over a copy"):
        loss.backward()


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_second_derivatives_raise(strategy):
    """By what comes before alone, too."""
    x, scale = draw(3, C, 8, 7).requires_grad_(), draw(C, 1, 1).requires_grad_()
    (g,) = torch.autograd.grad(unit(strategy)(x * scale).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(g.square().sum(), scale)

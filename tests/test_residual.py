"""z = φ(BN(x) + r) over x: the same function and gradients as three plain steps, r only read, one map kept beside it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import worlds
from bounds import reordered, ulp
from inplace_abn import ABN, ACTIVATIONS, InPlaceABN, InPlaceABNSync, guard, inplace_abn, reference, saved_bytes
from inplace_abn.activations import resolve
from layouts import LAYOUTS

C = 5
SHAPE = (4, C, 6, 7)
INVERTIBLE = [name for name, phi in ACTIVATIONS.items() if phi.inverse is not None]


def draw(seed, shape=SHAPE, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layers(kind=InPlaceABN, dtype=torch.float64, **options):
    """The layer, and its plain twin."""
    pair = kind(C, **options), ABN(C, **{k: v for k, v in options.items() if k != "variant"})
    for layer in pair:
        layer.to(dtype)
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-1.5, 1.4, C))
            layer.bias.copy_(torch.linspace(-0.5, 0.5, C))
    return pair


def near(got, want, dtype=torch.float64, terms=torch.Size(SHAPE).numel()):
    return (got - want).abs().max() <= reordered(dtype, terms) * (1 + want.abs().max())


def step(layer, x, r, dz):
    x, r = x.clone().requires_grad_(), r.clone().requires_grad_()
    z = layer(x * 1, residual=r * 1)
    return [z.detach(), *torch.autograd.grad(z, [x, r, *layer.parameters()], dz), *layer.buffers()]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gap", "transposed"])
@pytest.mark.parametrize("variant", ["I", "II"])
@pytest.mark.parametrize("training", [True, False])
def test_equals_three_plain_steps(layout, variant, training):
    ours, plain = (layer.train(training) for layer in layers(variant=variant))
    base, view = LAYOUTS[layout](draw(0))
    for got, want in zip(
        step(ours, view(base), draw(1), draw(2)), step(plain, view(base), draw(1), draw(2)), strict=True
    ):
        assert near(got, want)


@pytest.mark.parametrize("name", INVERTIBLE)
def test_activations(name):
    for got, want in zip(
        *(step(layer, draw(0), draw(1), draw(2)) for layer in layers(activation=name, activation_param=1.0)),
        strict=True,
    ):
        assert near(got, want)


@pytest.mark.parametrize("variant", ["I", "II"])
def test_gradcheck(variant):
    x, r = draw(0, (3, 2, 3, 2)).requires_grad_(), draw(1, (3, 2, 3, 2)).requires_grad_()
    weight, bias = (t.clone().requires_grad_() for t in torch.tensor([[0.7, -1.2], [0.3, -0.1]], dtype=torch.float64))

    def call(x, r, weight, bias):
        return inplace_abn(
            x * 1, weight, bias, None, None, activation="elu", activation_param=1.0, variant=variant, residual=r * 1
        )

    assert torch.autograd.gradcheck(call, (x, r, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(16, C, 20, 20), (2, C, 1100, 1100)], ids=["small", "several tiles"])
def test_error_is_that_of_plain_torch(dtype, shape):
    """At most twice plain torch's, or that of the float64 verbs on the same stored z for dx and dγ, whichever is larger."""
    x, r, dz = (draw(i, shape, dtype) for i in range(3))
    ours, plain = (layer.float() for layer in layers())
    exact = copy.deepcopy(plain).double()
    truth = step(exact, x.double(), r.double(), dz.double())
    got, near = step(ours, x, r, dz), step(plain, x, r, dz)
    invstd = (x.double().var((0, 2, 3), correction=0) + ours.eps).rsqrt()
    phi, a = resolve(ours.activation, ours.activation_param)
    stored = (dz.double(), got[0].double(), ours.weight.detach(), ours.bias.detach(), invstd)
    dx, dgamma, _ = reference.input_grad_batch(*stored, ours.weight_floor, phi, a, "II", r.double())
    far = lambda v, i: (v.double() - truth[i]).norm()
    # dγ and dβ are sums of equally many terms of one size, which float32 adds up with more luck or less.
    allowed = [far(near[0], 0), max(far(near[1], 1), far(dx, 1)), far(near[2], 2)]
    allowed.append(max(far(near[3], 3), far(near[4], 4), far(dgamma, 3)))
    for i in range(4):
        # And one rounding of the result.
        assert far(got[i], i) <= 2 * allowed[i] + ulp(got[i].dtype) * truth[i].norm(), i


def test_r_is_only_read_and_x_overwritten():
    layer, _ = layers()
    h, r = draw(0).requires_grad_() * 1, draw(1)
    before = r.clone()
    z = layer(h, residual=r)
    assert z is h
    z.sum().backward()
    assert torch.equal(r, before)


def test_the_same_tensor_twice():
    ours, plain = layers()
    results = []
    for layer in (ours, plain):
        leaf = draw(0).requires_grad_()
        h = leaf * 1
        z = layer(h, residual=h)
        results.append([z.detach(), torch.autograd.grad(z, leaf, draw(2))[0]])
    assert all(torch.allclose(a, b) for a, b in zip(*results, strict=True))


def test_gradients_of_r_alone():
    gradients = []
    for layer in layers():
        r = draw(1).requires_grad_()
        gradients += torch.autograd.grad(layer.requires_grad_(False)(draw(0), residual=r), [r], draw(2))
    assert torch.allclose(*gradients)


def test_a_changed_residual_raises():
    layer, _ = layers()
    r = draw(1)
    z = layer(draw(0).requires_grad_() * 1, residual=r)
    r += 1
    with pytest.raises(RuntimeError, match="residual"):
        z.sum().backward()


def test_what_does_not_fit_is_refused_before_anything_is_written():
    layer, _ = layers()
    x = draw(0).requires_grad_() * 1
    before = x.detach().clone()
    for shape in ((SHAPE[0], C, 2, 1), (SHAPE[0] + 1, *SHAPE[1:])):
        with pytest.raises(ValueError, match="cannot be added"):
            layer(x, residual=draw(1, shape))
    assert torch.equal(x, before) and layer.num_batches_tracked == 0


@pytest.mark.parametrize("guarded", [False, True], ids=["inverted", "keeps x"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "of_x, of_r",
    [
        (SHAPE, (SHAPE[0], C, 1, 1)),
        (SHAPE, (1, 1, *SHAPE[2:])),
        (SHAPE, ()),
        ((SHAPE[0], C, 1, 1), SHAPE),
        ((SHAPE[0], C, SHAPE[2], 1), (SHAPE[0], C, 1, SHAPE[3])),
        ((SHAPE[0], C), (2, SHAPE[0], C)),
    ],
    ids=str,
)
def test_sums_broadcast_as_torchs_do(of_x, of_r, training, guarded, monkeypatch):
    """Where z has x's shape x is overwritten; where z is larger it is a new tensor."""
    if guarded:
        monkeypatch.setattr(guard, "LIMIT", 0.0)
    x, r = draw(0, of_x), draw(1, of_r)
    dz = draw(2, torch.broadcast_shapes(of_x, of_r))
    found = []
    for layer in layers(activation="elu", activation_param=1.0):
        layer.train(training)
        leaves = [t.clone().requires_grad_() for t in (x, r)]
        h = leaves[0] * 1
        z = layer(h, residual=leaves[1])
        if isinstance(layer, InPlaceABN):
            assert (z is h) == (z.shape == x.shape and not guarded)
        wanted = [*leaves, layer.weight, layer.bias]
        found.append([z.detach(), *torch.autograd.grad(z, wanted, dz), layer.running_mean, layer.running_var])
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape and near(got, want)


def test_another_dtype_is_cast():
    layer, _ = layers(dtype=torch.float32)
    x, r = draw(0, dtype=torch.bfloat16), draw(1, dtype=torch.float32).requires_grad_()
    z = layer(x.requires_grad_() * 1, residual=r)
    assert z.dtype == torch.bfloat16
    z.sum().backward()
    assert r.grad.dtype == torch.float32 and torch.equal(z, layer.train()(x * 1, residual=r.bfloat16()))


@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
def test_relu_is_exact(name):
    with pytest.warns(UserWarning, match="no inverse"):
        ours, plain = layers(activation=name, activation_param=0.0)
        for got, want in zip(*(step(layer, draw(0), draw(1), draw(2)) for layer in (ours, plain)), strict=True):
            assert torch.allclose(got, want)


class Block(nn.Module):
    """A bottleneck with its activation behind the sum."""

    def __init__(self, channels, norm):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(3)])
        self.norms = nn.ModuleList([norm(channels) for _ in range(3)])

    def forward(self, x):
        h = self.norms[0](self.convs[0](x))
        h = self.norms[1](self.convs[1](h))
        return self.norms[2](self.convs[2](h), residual=x)


def test_a_block_keeps_one_map_per_convolution():
    x = torch.randn(2, 8, 32, 32)
    kept = {}
    for norm in (InPlaceABN, ABN):
        torch.manual_seed(0)
        net = nn.Sequential(*[Block(8, norm) for _ in range(4)])
        kept[norm] = saved_bytes(net, x).total
    # The input, and 12 maps; the plain ones keep two each.
    assert kept[InPlaceABN] <= 13 * x.nbytes + 10_000
    assert kept[ABN] >= 24 * x.nbytes


def test_compiled():
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(8, InPlaceABN) for _ in range(2)])
    twin = copy.deepcopy(net)
    call = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 8, 9, 9)
    results = [torch.autograd.grad(f(x).square().mean(), list(m.parameters())) for f, m in ((call, net), (twin, twin))]
    for got, want in zip(*results, strict=True):
        assert near(got, want, torch.float32, x.numel() * 9 * 8 * 6)


# What is normalised, and what is added: alike, broadcast to it, and larger.
SIDES = [((3, 3), (3, 3)), ((3, 3), (1, 3)), ((3, 1), (3, 3))]


def of_rank(rank, sides):
    shapes = [(2 + rank, C, *side) for side in (*sides, (3, 3))]
    return [draw(10 * (i + 1) + rank, shape) for i, shape in enumerate(shapes)]


def ranked(rank, world):
    return [
        [t.clone() for t in step(layers(InPlaceABNSync, dtype=torch.float64)[0], *of_rank(rank, sides))]
        for sides in SIDES
    ]


def test_synchronised():
    for sides, *got in zip(SIDES, *worlds.run(2, ranked), strict=True):
        _, plain = layers()
        want = step(
            plain, *(torch.cat(both) for both in zip(*(of_rank(rank, sides) for rank in range(2)), strict=True))
        )
        for i in range(3):
            assert torch.allclose(torch.cat([g[i] for g in got]), want[i], rtol=reordered(torch.float64, 63))
        for i in (3, 4):
            assert torch.allclose(got[0][i] + got[1][i], want[i], rtol=reordered(torch.float64, 63))
        assert all(torch.allclose(got[0][i], want[i], rtol=reordered(torch.float64, 63)) for i in (5, 6))

"""Under torch.compile: the same gradients and statistics as eager, the same bytes kept, no copy left where x is dead."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bounds import reordered
from inplace_abn import ACTIVATIONS, InPlaceABN
from inplace_abn.activations import resolve

# Dynamo's own doing.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INDUCTOR = pytest.param(
    "inductor",
    marks=pytest.mark.skipif(DEVICE == "cpu" and shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
)
BACKENDS = ["aot_eager", INDUCTOR]
INVERTIBLE = [name for name, phi in ACTIVATIONS.items() if phi.inverse is not None]


class Net(nn.Module):
    """Convolutions and layers; with a residual sum, or a producer that keeps its output, if asked."""

    def __init__(self, residual=False, squashed=False, broken=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False) for i in range(3)])
        self.norms = nn.ModuleList([InPlaceABN(8, **options) for _ in range(3)])
        self.head = nn.Conv2d(8, 2, 1)
        self.residual, self.squashed, self.broken = residual, squashed, broken
        with torch.no_grad():
            for norm in self.norms:
                norm.weight.uniform_(-1.5, 1.5)
                norm.bias.normal_(std=0.3)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = conv(x)
            if self.squashed:
                h = torch.sigmoid(h)
            if self.broken:
                torch._dynamo.graph_break()
            h = norm(h)
            x = h + x if self.residual and x.shape == h.shape else h
        return self.head(x)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(net, call, x):
    net.zero_grad(set_to_none=True)
    call(x).square().mean().backward()
    return [p.grad for p in net.parameters()], [b.clone() for b in net.buffers()]


# Sums of a thousand terms, in another order: convolutions are inductor's to arrange.
REORDERED = reordered(torch.float32, 1024)


def alike(net, call, twin, xs, tolerance=REORDERED):
    for x in xs:
        got, want = step(net, call, x), step(twin, twin, x)
        for mine, theirs in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
            assert (mine - theirs).abs().max() <= tolerance * (1 + theirs.abs().max())


def batch(*shape):
    return torch.randn(*(shape or (4, 3, 16, 16)), device=DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"residual": True}, {"squashed": True}, {"momentum": None}, {"weight_floor": 0.5, "eps": torch.tensor(0.25)}],
    ids=str,
)
def test_training_equals_eager(options, backend):
    net = Net(**options).to(DEVICE)
    twin = copy.deepcopy(net)
    alike(net, torch.compile(net, fullgraph=True, backend=backend), twin, [batch(), batch()])


@pytest.mark.parametrize("name", INVERTIBLE)
def test_activations_and_variants(name):
    for variant in ("I", "II"):
        net = Net(activation=name, activation_param=1.0, variant=variant).to(DEVICE)
        torch._dynamo.reset()
        alike(net, torch.compile(net, fullgraph=True, backend="aot_eager"), copy.deepcopy(net), [batch()])


def test_one_graph_serves_all_shapes():
    net = Net().to(DEVICE)
    twin = copy.deepcopy(net)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(net, fullgraph=True, dynamic=True, backend=counter)
    alike(net, call, twin, [batch(2, 3, 16, 12)])
    built = counter.frame_count
    alike(net, call, twin, [batch(3, 3, 20, 13), batch(5, 3, 11, 9)])
    assert counter.frame_count == built


def test_after_a_graph_break():
    net = Net(broken=True).to(DEVICE)
    alike(net, torch.compile(net, backend="aot_eager"), copy.deepcopy(net), [batch()])


@pytest.mark.parametrize("backend", BACKENDS)
def test_alone_with_its_input_from_outside(backend):
    layer = InPlaceABN(8).to(DEVICE)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x, weight = batch(4, 8, 6, 6).requires_grad_(), batch(4, 8, 6, 6)
    results = [
        torch.autograd.grad((f(x * 1) * weight).sum(), [x, *m.parameters()])
        for f, m in ((compiled, layer), (twin, twin))
    ]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))
    h = (x * 1).detach().requires_grad_()
    before = h.detach().clone()
    compiled(h)
    assert torch.equal(h, before)


@pytest.mark.parametrize("how", ["channels_last", "autocast", "checkpoint", "no_grad", "eval"])
def test_ways_of_calling(how):
    net = Net().to(DEVICE)
    x = batch()
    if how == "channels_last":
        net, x = net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    if how in ("no_grad", "eval"):
        for module in (net, twin):
            module.train(how == "no_grad")
        with torch.no_grad():
            assert torch.allclose(compiled(x), twin(x), atol=1e-5)
        assert all(torch.allclose(a, b) for a, b in zip(net.buffers(), twin.buffers(), strict=True))
        return
    call, plain = compiled, twin
    if how == "autocast":
        call, plain = (torch.autocast(DEVICE, torch.bfloat16)(f) for f in (compiled, twin))
    elif how == "checkpoint":
        call = torch.compile(lambda x: checkpoint(net, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    got, want = step(net, call, x), step(twin, plain, x)
    for mine, theirs in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert (mine - theirs).abs().max() <= REORDERED * (1 + theirs.abs().max())
    assert all(norm.num_batches_tracked == 1 for norm in net.norms)


# Of the graph with which the compiler makes its pool.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("options", [{}, {"residual": True}, {"momentum": None}], ids=str)
def test_cuda_graphs_of_the_compiler(options):
    """Warmed up, recorded and replayed: nothing of the layer's may stay in the pool of the graphs."""
    net = Net(**options).to(DEVICE, memory_format=torch.channels_last)
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, fullgraph=True, mode="reduce-overhead")
    # Few members to a slab, and many.
    for shape in ((4, 3, 16, 16), (8, 3, 64, 64)):
        alike(net, compiled, twin, [batch(*shape) for _ in range(4)])


def kept(call, x):
    """Bytes of the storages that autograd holds between forward and backward, parameters aside."""
    storages = {}

    def pack(t):
        if not isinstance(t, nn.Parameter):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(x)
    return sum(storages.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_kept_are_those_of_eager(backend):
    net = Net().to(DEVICE)
    x = batch(4, 3, 32, 32)
    eager = kept(net, x)
    assert kept(torch.compile(net, fullgraph=True, backend=backend), x) <= 1.05 * eager
    # x, and one map for each of the three layers.
    assert eager <= x.nbytes * (1 + 3 * 8 / 3) + 10_000


@pytest.mark.skipif(DEVICE == "cpu" and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_leaves_no_copy():
    from torch._inductor.utils import run_and_get_code

    net = Net().to(DEVICE)
    _, (forward, backward) = run_and_get_code(lambda: torch.compile(net, fullgraph=True)(batch()).sum().backward())
    body = forward[forward.index("def call(") :]
    ran = [line.strip() for line in body.splitlines() if not line.strip().startswith("#")]
    assert sum("= torch.ops.inplace_abn.forward_" in line for line in ran) == 3
    # One map from each convolution, which the layer writes over; nothing is allocated beside it, nothing copied.
    assert not [line for line in ran if ("empty_strided" in line and "(4, 8, 16, 16)" in line) or "clone" in line]
    ran = [line.strip() for line in backward.splitlines() if not line.strip().startswith("#")]
    assert sum("= torch.ops.inplace_abn.backward" in line for line in ran) == 3


def test_the_operators_are_what_they_say():
    weight, bias = torch.rand(4) + 0.5, torch.randn(4)
    buffers = torch.zeros(4), torch.ones(4), torch.tensor(0)
    _, a = resolve("leaky_relu", 0.1)
    for x in (torch.randn(3, 4, 5), torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)):
        rest = (1e-5, "leaky_relu", a)
        forward, backward = torch.ops.inplace_abn.forward_.default, torch.ops.inplace_abn.backward.default
        torch.library.opcheck(forward, (x.clone(), weight, bias, *buffers, 0.1, 1e-5, *rest))
        torch.library.opcheck(forward, (x.clone(), None, None, None, None, None, None, 1e-5, *rest))
        torch.library.opcheck(backward, (torch.randn_like(x), x, weight, bias, torch.rand(4), *rest, "II"))
        r = torch.randn_like(x)
        torch.library.opcheck(forward, (x.clone(), weight, bias, *buffers, 0.1, 1e-5, *rest, r))
        for need_r in (False, True):
            saved = (torch.randn_like(x), x, weight, bias, torch.rand(4), *rest, "I")
            torch.library.opcheck(backward, (*saved, r, need_r))


def test_second_derivatives_raise():
    layer = InPlaceABN(3).double()
    before = torch.randn(3, dtype=torch.double, requires_grad=True)
    x = torch.randn(4, 3, 2, dtype=torch.double, requires_grad=True)
    z = torch.compile(layer, fullgraph=True, backend="aot_eager")(x * before[:, None])
    (dx,) = torch.autograd.grad(z.pow(3).sum(), x, create_graph=True)
    for ask in (lambda: dx.sum().backward(retain_graph=True), lambda: torch.autograd.grad(dx.square().sum(), before)):
        with pytest.raises(RuntimeError, match="twice|double backward|once_differentiable|does not require grad"):
            ask()


def test_the_operators_gradient_is_not_taken_for_a_constant():
    z, dz, invstd = torch.randn(4, 3, 2), torch.randn(4, 3, 2, requires_grad=True), torch.rand(3)
    dx, *_ = torch.ops.inplace_abn.backward(dz, z, None, None, invstd, 1e-5, "leaky_relu", 0.01, "II")
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()


def test_a_memory_budget_still_works():
    net = Net().to(DEVICE)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        alike(net, torch.compile(net, fullgraph=True, backend="aot_eager"), copy.deepcopy(net), [batch()])


def test_a_plain_twin_agrees():
    """The oracle of these tests is the eager layer; here it is torch's own batch norm."""
    net = Net().to(DEVICE)
    x = batch()
    h = x
    for conv, norm in zip(net.convs, net.norms, strict=True):
        h = F.leaky_relu(F.batch_norm(conv(h), None, None, norm.weight, norm.bias, True, 0.1, norm.eps), 0.01)
    want = torch.autograd.grad(net.head(h).square().mean(), list(net.parameters()))
    got, _ = step(net, torch.compile(net, fullgraph=True, backend="aot_eager"), x)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))

"""Exact activations at one stored map: the same bits and gradients, less kept, nothing left behind."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bounds import reordered
from inplace_abn import ABN, ACTIVATIONS, InPlaceABN, models, recompute, saved_bytes
from inplace_abn.memory import LiveBytes

room = importlib.import_module("inplace_abn.recompute")
pytestmark = pytest.mark.filterwarnings("ignore:.*has no inverse")
FLAT = [name for name, phi in ACTIVATIONS.items() if phi.inverse is None]
C = 6


class Block(nn.Module):
    """Two convolutions, each behind a layer, and a sum in front of the last activation."""

    def __init__(self, norm, channels=C):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)])
        self.norms = nn.ModuleList([norm(channels) for _ in range(2)])

    def forward(self, x):
        return self.norms[1](self.convs[1](self.norms[0](self.convs[0](x))), residual=x)


def network(norm, blocks=9, dtype=torch.float64):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, C, 3, padding=1), norm(C), *[Block(norm) for _ in range(blocks)], nn.Conv2d(C, 2, 1)
    )
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() == 1:
                p.uniform_(-1, 1.5)
    return net.to(dtype)


def gradients(net, x):
    net.zero_grad(set_to_none=True)
    net(x).square().sum().backward()
    return [p.grad for p in net.parameters()]


def batch(dtype=torch.float64):
    return torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


relu = functools.partial(InPlaceABN, activation="relu")


def near(got, want, dtype=torch.float64, layers=5):
    """Of networks of so many layers: every value is behind 9·C products per layer and pixel."""
    terms = batch().numel() // 3 * C * 9 * C * layers
    return (got - want).abs().max() <= reordered(dtype, terms) * (1 + want.abs().max())


@pytest.mark.parametrize("name", FLAT)
def test_gradients_are_those_of_plain_steps(name):
    plain, exact = (network(functools.partial(kind, activation=name), 2) for kind in (ABN, InPlaceABN))
    recompute(exact)
    for got, want in zip(gradients(exact, batch()), gradients(plain, batch()), strict=True):
        assert near(got, want)
    for got, want in zip(exact.buffers(), plain.buffers(), strict=True):
        assert near(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_with_or_without_recomputing_the_same_bits(dtype):
    """Through chains of residual sums with anchors in them."""
    kept, exact = network(relu, 9, dtype), recompute(network(relu, 9, dtype))
    assert all(map(torch.equal, gradients(exact, batch(dtype)), gradients(kept, batch(dtype))))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_comes_back_is_z_to_the_bit_and_once_for_all_readers(monkeypatch, dtype, layout):
    computed = []
    value = room.Record.value
    monkeypatch.setattr(room.Record, "value", lambda self: computed.append(self.z is None) or value(self))
    layer, readers = relu(C), [nn.Conv2d(C, 2, 1, bias=False).to(dtype) for _ in range(3)]
    seen = []

    class Net(nn.Module):
        def forward(self, x):
            z = layer(x)
            seen.append(z.detach().clone())
            return sum(reader(z) for reader in readers)

    net = recompute(Net())
    x = torch.randn(2, C, 7, 7).to(dtype).contiguous(memory_format=layout)
    out = net(x.requires_grad_() * 1)
    saved = [n for n in (f[0] for f in walk(out.grad_fn)) if "Convolution" in type(n).__name__]
    inputs = [node._saved_input for node in saved]
    assert len(inputs) == 3 and all(torch.equal(z, seen[0]) and z.stride() == seen[0].stride() for z in inputs)
    computed.clear()
    out.sum().backward()
    assert computed == [True, False, False]


def walk(node, seen=None):
    seen = set() if seen is None else seen
    if node is not None and node not in seen:
        seen.add(node)
        yield (node,)
        for following, _ in node.next_functions:
            yield from walk(following, seen)


def test_z_is_freed_and_nothing_lives_in_a_circle():
    net = recompute(network(relu, 6))
    gc.collect()
    gc.disable()
    try:
        out = net(batch())
        records = [weakref.ref(r) for r in room._RECORDS.values()]
        assert len(records) > 6
        out.sum().backward()
        assert all(r() is None or r().z is None for r in records)
        del out
        assert not [r for r in records if r() is not None]
        # A graph that never ran goes, too.
        net(batch())
        assert not len(room._RECORDS)
    finally:
        gc.enable()


def test_backward_twice():
    net = recompute(network(relu, 5))
    loss = net(batch()).square().sum()
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, list(net.parameters()))))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", [True, False])
def test_with_checkpointing(reentrant, around):
    """Outside of a checkpointed part, and inside."""
    exact, twin = network(relu, 5), network(relu, 5)
    if around:
        marked = recompute(exact)
        call = lambda x: checkpoint(marked, x, use_reentrant=reentrant)
    else:

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = exact

            def forward(self, x):
                for module in self.inner:
                    x = checkpoint(module, x, use_reentrant=reentrant)
                return x

        call = recompute(Outer())
    x = batch().requires_grad_()
    call(x).square().sum().backward()
    got = [p.grad for p in exact.parameters()]
    for mine, theirs in zip(got, gradients(twin, batch()), strict=True):
        assert near(mine, theirs, layers=11)
    # Moved once; a reentrant checkpoint's first run has no graph, and takes torch's own batch norm.
    assert all(near(a, b, layers=11) for a, b in zip(exact.buffers(), twin.buffers(), strict=True))


def test_readers_that_write_to_z():
    """In front of a convolution and behind it: right either way, or an error, as with tensors that are kept."""

    class Net(nn.Module):
        def __init__(self, behind):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.conv, self.behind = relu(C).double(), nn.Conv2d(C, C, 1).double(), behind

        def forward(self, x):
            z = self.norm(x)
            if not self.behind:
                z = z.mul_(3)
            out = self.conv(z)
            return out + z.mul_(3) if self.behind else out

    class Clean(Net):
        def forward(self, x):
            z = self.norm(x)
            return self.conv(z) + z * 3 if self.behind else self.conv(z * 3)

    for behind in (False, True):
        x = torch.randn(2, C, 4, 4, dtype=torch.float64)
        results = []
        for net in (recompute(Net(behind)), Clean(behind)):
            leaf = x.clone().requires_grad_()
            net(leaf * 1).square().sum().backward()
            results.append([leaf.grad, *(p.grad for p in net.parameters())])
        assert all(torch.allclose(a, b) for a, b in zip(*results, strict=True))


def test_a_view_of_z():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.fc = relu(C), nn.Linear(C * 4, 3)

        def forward(self, x):
            return self.fc(self.norm(x).flatten(1)[1:])

    x = torch.randn(5, C, 2, 2)
    assert all(map(torch.equal, gradients(recompute(Net()), x), gradients(Net(), x)))
    assert (
        saved_bytes(recompute(Net()), x.clone().requires_grad_()).total
        < saved_bytes(Net(), x.clone().requires_grad_()).total
    )


def test_an_error_inside_leaves_no_hooks_behind():
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError("broken")

    with pytest.raises(KeyError):
        recompute(nn.Sequential(relu(C), Broken()))(torch.randn(2, C, 3, 3))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None and not room._ENTERED.modules


def test_in_place_layers_inside_still_write_over_their_input():
    layer = InPlaceABN(C)
    written = []
    layer.register_forward_hook(lambda module, inputs, z: written.append(z is inputs[0]))
    recompute(nn.Sequential(nn.Conv2d(3, C, 1), layer))(torch.randn(2, 3, 4, 4))
    assert written == [True]


def test_marked_modules_copy_compile_and_evaluate():
    net = recompute(network(relu, 3, torch.float32))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert saved_bytes(twin, batch(torch.float32)).total == saved_bytes(net, batch(torch.float32)).total
    want = gradients(twin, batch(torch.float32))
    torch._dynamo.reset()
    call = torch.compile(net, fullgraph=True, backend="aot_eager")
    call(batch(torch.float32)).square().sum().backward()
    for got, theirs in zip((p.grad for p in net.parameters()), want, strict=True):
        assert near(got, theirs, torch.float32, 7)
    for module in (net.eval(), twin.eval()):
        module.load_state_dict(net.state_dict())
    with torch.no_grad():
        assert torch.equal(net(batch(torch.float32)), twin(batch(torch.float32)))


@pytest.mark.parametrize("training", [True, False])
def test_frozen_statistics_and_zero_gamma(training):
    plain, exact = network(functools.partial(ABN, activation="relu"), 2), recompute(network(relu, 2))
    for net in (plain, exact):
        net.train(training)
        with torch.no_grad():
            for module in net.modules():
                if isinstance(module, ABN):
                    module.weight[:3] = 0
    for got, want in zip(gradients(exact, batch()), gradients(plain, batch()), strict=True):
        assert near(got, want)


class Standard(ABN):
    """Batch norm, sum and in-place ReLU as torch's own models have them."""

    def forward(self, x, residual=None):
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True)
        if residual is not None:
            y += residual
        return F.relu_(y) if self.activation == "relu" else y


SHAPE = (4, 3, 224, 224)


def peak_of_a_step(net: torch.nn.Module, *shape: int) -> tuple[int, int]:
    """Bytes alive between forward and backward on the meta device, and the most at once; parameters aside."""
    x = torch.empty(*shape, device="meta")
    with LiveBytes() as live:
        live.know(x, *net.parameters(), *net.buffers())
        loss = net(x).sum()
        between = live.now
        loss.backward()
    return between, live.peak


@functools.cache
def counted(name, kind):
    norm = {"standard": functools.partial(Standard, activation="relu"), "leaky": InPlaceABN, "relu": relu}[kind]
    with torch.device("meta"):
        net = getattr(models, name)(norm_act=norm)
    if kind == "relu":
        recompute(net)
    return saved_bytes(net, torch.empty(SHAPE, device="meta")).total, *peak_of_a_step(net, *SHAPE)


def test_bytes_kept_by_resnet50():
    standard, leaky, exact = (counted("resnet50", kind)[0] for kind in ("standard", "leaky", "relu"))
    assert leaky <= 0.57 * standard and exact <= 0.60 * standard
    # What README says.
    assert (round(leaky / standard, 2), round(exact / standard, 2)) == (0.55, 0.56)


@pytest.mark.parametrize("name", ["resnet50", "resnet101", pytest.param("resnet152", marks=pytest.mark.long)])
def test_neither_bytes_kept_nor_the_peak_grow_back(name):
    kept, between, peak = counted(name, "relu")
    weights = 4 * sum(p.numel() for p in getattr(models, name)(norm_act=ABN).parameters())
    # Between forward and backward only what is kept is alive, and backward brings the weights' gradients, dz and a few maps.
    assert between <= 1.01 * kept
    assert peak <= 1.13 * kept + weights
    assert peak <= 0.63 * counted(name, "standard")[2] + weights


def test_without_anchors_deep_networks_peak_higher(monkeypatch):
    peak = counted("resnet101", "relu")[2]
    monkeypatch.setattr(room, "ANCHOR", 1000)
    with torch.device("meta"):
        net = recompute(models.resnet101(norm_act=relu))
    _, without = peak_of_a_step(net, *SHAPE)
    assert without >= 1.1 * peak


class Of(nn.Module):
    """A function of some modules."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *inputs):
        return self.function(self.parts, *inputs)


def conv(inside, outside):
    return nn.Conv2d(inside, outside, 1).double()


def test_tensors_changed_in_place_are_found_out_as_ever():
    """Torch itself checks nothing where saved-tensor hooks are active."""

    def overwritten(parts, x):
        h = parts[0](x)
        return (h * h).sum() + parts[1](h).square().sum()

    def edited(parts, x):
        z = parts[1](parts[0](x))
        z += 1
        return z.square().sum()

    def plain(parts, x):
        return parts[0](x).exp().mul_(2).sum()

    for function in (overwritten, edited, plain):
        net = recompute(Of(function, conv(2, 4), InPlaceABN(4).double()))
        loss = net(torch.randn(2, 2, 3, 3, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="modified by an inplace operation|changed in place"):
            loss.backward()


@pytest.mark.parametrize("last", [nn.Sigmoid(), InPlaceABN(4), relu(4)], ids=lambda m: type(m).__name__)
def test_a_forward_pass_without_a_backward_pass_leaves_nothing(last):
    out = recompute(nn.Sequential(nn.Conv2d(2, 4, 1), last))(torch.randn(1, 2, 30, 30))
    storage = room.StorageWeakRef(out.untyped_storage())
    del out
    assert storage.expired()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ["unfold", "expand"])
def test_inputs_that_overlap_themselves(how, training):
    results = []
    for kind in (InPlaceABN, ABN):
        layer = kind(4, activation="relu").double().train(training)
        g = torch.Generator().manual_seed(0)
        x = torch.randn(2, 4, 8 if how == "unfold" else 1, generator=g, dtype=torch.float64).requires_grad_()
        seen = x.unfold(2, 3, 1) if how == "unfold" else x.expand(2, 4, 6)
        r = torch.randn(seen.shape, generator=g, dtype=torch.float64).requires_grad_()
        z = layer(seen, residual=r)
        dz = torch.randn(seen.shape, generator=g, dtype=torch.float64)
        results.append([z.detach(), *torch.autograd.grad(z, [x, r, *layer.parameters()], dz)])
    assert all(near(a, b, layers=1) for a, b in zip(*results, strict=True))


def test_readers_of_another_dtype_or_without_gradient():
    weight = torch.full((4, 3), 1 + 0.5j, dtype=torch.complex128)

    def as_complex(parts, x):
        return torch.view_as_real(torch.view_as_complex(parts[1](parts[0](x))) * parts[2].weight)

    def detached(parts, x):
        z = parts[1](parts[0](x))
        return z.mean() + parts[2](z.detach()).square().sum()

    for function, shape in ((as_complex, (2, 2, 3, 2)), (detached, (2, 2, 3, 3))):
        results = []
        for mark in (recompute, lambda net: net):
            torch.manual_seed(0)
            last = conv(4, 1)
            if function is as_complex:
                last = nn.Module()
                last.weight = nn.Parameter(weight.clone())
            net = mark(Of(function, conv(2, 4), relu(4).double(), last))
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            net(x).square().sum().backward()
            results.append([p.grad for p in net.parameters()])
        assert all(map(torch.equal, *results))


def test_parameters_changed_between_two_backward_passes():
    reader = recompute(conv(4, 1))
    net = nn.Sequential(conv(2, 4), relu(4).double())
    loss = reader(net(torch.randn(2, 2, 3, 3, dtype=torch.float64))).square().sum()
    torch.autograd.grad(loss, reader.weight, retain_graph=True)
    with torch.no_grad():
        net[1].weight.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_marked_model_under_torch_func():
    net = recompute(nn.Sequential(conv(2, 4), relu(4).double()))
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    got = torch.func.grad(lambda x: net.eval()(x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    assert torch.allclose(got, torch.autograd.grad(net(leaf).square().sum(), leaf)[0])


def test_a_module_that_never_began_takes_no_others_hooks_away():
    inner = nn.Conv2d(4, 4, 1)

    def fails(module, inputs):
        raise KeyError("before")

    inner.register_forward_pre_hook(fails)
    recompute(inner)

    def outer(parts, x):
        z = parts[1](parts[0](x))
        try:
            inner(z)
        except KeyError:
            pass
        return parts[2](z)

    parts = nn.Conv2d(2, 4, 1), relu(4), nn.Conv2d(4, 4, 1)
    x = torch.randn(2, 2, 9, 9)
    marked = saved_bytes(recompute(Of(outer, *parts)), x).total
    assert saved_bytes(nn.Sequential(*parts), x).total - marked == 2 * 4 * 81 * 4

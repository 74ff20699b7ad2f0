from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import ABN, InPlaceABN, saved_bytes
from inplace_abn.memory import peak_bytes

N, C, S = 2, 16, 16
MAP = N * C * S * S * 4


def block(norm):
    return [norm(C), nn.Conv2d(C, C, 3, padding=1, bias=False)]


def standard(channels):
    return nn.Sequential(nn.BatchNorm2d(channels), nn.LeakyReLU(0.01, inplace=True))


def chain(norm, depth=8):
    """A pre-activation chain: stem, then (BN, act, conv) again and again."""
    blocks = [layer for _ in range(depth) for layer in block(norm)]
    return nn.Sequential(nn.Conv2d(3, C, 3, padding=1, bias=False), *blocks)


@pytest.mark.parametrize("variant", ["I", "II"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_chain_of_eight_keeps_at_most_052_of_standard(variant, training, layout):
    x = torch.randn(N, 3, S, S).contiguous(memory_format=layout)
    lean = chain(lambda c: InPlaceABN(c, variant=variant)).train(training)
    plain = chain(standard).train(training)
    ours, theirs = saved_bytes(lean, x).total, saved_bytes(plain, x).total
    assert ours <= 0.52 * theirs
    # Eight maps and one vector per layer, float32 in training and float64 for fixed statistics.
    assert ours == 8 * (MAP + C * (4 if training else 8))
    # Standard keeps the convolution's output and z, and two vectors in training.
    assert theirs == 16 * MAP + (8 * 2 * C * 4 if training else 0)


def test_abn_keeps_what_standard_keeps():
    x = torch.randn(N, 3, S, S)
    assert saved_bytes(chain(ABN), x).by_module["1"] == 2 * MAP + 2 * C * 4
    assert saved_bytes(chain(ABN), x).total == saved_bytes(chain(standard), x).total


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_halves_the_maps(dtype):
    x = torch.randn(N, 3, S, S, dtype=dtype)
    assert saved_bytes(chain(InPlaceABN).to(dtype), x).total == 8 * (MAP // 2 + C * 4)


@pytest.mark.parametrize("kind", ["leaf", "chunk", "hook", "sigmoid"])
def test_one_map_is_kept_even_where_x_cannot_be_overwritten(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.last = (
                nn.Conv2d(C, C, 1, bias=False),
                InPlaceABN(C),
                nn.Conv2d(C, C, 1, bias=False),
            )
            if kind == "hook":
                self.norm.register_full_backward_hook(lambda *_: None)

        def forward(self, x):
            if kind == "leaf":
                return self.last(self.norm(x))
            between = {"chunk": lambda h: h.chunk(1)[0], "hook": lambda h: h, "sigmoid": torch.sigmoid}[kind]
            return self.last(self.norm(between(self.conv(x))))

    x = torch.randn(N, C, S, S, requires_grad=True)
    # The sigmoid needs its own output; everything else keeps z alone.
    assert saved_bytes(Net(), x).total == MAP * (2 if kind == "sigmoid" else 1) + C * 4


def test_bytes_by_module_name_add_up_and_print():
    net = nn.Sequential(nn.Conv2d(3, C, 3, padding=1, bias=False), standard(C), nn.Sequential(*block(InPlaceABN)))
    saved = saved_bytes(net, torch.randn(N, 3, S, S))
    assert sum(saved.by_module.values()) == saved.total
    assert saved.by_module["1.0"] == MAP + 2 * C * 4 and saved.by_module["1.1"] == MAP
    lines = [line.split() for line in str(saved).splitlines()]
    assert [line[0] for line in lines] == ["1.0", "1.1", "2.0", "total"] and lines[-1][1:] == [
        f"{saved.total:,}",
        "B",
        "100.0%",
    ]


def test_shared_storages_views_and_excluded_tensors_count_once_or_not():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(C, C))

        def forward(self, x):
            a = x * 2  # constant times x: keeps nothing
            b = a.sin()  # keeps a
            c = a[:1].exp() * a[:1].cos()  # keeps views of a, and three new ones of half its size
            return (b.mean() + c.mean()) * self.weight.t().sum()  # keeps scalars

    x = torch.randn(2, 100, requires_grad=True)
    a, half, scalar = 800, 400, 4
    # exp keeps its output; the product keeps exp's and cos's outputs.
    assert saved_bytes(Net(), x).total == a + 2 * half + 2 * scalar


def test_what_is_freed_during_the_forward_pass_is_not_counted():
    class Net(nn.Module):
        def forward(self, x):
            (x.exp() * 3).sin()
            return x.cos()

    assert saved_bytes(Net(), torch.randn(10, requires_grad=True)).total == 0


def test_everything_is_as_before_afterwards():
    net = nn.Sequential(nn.Conv2d(3, C, 3), InPlaceABN(C), nn.Dropout(), nn.BatchNorm2d(C))
    net[3].eval()
    x = torch.randn(N, 3, S, S)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    identities = [id(b) for b in net.buffers()]
    copy = x.clone()
    torch.manual_seed(7)
    want = torch.rand(1)
    torch.manual_seed(7)
    with torch.no_grad():
        assert saved_bytes(net, x).total > 0
    assert torch.equal(torch.rand(1), want)
    assert torch.equal(x, copy)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert identities == [id(b) for b in net.buffers()]
    assert [m.training for m in net] == [True, True, True, False]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert all(p.grad is None for p in net.parameters())


def test_buffers_that_did_not_change_are_not_touched():
    """A backward pass that is still to come needs them as they are."""
    net = nn.Sequential(nn.Conv2d(3, C, 3), nn.BatchNorm2d(C)).eval()
    net.register_buffer("expanded", torch.zeros(1).expand(10))
    with torch.inference_mode():
        net.register_buffer("inference", torch.zeros(2))
    x = torch.randn(N, 3, S, S)
    pending = net(x).sum()
    saved_bytes(net, x)
    pending.backward()


def test_buffers_made_or_replaced_by_the_forward_pass_are_undone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", None)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.cache = x.detach()
            self.steps = self.steps + 1
            self.register_buffer("new", torch.ones(1))
            return x.sin()

    net = Net()
    saved_bytes(net, torch.randn(3, requires_grad=True))
    assert net.cache is None and net.steps == 0 and list(net._buffers) == ["cache", "steps"]


def test_inference_mode_around_it_does_not_matter():
    net, x = chain(InPlaceABN), torch.randn(N, 3, S, S)
    with torch.inference_mode():
        inside = saved_bytes(net, x)
    assert inside == saved_bytes(net, x)


def test_a_keyword_called_model_reaches_the_model():
    class Net(nn.Module):
        def forward(self, model):
            return model.exp().sin()

    assert saved_bytes(Net(), model=torch.randn(10, requires_grad=True)).total == 40


def test_a_function_is_refused():
    with pytest.raises(TypeError, match=r"needs an nn\.Module"):
        saved_bytes(torch.sin, torch.randn(3))


def test_an_error_in_the_model_leaves_no_hooks():
    net = chain(InPlaceABN)
    with pytest.raises(RuntimeError):
        saved_bytes(net, torch.randn(N, 5, S, S))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_meta_tensors_need_no_memory():
    x = torch.randn(N, 3, S, S)
    want = saved_bytes(chain(InPlaceABN), x)
    with torch.device("meta"):
        net = chain(InPlaceABN)
    assert saved_bytes(net, x.to("meta")) == want


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_seen(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = chain(standard)

        def forward(self, x):
            return checkpoint(self.body, x * 1, use_reentrant=reentrant)

    x = torch.randn(N, 3, S, S, requires_grad=True)
    # Only the segment's input, and the random state that a dropout would need.
    assert saved_bytes(Net(), x).total < MAP


@pytest.mark.alone
def test_the_peak_of_a_step_on_a_cpu():
    size = 1 << 20

    def step():
        a = torch.ones(size)
        b = a + 1
        del a
        c = b + 1
        return c

    assert 2 * 4 * size <= peak_bytes(step) <= 2 * 4 * size + 4096


@pytest.mark.alone
def test_a_training_step_peaks_lower():
    def step(net):
        return lambda: net(x).square().mean().backward()

    x = torch.randn(4, 3, 64, 64)
    lean, plain = chain(InPlaceABN), chain(standard)
    for net in (lean, plain):
        step(net)()
        net.zero_grad(set_to_none=True)
    assert peak_bytes(step(lean)) < 0.75 * peak_bytes(step(plain))


def test_statistics_of_plain_batch_norm_are_put_back():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    saved_bytes(net, torch.randn(2, 3, 8, 8))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

"""Layers that cannot be inverted well keep x: when that is found out, and that it is right from the first step."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import statistics
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bounds import ulp
from inplace_abn import ABN, InPlaceABN, doctor, guard, guard_state, load_guard_state, models, recompute, saved_bytes
from inplace_abn.recipes.scenes import VOID, scene

C = 8


def layer(weight=1.0, bias=0.0, dtype=torch.float32):
    one = InPlaceABN(C)
    with torch.no_grad():
        one.weight.fill_(weight)
        one.bias.fill_(bias)
    return one.to(dtype)


def run(one, dtype=torch.bfloat16, residual=None):
    return one(torch.randn(4, C, 6, 6, dtype=dtype).requires_grad_() * 1, residual=residual)


@pytest.mark.parametrize(
    "weight, bias, sigma, dtype, keeps",
    [
        (1.0, 0.0, 0.0, torch.bfloat16, False),
        (0.01, 0.0, 0.0, torch.bfloat16, False),
        (0.01, 0.5, 0.0, torch.bfloat16, True),
        (0.01, 0.5, 0.0, torch.float32, False),
        (0.01, 0.0, 1.0, torch.bfloat16, True),
        (0.3, 0.0, 1.0, torch.bfloat16, False),
        (0.01, 0.5, 0.0, torch.float16, False),
        (0.0, 0.5, 0.0, torch.bfloat16, True),
        (0.0, 0.5, 0.0, torch.float16, True),
        (-0.01, 0.5, 0.0, torch.bfloat16, True),
    ],
)
def test_what_is_decided(weight, bias, sigma, dtype, keeps):
    one = layer(weight, bias)
    residual = torch.randn(4, C, 6, 6, dtype=dtype) * sigma if sigma else None
    h = torch.randn(4, C, 6, 6, dtype=dtype).requires_grad_() * 1
    z = one(h, residual=residual)
    assert guard.of(one).keeps_x == keeps and (z is h) == (not keeps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weight", [0.0, 1e-6, -1e-4])
def test_gradients_of_tiny_gamma_are_those_of_plain_steps(weight, dtype):
    x, dz = (torch.randn(16, C, 8, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    results = []
    for kind, wide in ((InPlaceABN, False), (ABN, False), (ABN, True)):
        one = kind(C).double() if wide else kind(C)
        with torch.no_grad():
            one.weight.fill_(weight)
            one.bias.fill_(0.5)
        leaf = (x.double() if wide else x.clone()).requires_grad_()
        z = one(leaf * 1)
        results.append(torch.autograd.grad(z, [one.weight, one.bias], dz.to(z.dtype)))
    # Where it inverts all the same, in float32, the error is what was estimated, and below the limit.
    e = guard.estimate(torch.full((1,), weight), torch.full((1,), 0.5), None, dtype, 1e-5, 1)
    room = 64 * torch.finfo(torch.float32).eps if guard.is_too_large(e) else 2 * float(e)
    assert room <= 2 * guard.LIMIT
    for ours, plain, truth in zip(*results, strict=True):
        far = [float((g.double() - truth).norm() / truth.norm()) for g in (ours, plain)]
        assert far[0] <= 2 * far[1] + room


def counted(monkeypatch):
    """How often the host waits for an estimate."""
    waits = []
    real = guard.is_too_large
    monkeypatch.setattr(guard, "is_too_large", lambda errors: waits.append(1) or real(errors))
    return waits


def test_one_wait_then_none_until_parameters_are_edited_or_loaded(monkeypatch):
    waits = counted(monkeypatch)
    one = layer()
    optimizer = torch.optim.SGD(one.parameters(), 0.1)
    for _ in range(20):
        run(one).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(waits) == 1
    run(one), run(one)
    assert len(waits) == 1
    with torch.no_grad():
        one.weight.zero_()
        one.bias.fill_(0.5)
    run(one)
    assert len(waits) == 2 and guard.of(one).keeps_x
    one.load_state_dict(InPlaceABN(C).state_dict())
    run(one)
    assert len(waits) == 3 and not guard.of(one).keeps_x
    # Edited beside an optimizer's step.
    with torch.no_grad():
        one.weight.zero_()
        one.bias.fill_(0.5)
    optimizer.step()
    run(one)
    assert len(waits) == 4 and guard.of(one).keeps_x


def test_refreshed_by_count_from_an_earlier_copy(monkeypatch):
    monkeypatch.setattr(guard, "EVERY", 3)
    one = layer()
    optimizer = torch.optim.SGD(one.parameters(), 1.0)
    decisions = []
    for step in range(14):
        run(one)
        decisions.append(guard.of(one).keeps_x)
        # As an optimizer would: γ falls to 0 in the second step.
        one.weight.grad = one.weight.detach().clone() if step == 1 else torch.zeros(C)
        one.bias.grad = torch.full((C,), -0.5) if step == 1 else torch.zeros(C)
        optimizer.step()
    # Looked at in forwards 0 and 3; decided in 6, from the copy of 3.
    assert decisions == [False] * 6 + [True] * 8


def test_a_resumed_run_decides_alike(monkeypatch):
    monkeypatch.setattr(guard, "EVERY", 4)

    def advance(one, optimizer, steps, seen):
        for _ in range(steps):
            run(one)
            seen.append(guard.of(one).keeps_x)
            one.weight.grad, one.bias.grad = one.weight.detach() * 0.5, torch.full((C,), -0.05)
            optimizer.step()

    def fresh():
        one = layer()
        return one, torch.optim.SGD(one.parameters(), 1.0)

    whole, seen, parts = fresh(), [], []
    advance(*whole, 30, seen)
    assert True in seen and False in seen
    first = fresh()
    advance(*first, 13, parts)
    stored = pickle.loads(pickle.dumps((first[0].state_dict(), guard_state(first[0]))))
    second = fresh()
    second[0].load_state_dict(stored[0])
    load_guard_state(second[0], stored[1])
    advance(*second, 17, parts)
    assert parts == seen


def test_copies_look_for_themselves():
    one = layer(0.0, 0.5)
    run(one)
    assert guard.of(copy.deepcopy(one)).keeps_x is None and guard.of(pickle.loads(pickle.dumps(one))).keeps_x is None


def test_within_recompute_a_layer_that_keeps_x_costs_one_map():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, C, 3), layer(0.0, 0.5), nn.Conv2d(C, C, 3), InPlaceABN(C), nn.Conv2d(C, 2, 3)
        ).bfloat16()

    x = torch.randn(2, 3, 20, 20, dtype=torch.bfloat16)
    both, one = saved_bytes(net(), x).total, saved_bytes(recompute(net()), x).total
    assert both - one == 2 * C * 18 * 18 * 2


def test_compiled_code_goes_by_what_was_decided():
    torch._dynamo.reset()
    one = layer(0.0, 0.5)
    twin = copy.deepcopy(one)
    doctor(one, torch.bfloat16)
    x, dz = (torch.randn(4, C, 6, 6, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    call = torch.compile(one, backend="aot_eager", fullgraph=True)
    got, want = (torch.autograd.grad(f(x), m.weight, dz)[0] for f, m in ((call, one), (twin, twin)))
    assert guard.of(twin).keeps_x and (got - want).abs().max() <= 4 * ulp(x.dtype) * want.abs().max()


def test_the_doctors_table():
    net = nn.Sequential(nn.Conv2d(3, C, 1), layer(0.01, 0.5), InPlaceABN(C, activation="relu"), InPlaceABN(C))
    found = {f.layer: f for f in doctor(net, torch.bfloat16).findings}
    assert [found[k].decision for k in "123"] == ["keeps x", "keeps x: no inverse", "inverts"]
    assert found["1"].worst_error == pytest.approx(2**-9 * 50, rel=0.01)
    assert "worst channel" in str(doctor(net))


def spread(net, seed):
    """γ and β as training leaves them: of either sign, some tiny."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, ABN):
                n = module.num_features
                weight = torch.randn(n, generator=g).abs() * 0.3 + 0.05
                dead = torch.where(torch.rand(n, generator=g) < 0.05, 1e-3, 1.0)
                sign = torch.where(torch.rand(n, generator=g) < 0.1, -1.0, 1.0)
                module.weight.copy_(weight * dead * sign)
                module.bias.copy_(torch.randn(n, generator=g) * 0.2 * dead)
    return net


def gradient(norm, seed, dtype):
    torch.manual_seed(seed)
    net = spread(models.ResNet((1, 2, 1, 1), classes=10, norm_act=norm), seed + 1)
    g = torch.Generator().manual_seed(seed + 100)
    x, y = torch.randn(4, 3, 64, 64, generator=g), torch.randint(0, 10, (4,), generator=g)
    if dtype == torch.float64:
        net, x = net.double(), x.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = net(x)
    F.cross_entropy(out if dtype == torch.float64 else out.float(), y).backward()
    return torch.cat([p.grad.double().flatten() for p in net.parameters()])


@pytest.mark.parametrize("dtype, allowed", [(torch.bfloat16, 1.25), (torch.float32, 2.0)], ids=str)
def test_gradients_of_a_whole_network(dtype, allowed):
    """Relative L2 over all parameters, to float64, against plain steps in the same dtype; median over seeds."""
    ratios = []
    for seed in range(5):
        truth = gradient(ABN, seed, torch.float64)
        ours, plain = (float((gradient(norm, seed, dtype) - truth).norm()) for norm in (InPlaceABN, ABN))
        ratios.append(ours / plain)
    assert statistics.median(ratios) <= allowed


def losses(norm, dtype, seed, steps=30):
    """Of a residual network with γ = 0 behind every block, that learns which class is in the middle of a street scene."""
    torch.manual_seed(seed)
    blocks = [models.ResidualBlock(16, (16, 16), norm_act=norm) for _ in range(3)]
    for block in blocks:
        nn.init.zeros_(block.convs.bn2.weight)
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), norm(16)]
    net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    scenes = [scene(i, (16, 32), seed=3) for i in range(48)]
    images, labels = (torch.stack(t) for t in zip(*scenes, strict=True))
    middle = labels[:, 8, 16]
    images, middle = images[middle != VOID], middle[middle != VOID].long()
    seen = []
    for _ in range(steps):
        pick = torch.randint(0, len(images), (16,))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = F.cross_entropy(net(images[pick]).float(), middle[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
    return statistics.mean(seen[-8:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_zero_initialised_network_trains_as_with_plain_steps(dtype):
    plain, ours = ([losses(norm, dtype, seed) for seed in range(3)] for norm in (ABN, functools.partial(InPlaceABN)))
    noise = max(plain) - min(plain)
    assert max(plain) < 1.9, "it does not learn"
    assert abs(statistics.mean(ours) - statistics.mean(plain)) <= noise


def test_another_dtype_and_evaluation_are_looked_at():
    one = layer(0.01, 3.0)
    run(one, torch.float32)
    assert not guard.of(one).keeps_x
    run(one, torch.bfloat16)
    assert guard.of(one).keeps_x
    fixed = layer(0.01, 3.0).eval()
    run(fixed)
    assert guard.of(fixed).keeps_x


@pytest.mark.parametrize("resumed", [False, True])
def test_a_parameter_that_was_looked_at_stays_until_another_is(resumed):
    """Else one put in its place might get its address, by which parameters are told apart."""
    one = layer()
    run(one)
    if resumed:
        one, ran = layer(), one
        load_guard_state(one, guard_state(ran))
    was = weakref.ref(one.bias)
    one.bias = nn.Parameter(torch.full((C,), 1000.0))
    gc.collect()
    assert was() is not None
    run(one)
    gc.collect()
    assert was() is None and guard.of(one).keeps_x


def test_weights_that_are_computed_are_not_held():
    one = layer()
    for _ in range(2):
        weight = torch.ones(C, requires_grad=True) * 2
        torch.func.functional_call(one, {"weight": weight}, torch.randn(4, C, 6, 6).requires_grad_() * 1)
    made = weakref.ref(weight)
    del weight
    gc.collect()
    assert made() is None


def test_a_parameter_that_an_optimizer_puts_in_the_place_of_another_is_looked_at(monkeypatch):
    class Replacing(torch.optim.SGD):
        def step(self, closure=None):
            one.bias = nn.Parameter(torch.full((C,), 1000.0))

    one = layer()
    run(one).sum().backward()
    Replacing(one.parameters(), lr=0.1).step()
    waits = counted(monkeypatch)
    run(one)
    assert guard.of(one).keeps_x and len(waits) == 1


@pytest.mark.parametrize("shape", [(1, C, 1, 1), (4, 1, 6, 6), ()], ids=str)
def test_a_residual_that_broadcasts_is_weighed_as_what_it_amounts_to(shape):
    for size, keeps in ((1.0, False), (100.0, True)):
        one = layer()
        run(one, residual=torch.full(shape, size, dtype=torch.bfloat16))
        assert guard.of(one).keeps_x == keeps


def test_doctor_wants_a_dtype():
    with pytest.raises(TypeError, match="dtype is 'bfloat16'; give a torch.dtype"):
        doctor(layer(), "bfloat16")


def test_without_gradients_nobody_waits(monkeypatch):
    waits = counted(monkeypatch)
    with torch.no_grad():
        run(layer(0.01, 3.0))
    assert not waits


def test_the_doctor_remembers_a_residual_it_does_not_see():
    one = layer(0.01)
    run(one, residual=torch.randn(4, C, 6, 6, dtype=torch.bfloat16))
    assert guard.of(one).keeps_x and doctor(one, torch.bfloat16).findings[0].decision == "keeps x"


def test_the_doctor_decides_anew():
    one = layer()
    assert doctor(one, torch.bfloat16).findings[0].decision == "inverts"
    with torch.no_grad():
        one.weight.fill_(0.01)
        one.bias.fill_(3.0)
    assert doctor(one, torch.bfloat16).findings[0].decision == "keeps x"


def test_a_state_of_another_model_is_refused():
    with pytest.raises(ValueError, match="the same module"):
        load_guard_state(nn.Sequential(layer()), guard_state(layer()))


def test_a_parametrized_weight_does_not_make_the_host_wait(monkeypatch):
    waits = counted(monkeypatch)
    one = torch.nn.utils.parametrizations.weight_norm(layer())
    for _ in range(5):
        run(one)
    assert len(waits) == 1


def test_parameters_handed_in_for_a_call_do_not_make_the_host_wait(monkeypatch):
    waits, one = counted(monkeypatch), layer()
    for _ in range(5):
        own = {name: p.detach().clone().requires_grad_() for name, p in one.named_parameters()}
        torch.func.functional_call(one, own, (torch.randn(4, 8, 3, 3, requires_grad=True) * 1,)).sum().backward()
    assert len(waits) == 1


def test_what_an_optimizer_does_after_its_base_class_is_its_own(monkeypatch):
    class Clamping(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.clamp_(-10, 10)

    waits, one = counted(monkeypatch), layer()
    torch.optim.SGD(one.parameters(), 0.1)
    optimizer = Clamping(one.parameters(), 0.01)
    for _ in range(5):
        run(one)
        optimizer.step()
    assert len(waits) == 1


def test_counting_bytes_leaves_decisions_alone():
    net = nn.Sequential(nn.Conv2d(3, C, 1), layer(), layer())
    run(net[1])
    before = guard_state(net)
    saved_bytes(net, torch.randn(2, 3, 5, 5))
    assert guard_state(net) == before and guard.of(net[2]).keeps_x is None

"""Forecasts: they count what a step really allocates, and find the largest batch and crop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zoo
from inplace_abn import InPlaceABN, convert, plan, reference, saved_bytes
from inplace_abn.memory import peak_bytes
from inplace_abn.planning import USABLE, cross_entropy, size_in_bytes, step_bytes


def network(blocks=4):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(blocks):
        layers += [nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers)


@pytest.mark.alone
@pytest.mark.parametrize("relu", ["standard", "exact", "leaky"])
def test_the_peak_is_that_of_a_real_step(relu, monkeypatch):
    """On a CPU, whose allocations torch's profiler reports; oneDNN's own buffers it does not see."""
    # The arithmetic of plain torch works on slabs, which kernels do not need and which are not forecast: small ones.
    monkeypatch.setattr(reference, "SLAB", 1 << 16)
    monkeypatch.setattr(reference, "TILE", 1 << 16)
    # Of a good depth: convolutions on a CPU have a map or two of their own.
    net = network(24)
    if relu != "standard":
        net, _ = convert(net, relu=relu)
    x = torch.randn(4, 3, 96, 96)
    lean = copy.deepcopy(net).to("meta")
    _, forecast = step_bytes(lean, x.to("meta"))
    net(x).sum().backward()
    net.zero_grad(set_to_none=True)
    real = peak_bytes(lambda: cross_entropy(net(x)).backward())
    # The batch was there before.
    assert forecast - x.nbytes == pytest.approx(real, rel=0.1)


def test_rows_and_static_bytes():
    net = network()
    before = copy.deepcopy(net.state_dict())
    shape = (8, 3, 64, 64)
    told = []
    forecast = plan(net, shape, "100MB", progress=told.append)
    rows = {row.way: row for row in forecast.rows}
    assert list(rows) == ["standard", "converted", "converted, leaky ReLU", "converted, checkpointed"]
    one = 8 * 16 * 64 * 64 * 4
    kept = saved_bytes(net, torch.randn(shape)).total
    # Beside what is saved, the output and the loss's softmax live between forward and backward.
    assert kept <= rows["standard"].kept <= kept + 2.5 * one
    assert rows["converted"].kept <= rows["standard"].kept - 3.9 * one
    assert all(type(m) is not InPlaceABN for m in net.modules()) and told
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.values(), strict=True))
    parameters = sum(p.nbytes for p in net.parameters())
    assert forecast.static == 2 * parameters + sum(b.nbytes for b in net.buffers())
    assert plan(net, shape, optimizer_states=2).static - forecast.static == parameters
    assert "converted, leaky ReLU" in str(forecast) and forecast.to_dict()["memory"] == 10**8


def test_what_fits_fits_and_one_more_does_not():
    net, limit = network(), "300MB"
    forecast = plan(net, (2, 3, 64, 64), limit)
    for row, relu in zip(forecast.rows[:3], ("standard", "exact", "leaky"), strict=True):
        lean = (network() if relu == "standard" else convert(network(), relu=relu)[0]).to("meta")

        def peak(n, side, lean=lean):
            return forecast.static + step_bytes(lean, torch.empty(n, 3, side, side, device="meta"))[1]

        usable = USABLE * size_in_bytes(limit)
        assert peak(row.largest_batch, 64) <= usable < peak(row.largest_batch + max(1, row.largest_batch // 64), 64)
        assert peak(2, row.largest_crop) <= usable
        assert row.largest_crop % 32 == 0 and peak(2, int(1.1 * row.largest_crop) + 32) > usable
    batches = [row.largest_batch for row in forecast.rows]
    assert batches[0] < batches[1] <= batches[2] and batches[1] > 1.5 * batches[0]
    assert plan(net, (2, 3, 64, 64), "1MB").rows[0].largest_batch is None


def test_maps_in_16_bits_are_half_as_large():
    single = plan(network(), (8, 3, 64, 64)).rows[1].kept
    assert plan(network(), (8, 3, 64, 64), dtype=torch.bfloat16).rows[1].kept < 0.65 * single


def test_sizes_are_read_or_refused():
    for text in ("lots", "12 XB", "", "GB", "24", "1.2.3GB", "0GB", 0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="24GB"):
            plan(network(), (2, 3, 32, 32), text)
    with pytest.raises(ValueError, match="optimizer_states is -3"):
        plan(network(), (2, 3, 32, 32), optimizer_states=-3)
    assert plan(network(), [2, 3, 32, 32], 24e6) == plan(network(), (2, 3, 32, 32), "24MB")


def test_networks_with_several_outputs():
    net = zoo.build("torchvision:lraspp_mobilenet_v3_large")
    rows = plan(net, (2, 3, 64, 64)).rows
    assert rows[1].kept < rows[0].kept
    with pytest.raises(ValueError, match="no tensor"):
        cross_entropy(())


def test_a_model_that_was_converted_or_built_by_hand_is_planned_alike():
    torch.manual_seed(0)
    plain = nn.Sequential(
        *[
            nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
            for i in range(3)
        ]
    )
    shape = (4, 3, 32, 32)
    want = plan(plain, shape, "1GB")
    for relu in ("exact", "leaky"):
        got = plan(convert(copy.deepcopy(plain), relu=relu)[0], shape, "1GB")
        assert got.rows[0] == want.rows[0] and got.rows[2] == want.rows[2]
        # Converted already, to that.
        assert got.rows[1].kept == want.rows[1 if relu == "exact" else 2].kept
    for block in plain:
        block[1], block[2] = InPlaceABN(8), nn.Identity()
    standard, built, leaky, _ = plan(plain, shape).rows
    assert standard.kept == want.rows[0].kept and built.kept == leaky.kept == want.rows[2].kept


def test_gamma_of_zero_is_planned_as_it_is_converted():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.Conv2d(8, 8, 3))
    nn.init.zeros_(net[1].weight)
    rows = plan(net, (4, 3, 32, 32)).rows
    assert len({row.kept for row in rows[:3]}) == 1
    nn.init.ones_(net[1].weight)
    assert plan(net, (4, 3, 32, 32)).rows[1].kept < rows[1].kept

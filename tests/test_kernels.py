"""The kernels against the reference in float64 on the same stored bits: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bounds import reordered, ulp
from emulated import A10, A100, H200, Kernel, run_ptx
from inplace_abn import ACTIVATIONS, InPlaceABN, inplace_abn, reference, saved_bytes
from inplace_abn.activations import resolve
from layouts import LAYOUTS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
runs_here = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1")
INVERTIBLE = [name for name, phi in ACTIVATIONS.items() if phi.inverse is not None]

# Each shape is there for the reason it is named by. Tiles are 256 elements in the interpreter, 4096 on a GPU.
SHAPES = {
    "odd": (5, 3, 4, 7),
    "one tile": (2, 2, 4, 4),
    "second trip": (6, 2, 33, 32) if DEVICE == "cpu" else (64, 2, 133, 132),
    "two slabs": (9, 70),
    "rank 3": (3, 5, 33),
    "rank 5": (2, 3, 3, 4, 5),
    "one channel": (4, 1, 6, 6),
    "one pixel": (8, 5, 1, 1),
    "few pixels": (5, 32, 3, 3),
    "few pixels, odd": (7, 19, 3, 3),
    "eight channels": (3, 8, 5, 7),
}


@pytest.fixture
def kernels(monkeypatch):
    module = pytest.importorskip("inplace_abn.kernels")
    if DEVICE == "cpu":
        monkeypatch.setattr(module.plans, "TILE", 256)
    forget(module)
    yield module
    forget(module)


def forget(module):
    """Plans made for another tile."""
    module.plans.cut.cache_clear()
    module.launches.LAUNCHES.clear()


def near(got, want, terms, dtype=torch.float32):
    """Within the rounding of float32 sums of so many terms, and one rounding to the dtype."""
    room = (reordered(torch.float32, terms) + ulp(dtype)) * (1 + float(want.abs().max()))
    return (got.double() - want).abs().max() <= room


def step(kernels, shape, layout, dtype, name, a, momentum, affine=True, residual=False, spread=0.0):
    """Forward and backward by the kernels, and by the reference in float64 from what they stored; means may lie apart."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=g).to(DEVICE)
    phi, a = resolve(name, a)
    means = 3 + spread * (torch.arange(shape[1], device=DEVICE) % 7).view(1, -1, *[1] * (len(shape) - 2))
    base, view = LAYOUTS[layout]((draw(*shape) * 2 + means).to(dtype))
    x, channels, m = view(base), shape[1], base.numel() // shape[1]
    if kernels.plans.layout(x) is None:
        pytest.skip("left to the reference")
    weight, bias = (draw(channels) * 0.3 + 1, draw(channels) * 0.3) if affine else (None, None)
    running = draw(channels), draw(channels).abs()
    counter = torch.tensor(2, device=DEVICE)
    rest = (1e-5, phi, a)
    # In a layout of its own.
    r = draw(*shape).to(dtype) if residual else None
    r64 = r.double() if residual else None
    truth = x.double()
    mean, var, count = reference.moments(truth)
    expected = [r.double() for r in running]
    reference.track(*expected, torch.tensor(2, device=DEVICE), mean, var * count / (count - 1), momentum)
    z64 = truth.clone()
    reference.normalize_(z64, mean, (var + 1e-5).rsqrt(), weight, bias, *rest, r64)
    apart = x.clone()
    kernels.normalize_(apart, mean, (var + 1e-5).rsqrt(), weight, bias, *rest, r)
    assert near(apart, z64, m, dtype)
    invstd = kernels.normalize_batch_(x, weight, bias, *running, counter, momentum, 1e-5, *rest, r)
    assert near(x, z64, m, dtype) and near(invstd, (var + 1e-5).rsqrt(), m)
    assert near(running[0], expected[0], m) and near(running[1], expected[1], m) and counter == 3
    dz = draw(*shape).to(dtype)
    for variant in ("I", "II"):
        # In x's layout, gaps included: dr and dx are written at the same places.
        dr, dr64 = (
            torch.empty_strided(x.shape, x.stride(), dtype=d, device=DEVICE) if residual else None
            for d in (dtype, torch.float64)
        )
        dx, dgamma, dbeta = kernels.input_grad_batch(dz, x, weight, bias, invstd, *rest, variant, r, dr)
        sum_dy, sum_dy_xhat = reference.sums(dz.double(), x.double(), weight, bias, *rest, variant, r64)
        sums = (sum_dy, sum_dy_xhat, count)
        stored = (dz.double(), x.double(), weight, bias, invstd)
        want = reference.input_grad(*stored, *sums, *rest, variant, r64, dr64)
        assert dx.stride() == x.stride() and near(dx, want, m, dtype)
        assert near(dgamma, sum_dy_xhat, m) and near(dbeta, sum_dy, m)
        assert not residual or near(dr, dr64, 1, dtype)
    fixed = kernels.input_grad(dz, x, weight, bias, invstd, None, None, 0, *rest, "II", r, dr)
    assert near(fixed, reference.input_grad(*stored, None, None, 0, *rest, "II", r64), m, dtype)
    assert not residual or near(dr, dr64, 1, dtype)


@runs_here
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gap", "offset"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_and_strides(kernels, shape, layout):
    step(kernels, shape, layout, torch.float32, "leaky_relu", 0.01, 0.1)


@runs_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", INVERTIBLE)
def test_activations(kernels, name, dtype):
    step(kernels, SHAPES["odd"], "channels_last", dtype, name, 1.0, None)


@runs_here
@pytest.mark.parametrize(
    "shape, layout",
    [
        ((3, 19, 7, 7), "contiguous"),
        ((5, 16, 7, 7), "gap"),
        ((5, 16, 7, 7), "offset"),
        ((2, 40, 3, 5), "contiguous"),
        ((3, 9, 8, 8), "contiguous"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_channels_that_are_packed(kernels, monkeypatch, shape, layout, dtype):
    """In tiles as on a GPU: smaller ones hold no packed slab of 16-bit numbers."""
    monkeypatch.setattr(kernels.plans, "TILE", 4096)
    forget(kernels)
    x = torch.empty(shape, dtype=dtype)
    c = kernels.plans.cut(kernels.plans.layout(x), x.element_size(), True)
    assert 1 < c.constants["W"] < c.constants["BC"]
    step(kernels, shape, layout, dtype, "leaky_relu", 0.1, 0.1, residual=True)


@runs_here
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_channel_that_is_packed_keeps_to_itself(kernels, monkeypatch):
    """What is not finite in one channel leaves its neighbours' bits as they are."""
    monkeypatch.setattr(kernels.plans, "TILE", 4096)
    forget(kernels)
    keeps_to_itself(kernels, torch.randn(5, 19, 7, 7, generator=torch.Generator().manual_seed(0)).bfloat16())


def keeps_to_itself(kernels, clean):
    clean, dz = clean.to(DEVICE), clean.flip(0).to(DEVICE)
    rest = (1e-5, *resolve("leaky_relu", 0.1))

    def both(x, dz):
        invstd = kernels.normalize_batch_(x, None, None, None, None, None, 0.1, 1e-5, *rest)
        return [x, *kernels.input_grad_batch(dz, x, None, None, invstd, *rest, "II")]

    want = both(clean.clone(), dz)
    last = clean.shape[1] - 1
    for channel, value in ((0, float("nan")), (last // 3, float("inf")), (last // 2, 3e38), (last, float("-inf"))):
        x = clean.clone()
        x[2, channel, 3] = value
        others = [c for c in range(last + 1) if c != channel]
        for mine, theirs in zip(both(x, dz), want, strict=True):
            dim = 1 if mine.dim() == 4 else 0
            kept = torch.tensor(others, device=mine.device)
            assert torch.equal(mine.index_select(dim, kept), theirs.index_select(dim, kept))


@runs_here
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", ["odd", "second trip", "two slabs", "few pixels, odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_residual(kernels, shape, layout, dtype):
    step(kernels, SHAPES[shape], layout, dtype, "leaky_relu", 0.1, 0.1, residual=True)


@runs_here
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "name, shape",
    [
        (name, shape)
        for name in ("relu", "leaky_relu", "elu")
        for shape in ("odd", "second trip", "few pixels")
        # In the interpreter one activation of all shapes: others have their own formulas, but no tiles of their own.
        if name == "relu" or shape == "odd" or DEVICE == "cuda"
    ],
)
def test_from_x(kernels, name, shape, layout):
    """With x kept: forward out of place and again to the bit, backward without an inverse, γ = 0 included."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=g).to(DEVICE)
    phi, a = resolve(name, 1.0 if name == "elu" else 0.1)
    base, view = LAYOUTS[layout]((draw(*SHAPES[shape]) * 2 + 3).half())
    x, r, dz = view(base), draw(*SHAPES[shape]).half(), draw(*SHAPES[shape]).half()
    before, channels, m = x.clone(), x.shape[1], x.numel() // x.shape[1]
    weight, bias = draw(channels), draw(channels)
    weight[0] = 0
    running, counter = (draw(channels), draw(channels).abs()), torch.tensor(2, device=DEVICE)
    z, mean, invstd = kernels.normalize_batch(x, weight, bias, *running, counter, 0.1, 1e-5, 0.0, phi, a, r)
    assert torch.equal(x, before) and z.stride() == x.stride() and counter == 3
    again = torch.empty_like(z)
    kernels.normalize_(x, mean, invstd, weight, bias, 0.0, phi, a, r, again)
    assert torch.equal(again, z)
    z64, mean64, invstd64 = reference.normalize_batch(
        x.double(), weight, bias, None, None, None, 0.1, 1e-5, 0.0, phi, a, r.double()
    )
    assert near(z, z64, m, x.dtype) and near(mean, mean64, m) and near(invstd, invstd64, m)
    dr, dr64 = torch.empty_like(x), torch.empty_like(x, dtype=torch.float64)
    got = kernels.input_grad_batch(dz, x, weight, bias, invstd, 0.0, phi, a, "II", r, dr, mean)
    stored = (dz.double(), x.double(), weight, bias)
    sums = reference.sums(*stored, 0.0, phi, a, "II", r.double(), mean, invstd)
    want = reference.input_grad(*stored, invstd, *sums, m, 0.0, phi, a, "II", r.double(), dr64, mean)
    assert near(got[0], want, m, x.dtype) and near(got[1], sums[1], m) and near(got[2], sums[0], m)
    assert near(dr, dr64, 1, x.dtype)
    # Where x̂ was kept instead, its mean is 0.
    xhat = torch.empty_like(x).copy_(F.batch_norm(x.float(), None, None, training=True))
    got = kernels.input_grad_batch(dz, xhat, weight, bias, invstd, 0.0, phi, a, "II", r, None, 0.0)
    stored = (dz.double(), xhat.double(), weight, bias)
    sums = reference.sums(*stored, 0.0, phi, a, "II", r.double(), 0.0, invstd)
    want = reference.input_grad(*stored, invstd, *sums, m, 0.0, phi, a, "II", r.double(), None, 0.0)
    assert near(got[0], want, m, x.dtype) and near(got[1], sums[1], m) and near(got[2], sums[0], m)


@runs_here
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_without_parameters(kernels, layout):
    step(kernels, SHAPES["odd"], layout, torch.float32, "leaky_relu", 0.2, 0.1, affine=False)


@runs_here
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_large_mean_costs_no_variance(kernels, layout):
    base, view = LAYOUTS[layout]((torch.randn(6, 3, 9, 9, dtype=torch.float64) + 1e4).float().to(DEVICE))
    mean, var, count = kernels.moments(view(base))
    want_mean, want_var, want_count = reference.moments(view(base).double())
    assert count == want_count and ((var - want_var).abs() <= 1e-5 * want_var).all()
    assert ((mean - want_mean).abs() <= ulp(torch.float32) * want_mean.abs()).all()


@runs_here
def test_outliers_at_the_corners_cost_no_variance(kernels, monkeypatch):
    """Moments are taken about elements; corners, where padding shows, are not among them."""
    monkeypatch.setattr(kernels.plans, "TILE", 4096)
    x = torch.randn(1, 1, 512, 512)
    x[..., 0, 0] = x[..., -1, -1] = x[..., 0, -1] = 700.0
    for layout in (torch.contiguous_format, torch.channels_last):
        _, var, _ = kernels.moments(x.to(DEVICE).contiguous(memory_format=layout))
        assert abs(float(var) / float(x.double().var(correction=0)) - 1) <= 1e-5


@runs_here
def test_launches_are_told_apart_by_all_that_is_compiled_in(kernels):
    """An integer momentum, and statistics and counters of other dtypes, after calls of the ordinary kind."""
    phi, a = resolve("leaky_relu", 0.01)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 4, 4, generator=g).to(DEVICE)
    mean, unbiased = x.mean((0, 2, 3)), x.var((0, 2, 3))
    for momentum, kind in ((1, torch.float32), (0.1, torch.float32), (0.1, torch.float16), (1, torch.float16)):
        running = torch.zeros(3, device=DEVICE), torch.ones(3, dtype=kind, device=DEVICE)
        counter = torch.tensor(0, device=DEVICE)
        kernels.normalize_batch_(x.clone(), None, None, *running, counter, momentum, 1e-5, 1e-5, phi, a)
        assert torch.allclose(running[0], momentum * mean, atol=1e-6) and counter == 1
        assert torch.allclose(running[1].float(), 1 - momentum + momentum * unbiased, rtol=2e-3)


@runs_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sums_in_float64_as_ranks_exchange_them(kernels, dtype):
    phi, a = resolve("leaky_relu", 0.01)
    g = torch.Generator().manual_seed(0)
    dz, z = (torch.randn(4, 3, 5, 5, generator=g).to(DEVICE, dtype) for _ in range(2))
    vectors = [torch.rand(3, generator=g, dtype=torch.float64).to(DEVICE) for _ in range(3)]
    got = kernels.input_grad(dz, z, None, None, *vectors, 1, 1e-5, phi, a, "II")
    want = reference.input_grad(dz.double(), z.double(), None, None, *vectors, 1, 1e-5, phi, a, "II")
    assert near(got, want, 1, dtype)


@runs_here
def test_the_guard_keeps_signs_and_hides_no_nan(kernels):
    """As the reference does: −0 is negative, and a NaN weight is seen."""
    weight = torch.tensor([0.0, -0.0, -1e-9, float("nan"), 0.5], device=DEVICE)
    results = []
    for verbs in (kernels, reference):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        verbs.normalize_batch_(x, weight, None, None, None, None, 0.1, 1e-5, 1e-5, *resolve("identity", 0.0))
        results.append(x)
    got, want = results
    assert torch.equal(got.sign()[:, [0, 1, 2, 4]], want.sign()[:, [0, 1, 2, 4]])
    assert got[:, 3].isnan().all() and want[:, 3].isnan().all() and got.isnan().sum() == 6


@runs_here
def test_the_layout_is_read_off_the_strides(kernels):
    x = torch.empty(4, 6, 5, 7)
    assert kernels.plans.layout(x) == (False, 4, 6, 35, 210, 35)
    assert kernels.plans.layout(x.contiguous(memory_format=torch.channels_last)) == (True, 140, 6, 1, 6, 1)
    assert kernels.plans.layout(x[:, 1:3]) == (False, 4, 2, 35, 210, 35)
    assert kernels.plans.layout(x.transpose(2, 3)) is None and kernels.plans.layout(x[..., ::2]) is None
    assert kernels.plans.layout(torch.empty(4, 6)) == (True, 4, 6, 1, 6, 1)


@runs_here
@pytest.mark.parametrize("figures", [H200, A100, A10], ids=["H200", "A100", "A10"])
def test_teams_fit_the_card_and_cover_the_tensor(kernels, monkeypatch, figures):
    monkeypatch.setattr(kernels.plans, "TILE", 4096)
    where = kernels.plans.Card(*figures)
    sizes = [
        (1, 1, 1),
        (32, 256, 3136),
        (16, 128, 112896),
        (12, 4096, 9409),
        (200_704, 8, 1),
        (3, 70, 49),
        (128, 2048, 49),
    ]
    sizes += [(n, c, pixels) for n in (1, 5, 300) for c in (9, 64) for pixels in range(2, 65)]
    for n, c, pixels in sizes:
        places = [
            kernels.plans.Layout(False, n, c, pixels, c * pixels, pixels),
            kernels.plans.Layout(True, n * pixels, c, 1, c, 1),
        ]
        for place in places:
            for itemsize, tensors, aligned in [(2, 1, True), (2, 2, True), (4, 2, True), (2, 1, False)]:
                cut = kernels.plans.cut(place, itemsize, aligned)
                inner = cut.constants["INNER"]
                resident = where.processors * (where.registers // (kernels.plans.registers(inner) * 256))
                team, crew = kernels.plans.team(cut, tensors, where), kernels.plans.crew(cut, where)
                assert team is None or team.S * team.G <= resident
                for t in [t for t in (team, crew) if t is not None]:
                    assert t.S == cut.blocks * t.chunks and 1 <= t.G <= cut.slabs
                    # Every tile has one member, and no member is idle.
                    assert t.chunks * t.per >= cut.across > (t.chunks - 1) * t.per
                high, wide, w, apart = (cut.constants[name] for name in ("BR", "BC", "W", "U"))
                assert cut.slabs * w >= c and high * wide <= 4096 and high % apart == 0
                if inner:
                    assert cut.across * high >= place.rows and wide >= w * place.pixels
                else:
                    assert cut.blocks * high >= place.rows and cut.across * wide >= place.pixels


@pytest.mark.parametrize("figures", [H200, A100, A10], ids=["H200", "A100", "A10"])
def test_rings_fit_the_card_and_cover_the_channel(monkeypatch, figures):
    kernels = pytest.importorskip("inplace_abn.kernels")
    monkeypatch.setattr(kernels.plans, "RING_LEAST", 0)
    where = kernels.plans.Card(*figures)
    rings = 0
    sizes = [
        (16, 128, 112896),
        (128, 256, 3136),
        (12, 4096, 9409),
        (128, 1024, 196),
        (300, 3, 66),
        (2, 3, 80),
        (1, 5, 100),
    ]
    for n, c, pixels in sizes:
        place = kernels.plans.Layout(False, n, c, pixels, c * pixels, pixels)
        for itemsize, maps, held in [(2, 1, 1), (2, 2, 1), (2, 2, 2), (2, 3, 3), (4, 1, 1), (4, 2, 2)]:
            r = kernels.plans.ring_of(place, itemsize, maps, held, where)
            if r is None:
                continue
            rings += 1
            assert r.vectors == n * (pixels // r.V) and r.V * itemsize in (8, 16)
            # Every row's edges have a member.
            assert r.edges * r.S >= n * 2 * r.V if r.edges else pixels % r.V == 0
            # Every vector has one member, no member is idle, and no tile of all members is empty.
            assert r.S * r.T * r.each >= r.vectors > max(r.S - 1, (r.T - 1) * r.S) * r.each and r.each <= r.lines
            # As the kernels need it for their words and slots.
            assert r.T < r.lag <= 2 * r.T and 1 <= r.ahead <= r.lag and 1 <= r.G <= c
            # Sums are asked for in the round in which they are collected.
            assert r.early <= r.lag % r.T
            slots = held * (r.lag + r.ahead) + (maps - held) * r.ahead
            shared = r.lines * r.V * itemsize * slots
            each = kernels.plans.resident(r.registers, shared + 512, kernels.plans.RING_WARPS, where)
            assert each * where.processors >= r.S * r.G
    assert rings >= 20
    # Nothing for it: short rows that start anywhere, few pixels, channels innermost, offsets of more than 32 bits, small maps.
    place = kernels.plans.Layout(False, 12, 4096, 81, 4096 * 81, 81)
    few = kernels.plans.Layout(False, 128, 2048, 64, 2048 * 64, 64)
    inner = kernels.plans.Layout(True, 128 * 196, 1024, 1, 1024, 1)
    far = kernels.plans.Layout(False, 16, 128, 112896, 1 << 27, 112896)
    assert [kernels.plans.ring_of(p, 2, 1, 1, where) for p in (place, few, inner, far)] == [None] * 4
    monkeypatch.undo()
    assert kernels.plans.ring_of(kernels.plans.Layout(False, 8, 64, 784, 64 * 784, 784), 2, 1, 1, where) is None


@pytest.mark.parametrize("figures", [H200, A100, A10], ids=["H200", "A100", "A10"])
def test_sweeps_fit_the_card_and_cover_the_rows(figures):
    kernels = pytest.importorskip("inplace_abn.kernels")
    where = kernels.plans.Card(*figures)
    sizes = [(128, 256, 3136), (16, 128, 112896), (12, 4096, 9409), (8, 2048, 64), (3, 72, 5), (1, 8, 1), (500, 24, 40)]
    # Few channels have many members; so many leave one where there is one program on a processor, on half of the processors.
    sizes += [(32, 512, 49), (32, 2048, 49), (32, 2304, 49), (32, 1152, 49)]
    places = [kernels.plans.Layout(True, n * pixels, c, 1, c, 1) for n, c, pixels in sizes]
    places += [kernels.plans.Layout(False, n, c, 49, c * 49, 49) for n, c in ((128, 2048), (2, 24), (1000, 512))]
    places += [kernels.plans.Layout(False, n, c, 98, c * 98, 98) for n, c in ((128, 512), (2, 24), (1000, 64))]
    sweeps = kept = alone = 0
    for place in places:
        for itemsize, maps, held in [(2, 1, 1), (2, 2, 1), (2, 2, 2), (2, 3, 3), (4, 1, 1), (4, 2, 2), (4, 3, 3)]:
            s = kernels.plans.sweep_of(place, itemsize, maps, held, where)
            if s is None:
                # A row of 2 KiB at most has too few channels for so many on a small card.
                assert place.pixels == 49 and -(-place.channels // 8) > 2 * where.processors
                continue
            sweeps += 1
            assert s.V * itemsize == 16 and s.P * s.G >= place.channels > s.P * (s.G - 1)
            assert s.W >= s.P * place.pixels and place.row_stride % s.V == s.P * place.pixels % s.V == 0
            # A tile is whole rows of threads, and powers of two.
            assert s.B * s.W == 32 * s.warps * s.V and all(n & (n - 1) == 0 for n in (s.K, s.B, s.W))
            # No member is idle, and all columns have one who adds them up, or all members do.
            assert s.S <= -(-place.rows // (s.K * s.B)) and s.S * s.columns >= 2 * s.P
            # A slot is free before it is copied into; or all tiles have one.
            most = -(-place.rows // (s.K * s.B * s.S))
            assert 2 <= s.ahead and (s.ahead <= s.R and s.H >= 0 if s.R else max(most, s.ahead) <= s.H)
            assert s.Q == 0 if s.R == 0 else most > s.H + s.R
            # What registers hold: tiles that every member has, whole, that are through before others take turns in the ring, and
            # that stand when the next copy begins.
            least = place.rows // (s.K * s.B) // s.S
            assert s.Q == 0 or (s.Q + s.ahead <= least and s.H >= s.ahead and s.R > s.ahead)
            room = kernels.plans.SWEEP_KEPT * kernels.plans.SWEEP_BYTES
            assert s.Q == 0 or (
                s.Q * s.K * s.B * s.W * itemsize * held <= room and s.registers >= kernels.plans.SWEEP_REGISTERS
            )
            kept += s.Q > 0
            # Words of all members, and totals; those that a member reads, as many as threads or more.
            _, warps, words, constants, _ = kernels.launches._swept(s, place)
            once = s.columns == 2 * s.P
            assert s.S == 1 or words >= 2 * s.P * s.G * (s.S + (not once))
            assert constants["BS"] >= s.S and warps == s.warps
            assert once or constants["BS"] * min(32, s.columns) >= 32 * s.warps
            shared = s.K * s.B * s.W * itemsize * (held * (s.H + s.R) + (maps - held) * s.ahead)
            # To turn two sums of a tile's rows round, two of a word of every member that threads have, or three of a channel.
            beside = max(8 * s.B * s.W, 8 * s.P * max(1, 32 * s.warps // min(32, s.P)), 12 * s.P)
            each = kernels.plans.resident(s.registers, shared + beside, s.warps, where)
            assert each * where.processors >= s.S * s.G
            # One program on a processor, where that leaves neither two members nor processors idle.
            alone += s.warps > kernels.plans.SWEEP_WARPS
            assert s.warps == kernels.plans.SWEEP_WARPS or (s.S * s.G <= where.processors and s.S != 2 and not s.R)
            many = kernels.plans._sweep(place, itemsize, maps, held, where, 2, kernels.plans.SWEEP_WARPS)
            assert many is not None and 10 * s.S * s.G * s.warps >= 9 * many.S * many.G * many.warps
    # A small card has no room for a ring and so much beside it.
    assert sweeps >= 50 and (kept >= 10 or figures is A10) and alone >= 5
    # Nothing for it: channels that are no whole vectors, many pixels, channels of whole vectors that have not few pixels, rows
    # half empty, more of a row than threads copy, more slabs than programs, offsets of more than 32 bits.
    odd = kernels.plans.Layout(True, 128 * 196, 1001, 1, 1001, 1)
    outer = kernels.plans.Layout(False, 128, 256, 3136, 256 * 3136, 3136)
    whole = kernels.plans.Layout(False, 128, 64, 208, 64 * 208, 208)
    empty = kernels.plans.Layout(False, 128, 64, 132, 64 * 132, 132)
    long = kernels.plans.Layout(False, 128, 64, 225, 64 * 225, 225)
    many = kernels.plans.Layout(True, 64, 1 << 20, 1, 1 << 20, 1)
    far = kernels.plans.Layout(True, 64, 64, 1, 1 << 28, 1)
    assert [kernels.plans.sweep_of(p, 2, 1, 1, where) for p in (odd, outer, whole, empty, long, many, far)] == [
        None
    ] * 7


def test_studied_plans_are_plans(monkeypatch):
    """What the benchmark of plans varies is there, and gives plans for the card it was written for."""
    kernels = pytest.importorskip("inplace_abn.kernels")
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    studies = importlib.import_module("plans")
    where = kernels.plans.Card(*H200)
    monkeypatch.setattr(kernels.plans, "card", lambda _: where)
    for study, plans in studies.PLANS.items():
        for named, plan in plans():
            assert set(plan) <= set(vars(kernels.plans))
            with monkeypatch.context() as changed:
                for name, value in plan.items():
                    changed.setattr(kernels.plans, name, value)
                for n, c, h, w in studies.SHAPES[study]:
                    inner = kernels.plans.Layout(True, n * h * w, c, 1, c, 1)
                    if study in ("sweep", "small"):
                        sweep = kernels.plans.sweep_of(inner, 2, 2, 2, where)
                        assert sweep is not None
                        if not sweep.R:
                            tiles = -(-inner.rows // (sweep.K * sweep.B * sweep.S))
                            least = max(tiles, sweep.ahead)
                            assert sweep.H == least if named.endswith("needed") else sweep.H >= least
                    elif study == "crew":
                        cut = kernels.plans.cut(inner, 2, True, kernels.plans.LINE_BYTES)
                        assert cut.constants["BC"] * 2 == min(kernels.plans.LINE_BYTES, 2 * c)
                        assert kernels.plans.stages(8192, where) >= 1
                    else:
                        outer = kernels.plans.Layout(False, n, c, h * w, c * h * w, h * w)
                        ring = kernels.plans.ring_of(outer, 2, 2, 2, where)
                        sizes = kernels.plans.RING_BYTES
                        assert ring is not None and 2 * 2 * ring.lines * ring.V in sizes, (plan, n, c, h, w)


def test_launches_are_described_to_those_who_listen(monkeypatch):
    """Straight to the launcher otherwise; the same arguments in the same order either way."""
    kernels = pytest.importorskip("inplace_abn.kernels")
    triton = pytest.importorskip("triton")

    class Built:
        function, packed_metadata, straight, told = "function", "metadata", [], []

        def run(self, *arguments):
            self.straight.append(arguments)

        def __getitem__(self, grid):
            return lambda *arguments, stream: self.told.append((grid, stream, arguments))

    built = Built()
    run = kernels.launches._runner(built, (6, 2), (1, 2), ("constant",))
    arguments = (16, 32, 1, 2, 0.5, "constant")
    run(7, [16, 32], (0.5,))
    assert built.straight == [(6, 2, 1, 7, "function", "metadata", None, None, None, *arguments)] and not built.told
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", print)
    run(7, [16, 32], (0.5,))
    assert built.told == [((6, 2, 1), 7, arguments)] and len(built.straight) == 1


def test_launches_go_where_the_tensors_are(monkeypatch):
    """Two GPUs, made up: the caller is on the first."""
    kernels = pytest.importorskip("inplace_abn.kernels")
    here, ran = [0], []

    class Device:
        def __init__(self, index):
            self.index, self.before = index, here[0]

        def __enter__(self):
            here[0] = self.index

        def __exit__(self, *_):
            here[0] = self.before

    class There(torch.Tensor):
        is_cuda = True

        def get_device(self):
            return self.index

    def on_the(i):
        x = torch.zeros(2, 3).as_subclass(There)
        x.index = i
        return x

    made = kernels.launches.Launch(
        None, (1, 1), 0, (0, 0), (), {}, {}, lambda stream, *_: ran.append((here[0], stream))
    )
    monkeypatch.setattr(kernels.launches, "_prepare", lambda *_: made)
    monkeypatch.setattr(kernels.launches, "LAUNCHES", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 10 + i, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: here[0], raising=False)
    for i in (0, 1, 0):
        assert kernels.launches.launch(None, 1, 0, [on_the(i)], (), (dict,))
    # A kernel is loaded for each of them.
    assert ran == [(0, 10), (1, 11), (0, 10)] and here == [0] and len(kernels.launches.LAUNCHES) == 2


def test_a_launch_is_known_by_all_that_is_compiled_into_it(monkeypatch):
    """Calls that share one have maps of one shape, strides and alignment, the same dtypes, and ask for the same flags."""
    kernels = pytest.importorskip("inplace_abn.kernels")
    used, compiled = [], {}

    class Unlaunched(dict):
        def __getitem__(self, key):
            used.append(key)
            return kernels.launches.Launch({(1, 1): lambda *_: None}, (1, 1), 0, (0, 0), (), {}, {}, lambda *_: None)

    launch = kernels.launches.launch

    def recorded(kernel, maps, twice, tensors, floats, asked, *kinds):
        assert launch(kernel, maps, twice, tensors, floats, asked, *kinds)
        x, aligned = tensors[0], not any(t.data_ptr() % 16 for t in tensors[:maps])
        now = kernel, x.shape, x.stride(), aligned, [t.dtype for t in tensors], asked[0](*asked[1:])
        assert compiled.setdefault(used[-1], now) == now
        return True

    monkeypatch.setattr(kernels.launches, "LAUNCHES", Unlaunched())
    monkeypatch.setattr(kernels.launches, "launch", recorded)
    for name, dtype in itertools.product(("leaky_relu", "elu"), (torch.float32, torch.bfloat16)):
        x, rest = torch.ones(2, 4, 3, 3, dtype=dtype), (1e-5, *resolve(name, 1.0))
        vectors = [torch.ones(4, dtype=d) for d in dict.fromkeys((torch.float32, dtype))]
        for weight, bias, r in itertools.product([None, *vectors], [None, *vectors], (None, x.clone())):
            for running in [(None, None), *itertools.product(vectors, vectors)]:
                for counter, momentum in itertools.product((None, torch.tensor(0)), (None, 0.1)):
                    kernels.normalize_batch_(x, weight, bias, *running, counter, momentum, 1e-5, *rest, r)
                    kernels.normalize_batch(x, weight, bias, *running, counter, momentum, 1e-5, *rest, r)
            for mean, invstd, variant in itertools.product([None, 0.0, *vectors], vectors, ("I", "II")):
                for dr in (None, x.clone()):
                    kernels.input_grad_batch(x, x, weight, bias, invstd, *rest, variant, r, dr, mean)
                    kernels.input_grad(x, x, weight, bias, invstd, None, None, 0, *rest, variant, r, dr, mean)
                kernels.sums(x, x, weight, bias, *rest, variant, r, mean, invstd)
    assert len({kernel for kernel, *_ in compiled.values()}) == 6
    compiled.clear()
    x, invstd = torch.ones(2, 4, 3, 3), torch.ones(4)
    for like in (
        x,
        torch.ones(5, 4, 3, 3),
        x.to(memory_format=torch.channels_last),
        torch.ones(x.numel() + 1)[1:].view_as(x),
    ):
        kernels.normalize_batch_(like, None, None, None, None, None, None, 1e-5, *rest)
        kernels.input_grad_batch(like, like, None, None, invstd, *rest, "I", None, None, None)
        kernels.normalize_(like, invstd, invstd, None, None, *rest)
    assert len(compiled) == 12


def test_tensors_without_memory_are_refused(monkeypatch):
    """As DTensors are, which a kernel would read at address 0."""
    kernels = pytest.importorskip("inplace_abn.kernels")

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return args[0]

    monkeypatch.setattr(kernels.launches, "LAUNCHES", {})
    x, rest = torch.ones(2, 4, 3, 3), (1e-5, *resolve("leaky_relu", 0.01))
    with pytest.raises(TypeError, match="a Wrapper has no memory"):
        kernels.normalize_batch_(x, Wrapper(torch.ones(4)), None, None, None, None, 0.1, 1e-5, *rest)
    assert not kernels.launches.LAUNCHES and torch.equal(x, torch.ones_like(x))


def test_residency_follows_registers_and_shared_memory():
    kernels = pytest.importorskip("inplace_abn.kernels")
    where = kernels.plans.Card(*H200)
    # 65,536 registers of 256 threads each; 228 KiB of shared memory, 1 KiB of it per program.
    assert [kernels.plans.resident(n, 0, 8, where) for n in (32, 33, 64, 65, 255)] == [8, 6, 4, 3, 1]
    assert [kernels.plans.resident(32, n << 10, 8, where) for n in (27, 113, 114, 228)] == [8, 2, 1, 0]
    # Of 128 threads twice as many.
    assert [kernels.plans.resident(n, 0, 4, where) for n in (64, 168, 255)] == [8, 3, 2]


def is_held(kernels, *modules):
    """Whether a launch held its maps in shared memory, by the kernels of one of these modules."""
    rooms = [getattr(kernels.launches, name) or getattr(kernels, name) for name in modules or ("ring", "sweep")]
    held = {kernel for room in rooms for kernel in (room.forward_kernel, room.backward_kernel)}
    return any(launch and launch.kernel in held for launch in kernels.launches.LAUNCHES.values())


def hold(kernels, monkeypatch, held):
    """Small maps in shared memory, too, or none."""
    if held:
        monkeypatch.setattr(kernels.plans, "RING_LEAST", 0)
    else:
        monkeypatch.setattr(kernels.launches, "ring", None)


def few_processors(kernels, monkeypatch, processors, swept=False, tiles=7):
    """As if the card had so many; small maps are held in shared memory, too. On a CPU by threads, in so many small tiles."""
    hold(kernels, monkeypatch, True)
    if DEVICE == "cuda":
        card = kernels.plans.card
        monkeypatch.setattr(kernels.plans, "card", lambda where: card(where)._replace(processors=processors))
        return
    for name in ("ring", "sweep"):
        room = getattr(kernels.launches, name)
        emulated = SimpleNamespace(
            forward_kernel=Kernel(room.forward_kernel), backward_kernel=Kernel(room.backward_kernel)
        )
        monkeypatch.setattr(kernels.launches, name, emulated)
    monkeypatch.setattr(kernels.plans, "RING_BYTES", (256, 128))
    monkeypatch.setattr(kernels.plans, "RING_PIXELS", 65)
    monkeypatch.setattr(kernels.plans, "RING_EARLY", 1)
    # Several channels in a row are no less than that on a GPU.
    monkeypatch.setattr(kernels.plans, "TILE", 4096 if swept else 256)
    monkeypatch.setattr(kernels.plans, "SWEEP_BYTES", 4096)
    monkeypatch.setattr(kernels.plans, "SWEEP_WARPS", 2)
    monkeypatch.setattr(kernels.plans, "SWEEP_AHEAD", 3)
    monkeypatch.setattr(kernels.plans, "SWEEP_WORDS", 256)
    monkeypatch.setattr(kernels.launches, "_runner", lambda *_: None)
    # The interpreter's programs would wait for each other for ever.
    monkeypatch.setattr(kernels.plans, "team", lambda *_: pytest.fail("no room in shared memory"))
    shared = 2 * (tiles * 4096 + 4096) if swept else 3 * (9 * 256 + kernels.plans.RING_BESIDE)
    where = kernels.plans.Card(processors, 65536, 2048, shared, 1 << 20, True)
    monkeypatch.setattr(kernels.plans, "card", lambda _: where)


HELD = {
    "many members": ((32, 5, 56, 56), "contiguous", 132),
    "many rounds": ((3, 500, 8, 12), "contiguous", 2),
    "short vectors": ((128, 9, 14, 14), "contiguous", 5),
    "little to do": ((2, 7, 12, 12), "contiguous", 132),
    "gap": ((1, 3, 256, 8), "gap", 2),
    "rank 5": ((6, 4, 6, 8, 10), "gap", 3),
    "edges": ((5, 6, 33, 33), "contiguous", 3),
    "edges, many rows": ((70, 3, 23, 25), "contiguous", 8),
    "edges, many members": ((3, 4, 97, 97), "contiguous", 132),
}
SWEPT = {
    "many members": ((32, 256, 28, 28), "channels_last", 132),
    "many slabs": ((4, 2048, 7, 9), "channels_last", 132),
    "wide": ((64, 128, 100, 100), "channels_last", 132),
    "more than is held": ((64, 24, 40, 40), "channels_last", 2),
    "more than is held, none in registers": ((64, 24, 40, 40), "channels_last", 2),
    "some channels of a slab": ((3, 1000, 9, 11), "channels_last", 40),
    "little to do": ((2, 8, 6, 6), "channels_last", 132),
    "rank 5": ((3, 16, 5, 6, 7), "channels_last", 3),
    "rank 2": ((1000, 72), "contiguous", 2),
    "few pixels": ((128, 512, 7, 7), "contiguous", 132),
    "few pixels, one member": ((128, 64, 7, 7), "contiguous", 4),
    "few pixels, more than is held": ((700, 24, 7, 7), "contiguous", 2),
    "few pixels, more channels": ((40, 24, 5, 6), "contiguous", 9),
    "some pixels": ((128, 256, 7, 14), "contiguous", 132),
    "some pixels, more than is held": ((500, 32, 7, 14), "contiguous", 8),
}
if DEVICE == "cpu":
    HELD = {
        "many members": ((5, 3, 16, 16), "contiguous", 9),
        "many members, asked together": ((5, 3, 16, 16), "contiguous", 9),
        "asked early": ((4, 5, 16, 16), "contiguous", 5),
        "many rounds": ((1, 40, 8, 9), "contiguous", 1),
        "short vectors": ((3, 5, 10, 10), "contiguous", 2),
        "little to do": ((1, 2, 8, 9), "contiguous", 3),
        "gap": ((1, 3, 32, 8), "gap", 2),
        "rank 5": ((3, 4, 4, 5, 6), "gap", 2),
        "edges": ((3, 6, 9, 9), "contiguous", 2),
        "edges, many rows": ((11, 3, 7, 11), "contiguous", 5),
    }
    SWEPT = {
        "many members": ((6, 32, 13, 14), "channels_last", 9),
        "many members, two slabs": ((4, 64, 13, 14), "channels_last", 9),
        "one program on a processor": ((6, 32, 13, 14), "channels_last", 8),
        "more than is held": ((9, 24, 23, 16), "channels_last", 1),
        "more than is held, none in registers": ((9, 24, 23, 16), "channels_last", 1),
        "some channels of a slab": ((3, 72, 9, 7), "channels_last", 3),
        "little to do": ((2, 8, 6, 6), "channels_last", 3),
        "rank 2": ((100, 40), "contiguous", 2),
        "few pixels": ((40, 16, 5, 6), "contiguous", 6),
        "few pixels, more than is held": ((97, 16, 7, 7), "contiguous", 2),
        "few pixels, more channels": ((9, 24, 5, 6), "contiguous", 8),
        "some pixels": ((21, 16, 7, 14), "contiguous", 4),
        "few pixels, larger tiles": ((97, 16, 7, 7), "contiguous", 2, 13),
        "some pixels, larger tiles": ((61, 16, 7, 14), "contiguous", 4, 13),
    }


@runs_here
@pytest.mark.parametrize(
    "dtype, residual",
    # Numpy has no bfloat16; in the interpreter each dtype and each kind of step once.
    [(torch.float32, False), (torch.float16, True)]
    if DEVICE == "cpu"
    else [(dtype, residual) for dtype in (torch.float32, torch.bfloat16) for residual in (False, True)],
)
@pytest.mark.parametrize(
    "room, case",
    [*(("ring", name) for name in HELD), *(("sweep", name) for name in SWEPT)],
    ids=lambda v: v.replace(" ", "_"),
)
def test_maps_held_in_shared_memory(kernels, monkeypatch, room, case, dtype, residual):
    """Few processors have many rounds, or tiles; many have teams of many members."""
    shape, layout, processors, *tiles = HELD[case] if room == "ring" else SWEPT[case]
    few_processors(kernels, monkeypatch, processors, room == "sweep", *tiles)
    if "asked together" in case:
        monkeypatch.setattr(kernels.plans, "RING_ALONE", 0)
    if "none in registers" in case:
        monkeypatch.setattr(kernels.plans, "SWEEP_KEPT", 0)
    # Means that lie apart: moments taken about another channel's sample would cost digits.
    step(kernels, shape, layout, dtype, "leaky_relu", 0.01, 0.1, residual=residual, spread=20.0)
    fused = {launch.kernel for launch in kernels.launches.LAUNCHES.values() if launch and launch.words}
    used = getattr(kernels.launches, room)
    assert fused == {used.forward_kernel, used.backward_kernel}
    if "many members" in case and room == "ring" and DEVICE == "cpu":
        alone = {launch.constants["ALONE"] for launch in kernels.launches.LAUNCHES.values() if launch and launch.words}
        assert alone == {"asked together" not in case}
    if "asked early" in case and not residual:
        assert {
            launch.constants["EARLY"] for launch in kernels.launches.LAUNCHES.values() if launch and launch.words
        } & {1}
    # A card may have no room for it.
    if "more than is held" in case and DEVICE == "cpu":
        kept = {launch.constants["Q"] > 0 for launch in kernels.launches.LAUNCHES.values() if launch and launch.words}
        assert kept == {"none in registers" not in case}


@pytest.mark.skipif(DEVICE != "cpu", reason="sizes for the emulator")
def test_swept_cases_are_of_all_kinds(monkeypatch):
    """Who adds up words, whether threads wait for them alone, and how many members, words of a thread and warps there are."""
    kernels = pytest.importorskip("inplace_abn.kernels")
    if kernels.launches.sweep is None:
        pytest.skip("this Triton has no Gluon")
    kinds = set()
    for shape, layout, processors, *tiles in SWEPT.values():
        with monkeypatch.context() as patch:
            few_processors(kernels, patch, processors, True, *tiles)
            base, view = LAYOUTS[layout](torch.zeros(shape))
            x = view(base)
            where = kernels.plans.card(x.device)
            for itemsize, maps, held in [(4, 1, 1), (4, 2, 2), (2, 2, 1), (2, 3, 3)]:
                s = kernels.plans.sweep_of(kernels.plans.layout(x), itemsize, maps, held, where)
                block = kernels.launches._swept(s, kernels.plans.layout(x))[3]["BS"]
                lines = 32 * s.warps // min(s.P, 32)
                kinds.add((s.S > 1, s.columns == 2 * s.P, block > lines, s.warps > kernels.plans.SWEEP_WARPS, s.G > 1))
    one, once, alone = (False, True, False, False), (True, True, False, False), (True, True, False, True)
    assert kinds >= {
        (*kind, True) for kind in (one, once, alone, (True, True, True, False), (True, False, True, False))
    }


@pytest.mark.parametrize("late", [(0, 0), (3, 0), (0, 3), (2, 4)], ids=str)
def test_a_thread_looks_until_both_its_words_bear_the_stamp(late):
    ring = pytest.importorskip("inplace_abn.kernels.ring")
    before, stamp, values, address = 6, 7, (0xC0FFEE, 0xFFFFFFFF), 4096
    text = ring.LOOK_ALONE.value.replace(str(ring.PATIENCE.value), "9")
    looks = {address: 0, address + 8: 0}

    def word(i, look):
        return (stamp if look >= late[i] else before) << 32 | values[i]

    def read(at):
        looks[at] += 1
        return word((at - address) // 8, looks[at])

    operands = {"$2": word(0, 0), "$3": word(1, 0), "$4": address, "$5": stamp, "$6": 1}
    left = run_ptx(text, operands, read)
    assert (left["$0"], left["$1"]) == values and set(looks.values()) == {max(late)}
    # Where there are no words nobody looks, and for one that never comes not for ever.
    run_ptx(text, {**operands, "$2": 0, "$3": 0, "$6": 0}, None)
    with pytest.raises(TimeoutError):
        run_ptx(text, {**operands, "$2": 0}, lambda at: before << 32)


@pytest.mark.skipif(not INTERPRETED, reason="a compiler's answers are made up")
def test_activations_that_spill_hold_fewer_tiles_in_registers(kernels, monkeypatch):
    few_processors(kernels, monkeypatch, 1, swept=True)
    asked = []

    def warmup(self, *arguments, **constants):
        asked.append((self.__name__, constants["Q"]))
        # As many words as may be without a tile, four more for each.
        spills = kernels.plans.SWEEP_SPILLS + 4 * (constants["Q"] - (2 if self.__name__ == "forward_kernel" else 0))
        return SimpleNamespace(n_regs=255, n_spills=spills, metadata=SimpleNamespace(shared=0))

    monkeypatch.setattr(Kernel, "warmup", warmup)
    step(kernels, (9, 24, 23, 16), "channels_last", torch.float32, "leaky_relu", 0.01, 0.1)
    assert asked[:7] == [*(("forward_kernel", q) for q in (6, 4, 2)), *(("backward_kernel", q) for q in (6, 4, 2, 0))]
    used = {k.kernel.__name__: k.constants["Q"] for k in kernels.launches.LAUNCHES.values() if k and k.words}
    assert used == {"forward_kernel": 2, "backward_kernel": 0}


@runs_here
@pytest.mark.parametrize("epoch", [0, (1 << 31) - 5, -(1 << 30)], ids=str)
def test_launches_of_all_kinds_count_in_one_word(kernels, monkeypatch, epoch):
    """Sweeps add up to the next epoch, the last program of a ring sets it; plain and cumulative averages alike."""
    few_processors(kernels, monkeypatch, 3, swept=True)
    if DEVICE == "cpu":
        # Tiles of a size for the room that sweeps have.
        monkeypatch.setattr(kernels.plans, "RING_BYTES", (4096, 2048))
    # Rings, sweeps that share channels, and sweeps of which each program has its own.
    shapes = [((3, 5, 10, 12), "contiguous"), ((6, 16, 13, 14), "channels_last"), ((9, 48, 5, 6), "contiguous")]
    words, sync = kernels.launches._fresh_words(torch.device(DEVICE), 1 << 16)
    one = kernels.device.EPOCH.value
    sync.fill_(epoch * one)
    key = torch.empty(0, device=DEVICE).device, 0
    monkeypatch.setitem(kernels.launches.WORDS, key, (words, sync))
    counts, last = {}, epoch
    for momentum in (0.1, None, 0.1):
        for shape, layout in shapes:
            base, view = LAYOUTS[layout](torch.randn(shape, device=DEVICE))
            x, channels = view(base), shape[1]
            mean, var = torch.zeros(channels, device=DEVICE), torch.ones(channels, device=DEVICE)
            tracked = counts.setdefault(shape, torch.zeros((), dtype=torch.int64, device=DEVICE))
            before = int(tracked)
            ones = torch.ones(channels, device=DEVICE)
            rest = (1e-5, *resolve("leaky_relu", 0.1))
            invstd = kernels.normalize_batch_(x, ones, None, mean, var, tracked, momentum, 1e-5, *rest)
            kernels.input_grad_batch(torch.ones_like(x), x, ones, None, invstd, *rest, "II")
            assert int(tracked) == before + 1
            # Nobody is left in the count; the epoch, of which stamps have 32 bits, moves on where programs share a channel.
            word = int(sync)
            moved = (word // one - last) % (1 << 32)
            assert word % one == 0 and (0 < moved < 100 if channels != 48 else moved == (momentum is None))
            last = word // one
    used = {launch.kernel for launch in kernels.launches.LAUNCHES.values() if launch}
    assert len(used) == 4 and last != epoch


@runs_here
def test_a_triton_that_compiles_no_gluon_is_told_once_and_does_without(kernels, monkeypatch):
    few_processors(kernels, monkeypatch, 2)

    def fails(*_):
        raise AttributeError("async_copy")

    monkeypatch.setattr(kernels.launches, "_build", fails)
    x = torch.randn(2, 4, 10, 12, device=DEVICE)
    place, where = kernels.plans.layout(x), kernels.plans.card(x.device)
    arguments = (kernels.device.forward_kernel, 2, 1, [x] * 8, (0.1,) * 4, {"RESIDUAL": False}, place, where)
    with pytest.warns(UserWarning, match="does not compile .* async_copy"):
        assert kernels.launches._held_launch(*arguments) is None
    assert kernels.launches._held_launch(*arguments) is None


@runs_here
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "shape, layout",
    [
        ((3, 7, 9, 16), torch.contiguous_format),
        ((3, 7, 9, 67 if DEVICE == "cuda" else 13), torch.contiguous_format),
        ((3, 24, 9, 5), torch.channels_last),
        ((3, 24, 7, 7), torch.contiguous_format),
    ],
    ids=str,
)
def test_a_channel_that_is_held_keeps_to_itself(kernels, monkeypatch, shape, layout):
    """What is not finite in one channel leaves its neighbours' bits as they are, at the edges of rows as well."""
    few_processors(kernels, monkeypatch, 3, shape[1] == 24)
    clean = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    keeps_to_itself(kernels, clean.contiguous(memory_format=layout))
    assert is_held(kernels)


@runs_here
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_maps_held_in_shared_memory_with_another_activation(kernels, monkeypatch, layout, affine):
    few_processors(kernels, monkeypatch, 4, layout == "channels_last")
    shape = (8, 16, 28, 28) if DEVICE == "cuda" else (2, 8, 10, 12)
    step(kernels, shape, layout, torch.float16, "elu", 1.0, None, affine)
    assert is_held(kernels)


@runs_here
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["relu", "leaky_relu", "elu"])
def test_maps_held_in_shared_memory_from_x(kernels, monkeypatch, name, layout):
    few_processors(kernels, monkeypatch, 132 if DEVICE == "cuda" else 30, layout == "channels_last")
    test_from_x(kernels, name, "second trip" if layout == "contiguous" else "eight channels", layout)
    assert is_held(kernels)


@runs_here
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_without_a_team_each_verb_has_its_launch(kernels, monkeypatch, layout):
    monkeypatch.setattr(kernels.plans, "team", lambda *_: None)
    monkeypatch.setattr(kernels.launches, "ring", None)
    for shape in ("odd", "second trip", "few pixels, odd"):
        step(kernels, SHAPES[shape], layout, torch.float32, "leaky_relu", 0.01, None)
    assert None in kernels.launches.LAUNCHES.values()
    assert not any(launch and launch.words for launch in kernels.launches.LAUNCHES.values())


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU teams run as they are")
@pytest.mark.parametrize(
    "shape, layout",
    [
        ((6, 2, 33, 32), "contiguous"),
        ((5, 3, 19, 13), "contiguous"),
        ((40, 40), "contiguous"),
        ((9, 3, 5, 5), "channels_last"),
        ((64, 16, 4, 4), "contiguous"),
    ],
    ids=str,
)
def test_members_find_each_others_sums(kernels, monkeypatch, shape, layout):
    """What a team exchanges, without a team: the interpreter runs programs one after another, so nobody can be waited for.

    Words that bear the right stamp from the start make nobody wait. In the first launch members publish their sums, in the
    second the totals, and in the third everything is there. Backward, since forward the first overwrites what the next reads.
    """
    where = kernels.plans.Card(4, 65536, 2048, 1 << 17, 1 << 20, False)
    monkeypatch.setattr(kernels.plans, "card", lambda device: where)
    g = torch.Generator().manual_seed(0)
    base, view = LAYOUTS[layout](torch.randn(shape, generator=g))
    z, dz = view(base), torch.randn(shape, generator=g)
    weight, bias, invstd = torch.rand(3, shape[1], generator=g) + 0.5
    cut = kernels.plans.cut(kernels.plans.layout(z), z.element_size(), True)
    team = kernels.plans.team(cut, 2, where)
    # More rounds would need more stamps.
    assert team.S > 1 and team.G == cut.slabs
    words, sync = torch.full((1 << 16,), 1 << 32), torch.zeros(1, dtype=torch.int64)
    monkeypatch.setitem(kernels.launches.WORDS, (base.device, 0), (words, sync))
    rest = (1e-5, *resolve("leaky_relu", 0.1), "II")
    for _ in range(3):
        sync.zero_()
        dx, dgamma, dbeta = kernels.input_grad_batch(dz, z, weight, bias, invstd, *rest)
    assert sync.item() == kernels.device.EPOCH.value
    count = z.numel() // shape[1]
    sums = reference.sums(dz.double(), z.double(), weight, bias, *rest)
    want = reference.input_grad(dz.double(), z.double(), weight, bias, invstd, *sums, count, *rest)
    assert near(dx, want, count) and near(dgamma, sums[1], count) and near(dbeta, sums[0], count)


@runs_here
@pytest.mark.parametrize(
    "shape, strides",
    [((3, 2, 4, 6), (2**30 + 8, 24, 6, 1)), ((3, 2), (2**30 + 8, 1)), ((384, 32), (2**23 + 8, 1))],
    ids=["outer", "inner", "swept"],
)
def test_offsets_beyond_32_bits(kernels, shape, strides):
    """Few elements, far apart: the same bits as close together. A GPU sweeps over the last."""
    phi, a = resolve("leaky_relu", 0.01)
    results = []
    for far in (False, True):
        g = torch.Generator().manual_seed(0)
        x, dz = (torch.randn(shape, generator=g).half().to(DEVICE) for _ in range(2))
        if far:
            # Reserved, and touched in a few pages only.
            x, dz = (torch.empty_strided(shape, strides, dtype=v.dtype, device=DEVICE).copy_(v) for v in (x, dz))
        mean, var, _ = kernels.moments(x)
        invstd = kernels.normalize_batch_(x, None, None, None, None, None, 0.1, 1e-5, 1e-5, phi, a)
        gradients = kernels.input_grad_batch(dz, x, None, None, invstd, 1e-5, phi, a, "II")
        fixed = kernels.input_grad(dz, x, None, None, invstd, None, None, 0, 1e-5, phi, a, "II")
        results.append([mean, var, x, invstd, *gradients, fixed])
    assert all(torch.equal(close, far_off) for close, far_off in zip(*results, strict=True))
    assert DEVICE == "cpu" or is_held(kernels, "sweep") == (shape[0] == 384)


def test_samples_are_spread():
    """Where there is something, apart and in equal steps where there is room, and off both borders by half a step."""
    device = pytest.importorskip("inplace_abn.kernels.device")
    stepped = FunctionType(device.stepped.fn.__code__, {"tl": SimpleNamespace(minimum=min, maximum=max)})
    for n in (*range(1, 200), *(2**k + d for k in range(8, 30) for d in (-1, 0, 1)), 2**30 - 1):
        assert all(device.part.fn(n, i) == n * (2 * i + 1) // 18 for i in range(9))
        at = [stepped(n, i) for i in range(9)]
        assert at == sorted(at) and 0 <= at[0] and at[-1] < n and len(set(at)) == min(n, 9)
        steps = {b - a for a, b in itertools.pairwise(at)}
        assert n < 18 or (len(steps) == 1 and at[0] >= n // 18 and at[-1] <= n - n // 18)
        # All that is computed on the way has 32 bits.
        assert n // 18 + 8 * max(n // 9, 1) < 1 << 31


@runs_here
def test_the_last_program_counts_where_all_read_the_counter(kernels, monkeypatch):
    """Slabs of one member each, the plain average over batches: on a CPU the first program ends before the others begin."""
    few_processors(kernels, monkeypatch, 4, True)
    step(kernels, (9, 64, 5, 6), "contiguous", torch.float32, "leaky_relu", 0.01, None)
    launch = next(
        k for k in kernels.launches.LAUNCHES.values() if k and k.kernel is kernels.launches.sweep.forward_kernel
    )
    assert launch.grid[0] > 1 and not launch.constants["SHARED"]


BUILD = """
import itertools
import subprocess
import sys
import tempfile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon._runtime import GluonASTSource
from inplace_abn import ACTIVATIONS, kernels
from inplace_abn.kernels import device, ring, sweep

NUMBERS = "rows channels pixels row_stride channel_stride across chunks per slabs S G".split()
NUMBERS += "per_row vectors each".split()
HELD = {k for room in (ring, sweep) for k in (room.forward_kernel, room.backward_kernel)}
KINDS = dict.fromkeys(["x_ptr", "z_ptr", "r_ptr", "dz_ptr", "dx_ptr", "dr_ptr"], "*bf16")
KINDS |= {"count_ptr": "*i32", "sync_ptr": "*i64", "tracked_ptr": "*i64", "words_ptr": "*i64"}
LAYOUTS = [
    kernels.plans.Layout(False, 32, 256, 3136, 256 * 3136, 3136),
    kernels.plans.Layout(False, 12, 4096, 9409, 4096 * 9409, 9409),
    kernels.plans.Layout(True, 32 * 3136, 256, 1, 256, 1),
    kernels.plans.Layout(False, 32, 2048, 49, 2048 * 49, 49),
]

TILE = kernels.plans.TILE

def build(kernel, architecture, constants, number="bf16", **options):
    constants = {name: v for name, v in constants.items() if name in kernel.arg_names}
    other = lambda n: "*fp32" if n.endswith("_ptr") else "i32" if n in NUMBERS else "fp32"
    kinds = {n: "constexpr" if n in constants else KINDS.get(n, other(n)).replace("bf16", number) for n in kernel.arg_names}
    # Addresses as torch gives them.
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n.endswith("_ptr")}
    source = GluonASTSource if kernel in HELD else ASTSource
    return compile(source(kernel, kinds, constants, aligned), target=GPUTarget("cuda", architecture, 32),
                   options={"num_warps": kernels.plans.WARPS, **options})
"""
AHEAD_OF_TIME = (
    BUILD
    + """
for name in sys.argv[1:]:
    phi = ACTIVATIONS[name]
    forward, inverse, backward = kernels.compiled(phi)
    plain = name == "leaky_relu"
    for architecture in (80, 90, 100) if plain else (90,):
        # Code for full tiles takes long to assemble, so it is made once.
        full = plain and architecture == 90
        kernels.plans.TILE = TILE if full else 1024
        kernels.plans.cut.cache_clear()
        # Elsewhere one of each kind: the second has all that the first has, and edges.
        for place in LAYOUTS[:1] if not plain else LAYOUTS if architecture == 90 else LAYOUTS[1:]:
            c = kernels.plans.cut(place, 2, True)
            w = c.constants["W"]
            constants = {
                **c.constants, "PHI": forward, "INVERSE": inverse, "BACKWARD": backward, "VARIANT_I": False,
                "HAS_WEIGHT": True, "HAS_BIAS": True, "RESIDUAL": True, "NEED_R": True,
                "FROM_X": phi.inverse is None, "HAT": False,
                "TRACK": True, "CUMULATIVE": architecture == 80, "COUNTED": True, "FIXED": False,
                "SHARED": True, "MW": min(w, 2), "BS": 128, "THREADS": 32 * kernels.plans.WARPS,
            }
            fused = {"maxnreg": kernels.plans.registers(c.constants["INNER"]), "launch_cooperative_grid": True}
            build(device.forward_kernel, architecture, constants, **fused)
            build(device.backward_kernel, architecture, constants, **fused)
            # Elsewhere with edges, which have all that others have.
            if place is LAYOUTS[0 if architecture == 90 else 1]:
                in_ring = {"V": 8, "LINES": 128, "WARPS": kernels.plans.RING_WARPS}
                in_ring |= {"T": 3, "LAG": 5, "AHEAD": 2} if full else {"T": 2, "LAG": 3, "AHEAD": 1}
                in_ring |= {"EDGES": 0, "EARLY": 1} if architecture == 90 else {"EDGES": 256, "EARLY": 0}
                in_ring |= {"ALONE": architecture != 100}
                options = {"maxnreg": 168, "launch_cooperative_grid": True, "num_warps": kernels.plans.RING_WARPS}
                for kernel in (ring.forward_kernel, ring.backward_kernel):
                    text = build(kernel, architecture, {**constants, **in_ring}, **options).asm["ptx"]
                    # Whole vectors, or nothing is gained.
                    assert "cp.async.cg.shared.global" in text and ", 0x10, " in text, text[:2000]
            # Activations are the same code here as in rings.
            if place in LAYOUTS[2:]:
                in_sweep = {"V": 8, "K": 2, "AHEAD": 3, "BS": 64, "WARPS": kernels.plans.SWEEP_WARPS}
                # Sums exchanged at once, and in two steps; all tiles held, and not.
                packed = {"P": 8, "W": 512, "B": 2, "PIXELS": 49, "WHOLE": False, "COLUMNS": 16, "SHARED": False}
                packed |= {"Q": 0, "H": 9, "R": 0}
                inner = {"P": 64, "W": 64, "B": 16, "PIXELS": 1, "WHOLE": True, "COLUMNS": 2}
                inner |= {"Q": 2 if full else 1, "H": 5, "R": 4}
                kinds = [packed if place is LAYOUTS[3] else inner]
                if full and place is LAYOUTS[2]:
                    # Few members: threads wait for their words alone, and, with more of them, together.
                    few = {**inner, "P": 32, "W": 32, "COLUMNS": 64, "Q": 0, "H": 14, "R": 0}
                    kinds += [{**few, "B": 64, "WARPS": 8, "BS": 4}, {**few, "B": 32, "BS": 32}]
                for kind, kernel in itertools.product(kinds, (sweep.forward_kernel, sweep.backward_kernel)):
                    held = {**constants, **in_sweep, **kind}
                    options = {"maxnreg": 255, "launch_cooperative_grid": True, "num_warps": held["WARPS"]}
                    text = build(kernel, architecture, held, **options).asm["ptx"]
                    assert "cp.async.cg.shared.global" in text and ", 0x10, " in text, text[:2000]
            if plain and (architecture == 90 or place is LAYOUTS[1]):
                for kernel in (device.moments_kernel, device.transform_kernel, device.sums_kernel, device.input_grad_kernel):
                    capped = {"maxnreg": 64} if kernel is device.sums_kernel and c.constants["INNER"] else {}
                    build(kernel, architecture, {**constants, "BS": 16}, **capped)
print("built")
"""
)
OTHERS = [name for name in ACTIVATIONS if name != "leaky_relu"]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "names", [["leaky_relu"], OTHERS[::2], OTHERS[1::2]], ids=["three architectures", "activations", "more activations"]
)
def test_every_kernel_compiles_ahead_of_time(tmp_path, names):
    """Without a GPU: one activation for three architectures, every activation for one."""
    pytest.importorskip("triton")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src"), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", AHEAD_OF_TIME, *names], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and "built" in done.stdout, done.stderr[-3000:]


IN_REGISTERS = (
    BUILD
    + """
from triton import knobs

sys.path.insert(0, sys.argv[1])
from emulated import H200

card, (forward, inverse, backward) = kernels.plans.Card(*H200), kernels.compiled(ACTIVATIONS["leaky_relu"])
outer = lambda n, c, pixels: kernels.plans.Layout(False, n, c, pixels, c * pixels, pixels)
inner = lambda n, c, pixels: kernels.plans.Layout(True, n * pixels, c, 1, c, 1)
for place, number in [(outer(32, 256, 3136), "fp32"), (outer(128, 64, 12544), "bf16"), (inner(128, 256, 3136), "bf16"),
                      (inner(128, 512, 784), "fp32"), (inner(32, 2048, 49), "bf16"), (inner(32, 512, 196), "bf16")]:
    for maps, name in enumerate(("forward_kernel", "backward_kernel"), 1):
        how = (place, 2 if number == "bf16" else 4, maps, maps, card)
        plan = kernels.plans.sweep_of(*how) or kernels.plans.ring_of(*how)
        held = kernels.launches._in_a_ring if isinstance(plan, kernels.plans.Ring) else kernels.launches._swept
        module, warps, _, own, _ = held(plan, place)
        constants = {"PHI": forward, "INVERSE": inverse, "BACKWARD": backward, "VARIANT_I": False, "HAS_WEIGHT": True,
                     "HAS_BIAS": True, "RESIDUAL": False, "NEED_R": False, "FROM_X": False, "HAT": False, "TRACK": True,
                     "CUMULATIVE": False, "COUNTED": True, "SHARED": True, "WARPS": warps, **own}
        options = {"maxnreg": plan.registers, "launch_cooperative_grid": True, "num_warps": warps}
        built = build(getattr(module, name), 90, constants, number, **options)
        assert kernels.plans.resident(plan.registers, built.metadata.shared, warps, card) * 132 >= plan.S * plan.G, plan
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            tool = knobs.nvidia.cuobjdump.path
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        assert " STACK:0 " in usage, (name, place, number, usage)
print("built")
"""
)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_kernels_that_hold_maps_fit_registers_and_the_card(tmp_path):
    """By their own plans on an H200, with leaky ReLU: what spills is slow, and what is not resident goes another way."""
    pytest.importorskip("triton")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src"), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", IN_REGISTERS, str(Path(__file__).parent)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "built" in done.stdout, done.stderr[-3000:]


def train(x, dz):
    layer = InPlaceABN(x.shape[1]).cuda()
    leaf = x.clone().requires_grad_()
    z = layer(leaf * 1)
    z.backward(dz)
    return [z.detach(), leaf.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]


@on_a_gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_same_input_gives_the_same_bits_on_every_stream(layout):
    x, dz = (torch.randn(32, 192, 56, 56, device="cuda").bfloat16().contiguous(memory_format=layout) for _ in range(2))
    want = train(x, dz)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for i in range(100):
        with torch.cuda.stream(streams[i % 3]):
            results.append([torch.equal(a, b) for a, b in zip(train(x, dz), want, strict=True)])
    torch.cuda.synchronize()
    assert all(all(r) for r in results)


@on_a_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("shape", [(32, 96, 56, 56), (8, 64, 28, 28), (12, 64, 97, 97), (32, 256, 7, 7)], ids=str)
def test_one_launch_each_way_and_the_host_never_waits(shape):
    """The leaf's own multiplication aside, which is one launch each way too."""
    layer = InPlaceABN(shape[1]).cuda()
    leaf, dz = torch.randn(shape, device="cuda", requires_grad=True), torch.randn(shape, device="cuda")
    inputs = [leaf, *layer.parameters()]
    # Memory nobody wrote is filled by kernels of its own otherwise.
    torch.use_deterministic_algorithms(False)
    torch.autograd.grad(layer(leaf * 1), inputs, dz)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            torch.autograd.grad(layer(leaf * 1), inputs, dz)
            torch.cuda.set_sync_debug_mode(mode)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    launched = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert [n for n in launched if "mul" not in n.lower()] == ["forward_kernel", "backward_kernel"]


@on_a_gpu
@pytest.mark.parametrize("held", [True, False], ids=["shared memory", "L2"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_thousand_calls_give_one_bit_pattern(kernels, monkeypatch, layout, held):
    hold(kernels, monkeypatch, held)
    x, dz = (torch.randn(16, 64, 40, 41, device="cuda").half().contiguous(memory_format=layout) for _ in range(2))
    want = train(x, dz)
    assert all(all(torch.equal(a, b) for a, b in zip(train(x, dz), want, strict=True)) for _ in range(1000))


BITS = """
import hashlib, torch
from inplace_abn import InPlaceABN
torch.manual_seed(0)
digest = hashlib.sha256()
for shape in ((16, 64, 40, 41), (32, 256, 7, 7), (32, 192, 56, 56)):
    for layout in (torch.contiguous_format, torch.channels_last):
        layer = InPlaceABN(shape[1])
        torch.nn.init.normal_(layer.weight)
        torch.nn.init.normal_(layer.bias)
        x, dz = (torch.randn(shape).bfloat16().contiguous(memory_format=layout).cuda() for _ in range(2))
        layer.cuda()
        leaf = x.requires_grad_()
        z = layer(leaf * 1)
        z.backward(dz)
        for t in (z, leaf.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var):
            digest.update(t.detach().float().cpu().numpy().tobytes())
print(digest.hexdigest())
"""


@on_a_gpu
@pytest.mark.long
def test_twenty_processes_give_one_bit_pattern():
    def once(_: int) -> str:
        return subprocess.run([sys.executable, "-c", BITS], check=True, capture_output=True, text=True).stdout

    with ThreadPoolExecutor(10) as pool:
        assert len(set(pool.map(once, range(20)))) == 1


SANITIZED = """
import torch
from inplace_abn import InPlaceABN, kernels
kernels.plans.RING_LEAST = 0
torch.manual_seed(0)
for shape, layout, residual in (
    ((4, 40, 28, 28), torch.contiguous_format, False),
    ((4, 40, 28, 28), torch.contiguous_format, True),
    ((4, 40, 28, 28), torch.channels_last, True),
    ((4, 256, 14, 14), torch.channels_last, False),
    ((3, 9, 33, 33), torch.contiguous_format, True),
    ((3, 9, 5, 9), torch.contiguous_format, True),
    ((8, 64, 7, 7), torch.contiguous_format, False),
    ((64, 64, 7, 7), torch.contiguous_format, True),
    ((2, 9, 6, 6), torch.channels_last, True),
    ((32, 128, 40, 40), torch.channels_last, True),
):
    layer = InPlaceABN(shape[1]).cuda()
    x, dz, r = (torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=layout) for _ in range(3))
    layer(x.requires_grad_() * 1, residual=r if residual else None).backward(dz)
torch.cuda.synchronize()
print("done")
"""


@on_a_gpu
@pytest.mark.long
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool):
    found = shutil.which("compute-sanitizer", path=os.environ["PATH"] + ":/usr/local/cuda/bin")
    if found is None:
        pytest.skip("needs compute-sanitizer")
    # Of our kernels alone; blocks of memory of their own, so that memcheck sees their ends.
    command = [
        found,
        "--tool",
        tool,
        "--kernel-name-exclude",
        "kns=at",
        "--error-exitcode",
        "3",
        sys.executable,
        "-c",
        SANITIZED,
    ]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert (
        done.returncode == 0 and "done" in done.stdout and "0 errors" in done.stdout.replace("0 hazards", "0 errors")
    ), done.stdout[-3000:] + done.stderr[-2000:]


@on_a_gpu
@pytest.mark.parametrize("held", [True, False], ids=["shared memory", "L2"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_teams_finish_beside_work_that_fills_the_card(kernels, monkeypatch, layout, held):
    """On two streams at once, and with large products on a third."""
    hold(kernels, monkeypatch, held)
    x, dz = (torch.randn(32, 64, 56, 56, device="cuda").contiguous(memory_format=layout) for _ in range(2))
    want = train(x, dz)
    square = torch.randn(8192, 8192, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        with torch.cuda.stream(streams[2]):
            square @ square
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                results.append(train(x, dz))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, want, strict=True))
    assert is_held(kernels, "sweep" if layout is torch.channels_last else "ring") == held


@on_a_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("held", [True, False], ids=["shared memory", "L2"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_captured_graph_replays_bit_for_bit(kernels, monkeypatch, layout, held):
    hold(kernels, monkeypatch, held)
    layer, twin = InPlaceABN(16).cuda(), InPlaceABN(16).cuda()
    x = torch.randn(8, 16, 28, 28, device="cuda").contiguous(memory_format=layout).requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(layer(x * 1).square().sum(), [x, *layer.parameters()])
    torch.cuda.synchronize()
    layer.reset_running_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = layer(x * 1)
        grads = torch.autograd.grad(z.square().sum(), [x, *layer.parameters()])
    for _ in range(100):
        with torch.no_grad():
            x.normal_()
        graph.replay()
        want = twin(x * 1)
        want_grads = torch.autograd.grad(want.square().sum(), [x, *twin.parameters()])
        assert torch.equal(z, want) and all(torch.equal(a, b) for a, b in zip(grads, want_grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), twin.buffers(), strict=True))
    assert layer.num_batches_tracked == 100
    assert is_held(kernels, "sweep" if layout is torch.channels_last else "ring") == held


@runs_here
@pytest.mark.parametrize("overwrites", [True, False])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_versions_of_what_kernels_moved_have_moved(kernels, dtype, counted, overwrites):
    moved = [torch.zeros(4, dtype=dtype, device=DEVICE) for _ in range(2)]
    if counted:
        moved.append(torch.tensor(0, device=DEVICE))
    x = torch.randn(2, 4, 3, 3, device=DEVICE)
    normalize = kernels.normalize_batch_ if overwrites else kernels.normalize_batch
    normalize(x, None, None, *moved[:2], moved[2] if counted else None, 0.1, 1e-5, 0.0, *resolve("leaky_relu", 0.01))
    assert all(t._version > 0 for t in moved)


@on_a_gpu
def test_autograd_sees_that_statistics_moved_and_saved_bytes_puts_them_back():
    layer = InPlaceABN(4).cuda()
    x = torch.randn(2, 4, 8, 8, device="cuda")
    versions = [b._version for b in layer.buffers()]
    assert saved_bytes(layer, x).total == x.nbytes + 4 * 4
    assert layer.num_batches_tracked == 0 and torch.equal(layer.running_mean, torch.zeros(4, device="cuda"))
    layer(x.requires_grad_())
    assert all(b._version > v for b, v in zip(layer.buffers(), versions, strict=True))


@on_a_gpu
def test_strided_buffers_and_negated_tensors():
    x = torch.complex(torch.randn(4, 6, 5, 5), torch.randn(4, 6, 5, 5)).cuda().conj().imag
    wide = torch.zeros(6, 2, device="cuda"), torch.ones(6, 2, device="cuda")
    mean, var = (w[:, 0] for w in wide)
    leaf = x.detach().requires_grad_()
    inplace_abn(leaf + 0, None, None, mean, var, True, 1.0).sum().backward()
    assert torch.allclose(mean, x.mean((0, 2, 3)), atol=1e-6) and torch.equal(
        wide[0][:, 1], torch.zeros(6, device="cuda")
    )
    dz = torch.complex(x, x).conj().imag
    assert dz.is_neg()
    grads = []
    for given in (dz, dz.resolve_neg()):
        leaf = x.resolve_neg().clone().requires_grad_()
        grads += torch.autograd.grad(inplace_abn(leaf * 1, None, None, None, None), leaf, given)
    assert torch.equal(*grads)


@on_a_gpu
@pytest.mark.parametrize("shape", [(200_704, 8), (140_000, 3, 1, 1), (1, 5, 1 << 20)], ids=str)
def test_many_rows(shape):
    x = torch.randn(shape, device="cuda") * 2 + 3
    z, *_ = train(x, torch.ones_like(x))
    want = F.leaky_relu(F.batch_norm(x.double(), None, None, training=True), 0.01)
    # One rounding of x − mean, which is then divided by σ = 2.
    assert (z - want).abs().max() <= 4 * ulp(torch.float32) * x.abs().max()


@on_a_gpu
@pytest.mark.parametrize("images", [31, 33])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_more_than_two_to_the_31_elements(layout, images):
    """Or nearly so many, as many as those kernels take that count them in 32 bits."""
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of GPU memory")
    shape = (images, 64, 1024, 1024)
    x = torch.empty(shape, device="cuda", dtype=torch.bfloat16, memory_format=layout)
    for image in x:
        image.normal_()
    tail = x[-1:].clone()
    layer = InPlaceABN(64, momentum=1.0).cuda()
    leaf = x.requires_grad_()
    z = layer(leaf)
    scale = (layer.running_var + 1e-5).rsqrt().view(1, -1, 1, 1)
    want = F.leaky_relu((tail.float() - layer.running_mean.view(1, -1, 1, 1)) * scale, 0.01)
    # Half an ulp of bfloat16 for |z| < 8.
    assert want.abs().max() < 8 and (z[-1:].float() - want).abs().max() <= 2**-6
    (dx,) = torch.autograd.grad(z, leaf, z.detach())
    assert dx[-1].isfinite().all() and dx[-1].abs().max() > 0

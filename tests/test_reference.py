from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bounds import error, exact, oracle, ulp
from inplace_abn import ACTIVATIONS, inplace_abn, reference
from inplace_abn.activations import resolve
from layouts import LAYOUTS

INVERTIBLE = [name for name, phi in ACTIVATIONS.items() if phi.inverse is not None]
COVARIANT = [name for name in INVERTIBLE if ACTIVATIONS[name].scale_covariant]
SIGNS = {"mixed": [1.0, -1.0, 1.0], "negative": [-1.0, -1.0, -1.0]}


def vectors(channels=3, signs="mixed", dtype=torch.float64):
    weight = (torch.rand(channels, dtype=dtype) + 0.5) * torch.tensor(SIGNS[signs], dtype=dtype)
    return (
        weight,
        torch.randn(channels, dtype=dtype) * 0.3,
        torch.randn(channels, dtype=dtype),
        torch.rand(channels, dtype=dtype) + 0.5,
    )


GRADCHECKS = [
    (name, variant, signs, layout, training, True)
    for name in INVERTIBLE
    for variant in ("I", "II")
    for signs, layout in (("mixed", "contiguous"), ("negative", "channels_last"))
    for training in (True, False)
] + [
    (name, variant, "mixed", layout, training, affine)
    for name in COVARIANT
    for variant in ("I", "II")
    for layout in ("stepped", "transposed")
    for training in (True, False)
    for affine in (False, "bias")
]


@pytest.mark.parametrize("name, variant, signs, layout, training, affine", GRADCHECKS)
def test_gradcheck(name, variant, signs, layout, training, affine):
    weight, bias, *running = vectors(signs=signs)
    base, view = LAYOUTS[layout](torch.randn(3, 3, 2, 3, dtype=torch.float64) * 1.5)
    a = 1.3 if ACTIVATIONS[name].parameter == "alpha" else 0.2
    # A kink within the step of the finite difference would spoil it.
    y = oracle(view(base), weight, bias, torch.zeros_like(view(base)), 1e-5, name, a, None if training else running).y
    assert abs(y).min() > 1e-5

    def function(base, *parameters):
        w, b = {True: parameters, "bias": (None, *parameters), False: (None, None)}[affine]
        stats = [r.clone() for r in running]
        return inplace_abn(view(base * 1), w, b, *stats, training, 0.1, 1e-5, name, a, variant=variant)

    inputs = {True: (weight, bias), "bias": (bias,), False: ()}[affine]
    inputs = [t.clone().requires_grad_() for t in (base, *inputs)]
    options = dict(eps=1e-6, atol=1e-8, rtol=1e-6, nondet_tol=0.0)
    assert torch.autograd.gradcheck(function, inputs, check_undefined_grad=True, check_batched_grad=False, **options)


def test_there_are_at_least_sixty_gradchecks():
    assert len(GRADCHECKS) >= 60


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("variant", ["I", "II"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gap"])
@pytest.mark.parametrize("name", INVERTIBLE)
def test_float64_agrees_with_autograd_to_1e_12(name, layout, variant, training):
    """Against F.batch_norm + φ, with all of y where φ′ ≥ 1e-3."""
    weight, bias, *running = vectors()
    weight, bias = weight * 0.5, bias * 0.5
    base, view = LAYOUTS[layout](torch.randn(4, 3, 5, 6, dtype=torch.float64))
    dz = torch.randn(4, 3, 5, 6, dtype=torch.float64)
    phi, a = resolve(name, 0.3)
    results = []
    for ours in (False, True):
        x, w, b = (t.clone().requires_grad_() for t in (base, weight, bias))
        stats = [r.clone() for r in running]
        h = view(x * 1)
        if ours:
            z = inplace_abn(h, w, b, *stats, training, 0.1, 1e-5, name, 0.3, variant=variant)
        else:
            z = phi.plain(F.batch_norm(h, *stats, w, b, training, 0.1, 1e-5), a)
        results.append([z.detach(), *torch.autograd.grad(z, (x, w, b), dz), *stats])
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-12 * want.norm()


@pytest.mark.parametrize("ratio", [0, 1, 10, 100, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_large_mean_costs_no_variance(layout, ratio):
    x = (torch.randn(8, 3, 32, 32, dtype=torch.float64) + ratio).float()
    values = exact(x)
    mean, var = values.mean((0, 2, 3)), values.var((0, 2, 3))
    base, view = LAYOUTS[layout](x)
    got_mean, got_var, count = reference.moments(view(base))
    assert count == 8 * 32 * 32
    assert (got_var >= 0).all()
    # The data are float32: past 10⁴ their own rounding is most of what is left.
    limit = 1e-5 if ratio <= 1e4 else 1e-4
    assert error(got_var, var) <= limit * np.linalg.norm(var.astype(float))
    assert error(got_mean, mean) <= 1e-6 * np.sqrt(3)
    # The same through the path that training takes, by way of the running statistics.
    running = torch.zeros(3), torch.ones(3)
    leaf = base.clone().requires_grad_()
    z = inplace_abn(view(leaf * 1), None, None, *running, True, 1.0, 1e-5, "identity")
    assert error(running[1] * (count - 1) / count, var) <= limit * np.linalg.norm(var.astype(float))
    plain = F.batch_norm(view(base), None, None, None, None, True)
    truth = oracle(x, None, None, torch.zeros_like(x), 1e-5, "identity", 0).z
    assert error(z, truth) <= 2 * error(plain, truth) + 4 * ulp(x.dtype) * np.linalg.norm(truth.astype(float))


@pytest.mark.parametrize("spread", [0.0, 1e-20, 1e-12, 1e-6])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_hardly_any_variance_stays_finite_and_right(layout, spread):
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64) * spread + torch.tensor([0.0, 1.0, 0.0]).view(1, 3, 1, 1)
    x = x.float()
    dz = torch.randn_like(x)
    truth = oracle(x, None, None, dz, 1e-5, "leaky_relu", 0.01)
    base, view = LAYOUTS[layout](x)
    leaf = base.clone().requires_grad_()
    z = inplace_abn(view(leaf * 1), None, None, None, None)
    (dx,) = torch.autograd.grad(z, leaf, dz)
    assert z.isfinite().all() and dx.isfinite().all()
    plain_leaf = x.clone().requires_grad_()
    plain = F.leaky_relu(F.batch_norm(plain_leaf, None, None, None, None, True), 0.01)
    (dx0,) = torch.autograd.grad(plain, plain_leaf, dz)
    size = np.linalg.norm(truth.z.astype(float))
    assert error(z, truth.z) <= 2 * error(plain, truth.z) + 4 * ulp(x.dtype) * size
    assert error(view(dx), truth.dx) <= 2 * error(dx0, truth.dx) + 4 * ulp(x.dtype) * truth.dx_terms


# Sizes that make the walk take one tile, several along the batch, several along the channels, and ragged ones.
@pytest.mark.parametrize(
    "tile, slab", [(1 << 20, 1 << 22), (300, 700), (17, 40), (1, 1)], ids=["one", "batch", "channels", "crumbs"]
)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("variant", ["I", "II"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_and_pairs_agree_with_the_verbs(dtype, variant, layout, tile, slab, monkeypatch):
    monkeypatch.setattr(reference, "TILE", tile)
    monkeypatch.setattr(reference, "SLAB", slab)
    phi, a = resolve("leaky_relu", 0.01)
    weight, bias, *_ = (v.float() for v in vectors())
    base, view = LAYOUTS[layout](torch.randn(5, 3, 4, 7).to(dtype))
    rest = (1e-5, phi, a)
    x = view(base.clone())
    mean, var, count = reference.moments(x)
    invstd = (var + 1e-5).rsqrt()
    reference.normalize_(x, mean, invstd, weight, bias, *rest)
    running = torch.zeros(3), torch.ones(3)
    z = view(base.clone())
    pair_invstd = reference.normalize_batch_(z, weight, bias, *running, None, 1.0, 1e-5, *rest)
    room = 8 * ulp(torch.float32) if dtype == torch.float32 else ulp(dtype)
    close = lambda got, want: torch.allclose(got.double(), want.double(), rtol=room, atol=room)
    assert close(z, x) and close(pair_invstd, invstd)
    assert close(running[0], mean) and close(running[1], var * count / (count - 1))
    dz = torch.randn(5, 3, 4, 7).to(dtype)
    dx, dgamma, dbeta = reference.input_grad_batch(dz, z, weight, bias, pair_invstd, *rest, variant)
    sum_dy, sum_dy_xhat = reference.sums(dz, z, weight, bias, *rest, variant)
    want = reference.input_grad(dz, z, weight, bias, pair_invstd, sum_dy, sum_dy_xhat, count, *rest, variant)
    assert dx.stride() == torch.empty_like(z).stride() and dx.dtype == dtype
    # Sums over 140 values of order 1, in float32 either way.
    terms = 140**0.5 * 16 * ulp(torch.float32)
    assert torch.allclose(dgamma.double(), sum_dy_xhat, rtol=0, atol=terms)
    assert torch.allclose(dbeta.double(), sum_dy, rtol=0, atol=terms)
    assert close(dx, want)


@pytest.mark.parametrize("weight", [0.0, -0.0, 1e-8, -1e-8, 1e-5, -1e-5, 0.3, -0.3, 1e-45])
def test_the_guard_keeps_the_sign(weight):
    gamma, _ = reference.affine(torch.zeros(1, 1), torch.tensor([weight]), None, 1e-5)
    assert gamma.abs() == max(abs(torch.tensor(weight).double().item()), 1e-5)
    assert torch.signbit(gamma) == torch.signbit(torch.tensor(weight))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "stepped"])
def test_the_same_input_gives_the_same_bits(layout):
    base, view = LAYOUTS[layout](torch.randn(8, 5, 16, 16))
    dz, weight, bias = torch.randn(8, 5, 16, 16), torch.randn(5), torch.randn(5)
    seen = set()
    for _ in range(50):
        leaf, w, b = (t.clone().requires_grad_() for t in (base, weight, bias))
        z = inplace_abn(view(leaf * 1), w, b, None, None)
        parts = [z.detach(), *torch.autograd.grad(z, (leaf, w, b), dz)]
        seen.add(b"".join(p.contiguous().numpy().tobytes() for p in parts))
    assert len(seen) == 1


def test_a_nan_stays_in_its_channel():
    x = torch.randn(4, 3, 5, 5)
    results = []
    for poison in (False, True):
        leaf = x.clone()
        if poison:
            leaf[1, 1, 2, 2] = float("nan")
        leaf.requires_grad_()
        running = torch.zeros(3), torch.ones(3)
        z = inplace_abn(leaf * 1, torch.ones(3), torch.zeros(3), *running)
        torch.manual_seed(1)
        (dx,) = torch.autograd.grad(z, leaf, torch.randn_like(z))
        results.append([z.detach()[:, [0, 2]], dx[:, [0, 2]], running[0][[0, 2]], running[1][[0, 2]]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_float16_extremes_do_not_overflow_the_statistics():
    x = (torch.rand(4, 3, 8, 8) * 120_000 - 60_000).half()
    truth = oracle(x, None, None, torch.zeros_like(x), 1e-5, "leaky_relu", 0.01)
    z = inplace_abn(x.clone().requires_grad_(), None, None, None, None)
    assert error(z, truth.z) <= 4 * ulp(x.dtype) * np.linalg.norm(truth.z.astype(float))

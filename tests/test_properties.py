"""Random shapes, strides, dtypes and settings against the oracle: never more than twice plain PyTorch's error."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bounds import error, exact, oracle, ulp, unit
from inplace_abn import ACTIVATIONS, InPlaceABN, inplace_abn
from inplace_abn.activations import resolve
from layouts import LAYOUTS

INVERTIBLE = [name for name, phi in ACTIVATIONS.items() if phi.inverse is not None]
CHANNELS = [1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 33, 63, 64, 65, 127, 259]


@dataclass
class Case:
    shape: tuple[int, ...]
    x_layout: str
    dz_layout: str
    dtype: torch.dtype
    param_dtype: torch.dtype
    affine: bool
    tracked: bool
    training: bool
    momentum: float | None
    eps: float
    activation: str
    parameter: float
    variant: str
    seed: int
    strided: bool = False


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
    channels = draw(st.sampled_from(CHANNELS))
    spatial = draw(st.lists(st.integers(1, 7), max_size=3 if channels < 64 else 2))
    # At two values per channel dx vanishes (x̂ = ±1 whatever x is): the batch statistics need a few values to mean anything.
    fewest = -(-8 // max(1, int(torch.tensor(spatial or [1]).prod())))
    shape = (draw(st.integers(fewest, fewest + 8)), channels, *spatial)
    training = draw(st.booleans()) or draw(st.booleans())
    activation = draw(st.sampled_from(INVERTIBLE))
    parameters = {"slope": [1e-3, 0.01, 0.2, 1.0, 3.0], "alpha": [0.5, 1.0, 1.3], None: [0.01]}
    return Case(
        shape,
        draw(st.sampled_from(sorted(LAYOUTS))),
        draw(st.sampled_from(sorted(LAYOUTS))),
        dtype,
        draw(st.sampled_from([torch.float32, dtype])),
        draw(st.booleans()) or activation not in ("leaky_relu", "identity"),
        draw(st.booleans()) or not training,
        training,
        draw(st.sampled_from([0.0, 0.1, 1.0, None])),
        draw(st.sampled_from([1e-8, 1e-5, 1e-3, 1.0])),
        activation,
        draw(st.sampled_from(parameters[ACTIVATIONS[activation].parameter])),
        draw(st.sampled_from(["I", "II"])),
        draw(st.integers(0, 2**31)),
        draw(st.booleans()),
    )


def data(case: Case):
    """x, weight, bias, running statistics and a function that makes dz, all already rounded to their dtypes."""
    g = torch.Generator().manual_seed(case.seed)
    channels = case.shape[1]
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    wide = lambda v: v.view(1, -1, *[1] * (len(case.shape) - 2))
    mean, std = draw(channels), draw(channels).abs() + 0.5
    x = (draw(*case.shape) * wide(std) + wide(mean)).to(case.dtype)
    weight = bias = None
    if case.affine:
        sign = torch.where(draw(channels) > 0, 1.0, -1.0)
        # Where φ flattens, y is kept where φ′ is not small: |γ| and |β| at most ½ there, |β| ≤ 10·|γ| always.
        straight = ACTIVATIONS[case.activation].scale_covariant
        size = torch.rand(channels, generator=g, dtype=torch.float64) * (1.5 if straight else 0.3) + 0.2
        ratio = torch.rand(channels, generator=g, dtype=torch.float64) * (20 if straight else 2) - (
            10 if straight else 1
        )
        weight = (size * sign).to(case.param_dtype)
        bias = (ratio * size * 0.999).to(case.param_dtype)
    # Statistics of other batches of the same data: in evaluation, too, y stays where φ′ is not small.
    spread = torch.rand(channels, generator=g, dtype=torch.float64) + 0.5
    running = ((mean + 0.3 * draw(channels)).to(case.param_dtype), (std.square() * spread).to(case.param_dtype))
    raw = draw(*case.shape)

    def dz(y):
        # At a kink the derivative jumps, and the rounding of y decides the side: nothing may hang on such an element.
        near = torch.from_numpy((abs(y) < 64 * ulp(case.dtype) * (1 + abs(y).max())).astype(bool))
        return raw.masked_fill(near, 0.0).to(case.dtype)

    return x, weight, bias, running, dz


def run(function, case: Case, x, weight, bias, running, dz, device="cpu"):
    """z, dx, dweight, dbias and the running statistics of one training or evaluation step, in the case's layouts."""
    x, weight, bias, dz, *running = (None if t is None else t.to(device) for t in (x, weight, bias, dz, *running))
    base, view = LAYOUTS[case.x_layout](x)
    leaf = base.clone().requires_grad_()
    wanted = [leaf]
    parameters = []
    for p in (weight, bias):
        # A strided parameter is every second value of a tensor that interleaves it with nonsense.
        owner = p if p is None or not case.strided else torch.stack([p, p * 0 + 1e3], 1)
        owner = None if owner is None else owner.clone().requires_grad_()
        wanted += [] if owner is None else [owner]
        parameters.append(owner if owner is None or not case.strided else owner[:, 0])
    statistics = [r.clone() for r in running] if case.tracked else [None, None]
    counter = torch.tensor(3, device=device)
    h = view(leaf * 1)
    strides = h.stride()
    z = function(h, *parameters, *statistics, counter)
    dz_base, dz_view = LAYOUTS[case.dz_layout](dz)
    grads = list(torch.autograd.grad(z, wanted, dz_view(dz_base)))
    grads[1:] = [g[:, 0] if case.strided else g for g in grads[1:]]
    shape = z.stride(), strides
    return z.detach().cpu(), shape, view(grads[0]).cpu(), [g.cpu() for g in grads[1:]], statistics, counter


def plain(case: Case):
    """F.batch_norm and φ in the same dtype; float64 parameters for float64 data, which is all torch takes."""
    phi, a = resolve(case.activation, case.parameter)

    def function(h, weight, bias, running_mean, running_var, counter):
        same = torch.float64 if case.dtype == torch.float64 else case.param_dtype
        w, b, m, v = (None if t is None else t.to(same) for t in (weight, bias, running_mean, running_var))
        y = F.batch_norm(
            h, None if case.training else m, None if case.training else v, w, b, case.training, 0.0, case.eps
        )
        return phi.plain(y, a)

    return function


def ours(case: Case):
    def function(h, weight, bias, running_mean, running_var, counter):
        return inplace_abn(
            h,
            weight,
            bias,
            running_mean,
            running_var,
            case.training,
            case.momentum,
            case.eps,
            case.activation,
            case.parameter,
            variant=case.variant,
            num_batches_tracked=counter,
        )

    return function


def violations(case: Case, device="cpu") -> dict[str, tuple[float, float]]:
    """Every quantity whose error exceeds its bound: {name: (error, bound)}."""
    x, weight, bias, running, make_dz = data(case)
    return violations_on(case, x, weight, bias, running, make_dz, device=device)


def violations_on(
    case: Case, x, weight, bias, running, make_dz, outlier=None, device="cpu"
) -> dict[str, tuple[float, float]]:
    """The same on given data. An ``outlier`` is an index where z is saturated, so that no dx can be recovered there."""
    stats = None if case.training else running
    y = oracle(x, weight, bias, torch.zeros_like(x), case.eps, case.activation, case.parameter, stats).y
    dz = make_dz(y)
    truth = oracle(x, weight, bias, dz, case.eps, case.activation, case.parameter, stats)
    z, (stride, was), dx, dparams, _, _ = run(ours(case), case, x, weight, bias, running, dz, device)
    z0, _, dx0, dparams0, _, _ = run(plain(case), case, x, weight, bias, running, dz, device)
    assert stride == was and z.dtype == x.dtype
    eps = ulp(case.dtype)
    narrow = eps > ulp(torch.float32)
    rows = {"z": (error(z, truth.z), error(z0, truth.z), norm(truth.z))}
    if case.affine:
        rows["dbias"] = (error(dparams[1], truth.dbias), error(dparams0[1], truth.dbias), truth.dbias_terms)
    rivals = dx0, dparams0
    if outlier is not None:
        assert all(t.isfinite().all() for t in (z, dx, *dparams))
        truth.dx[outlier] = dx[outlier] = dx0[outlier] = 0
    if narrow:
        # What is recovered from a z rounded to 16 bits is compared with the float64 verbs on that same z.
        rivals = from_stored(case, z, x, weight, bias, stats, dz)
        if outlier is not None:
            rivals[0][outlier] = 0
    rows["dx"] = (error(dx, truth.dx), error(rivals[0], truth.dx), truth.dx_terms)
    room = {}
    if case.affine:
        rows["dweight"] = (error(dparams[0], truth.dweight), error(rivals[1][0], truth.dweight), truth.dweight_terms)
        if not narrow:
            # Plain torch keeps x, this keeps z. Rounding and inverting it is worth an ulp of z, which is |z|/φ′ in y, and an ulp
            # of y; dγ sums φ′·dz times that over γ. (With 16 bits the rival starts from the stored z as well.)
            phi, a = resolve(case.activation, case.parameter)
            gamma = weight.double().view(1, -1, *[1] * (z.dim() - 2))
            dy = phi.backward(dz.double(), z.double(), a)
            y = torch.from_numpy(truth.y.astype(float))
            room["dweight"] = eps * float((((dz * z).double().abs() + (dy * y).abs()) / gamma).norm())
    bounds = {k: 2 * e0 + 4 * eps * n + room.get(k, 0.0) for k, (_, e0, n) in rows.items()}
    bad = {k: (row[0], bounds[k]) for k, row in rows.items() if not row[0] <= bounds[k]}
    if narrow and case.training and case.activation in ("leaky_relu", "identity"):
        ratio = float((bias.double() / weight.double()).abs().max()) if case.affine else 0.0
        bound = 3 * unit(case.dtype) * (1 + ratio) * truth.dx_terms
        if not rows["dx"][0] <= bound:
            bad["dx, absolutely"] = (rows["dx"][0], bound)
    return bad


def norm(v) -> float:
    return float((v.astype(float) ** 2).sum() ** 0.5)


def from_stored(case, z, x, weight, bias, stats, dz):
    """dx and dweight of the formulas of variant I in float64, from the stored z."""
    phi, a = resolve(case.activation, case.parameter)
    wide = lambda v: v.double().view(1, -1, *[1] * (z.dim() - 2))
    dims = (0, *range(2, z.dim()))
    gamma, beta = (torch.ones(z.shape[1]), torch.zeros(z.shape[1])) if weight is None else (weight, bias)
    var = x.double().var(dims, correction=0) if stats is None else stats[1].double()
    dy = phi.backward(dz.double(), z.double(), a)
    xhat = (phi.inverse(z.double(), a) - wide(beta)) / wide(gamma)
    dgamma, dbeta = (dy * xhat).sum(dims), dy.sum(dims)
    dx = dy
    if stats is None:
        m = z.numel() // z.shape[1]
        dx = dy - xhat * wide(dgamma) / m - wide(dbeta) / m
    dx = dx * wide(gamma) / wide(var + case.eps).sqrt()
    return dx.to(case.dtype), [dgamma.to(case.param_dtype)]


COMMON = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True)


@settings(max_examples=400, **COMMON)
@given(cases())
def test_error_is_at_most_twice_that_of_plain_torch(case):
    assert not violations(case)


@pytest.mark.long
@pytest.mark.timeout(3000)
@settings(max_examples=10_000, **COMMON)
@given(cases())
def test_error_is_at_most_twice_that_of_plain_torch_10000_times(case):
    assert not violations(case)


@settings(max_examples=100, **COMMON)
@given(cases())
def test_running_statistics_follow_the_batch(case):
    """running ← (1 − momentum)·running + momentum·(batch mean, unbiased variance), rounded once to its dtype."""
    if not (case.tracked and case.training):
        return
    x, weight, bias, running, _ = data(case)
    _, _, _, _, statistics, counter = run(ours(case), case, x, weight, bias, running, torch.zeros_like(x))
    momentum = 1 / 4 if case.momentum is None else case.momentum
    values = exact(x)
    axes = (0, *range(2, values.ndim))
    mean, var = values.mean(axes), values.var(axes, ddof=1)
    assert counter.item() == 4
    for before, after, batch in zip(running, statistics, (mean, var), strict=True):
        want = (1 - momentum) * exact(before) + momentum * batch
        # The statistics themselves are summed in float32 (float64 for float64 data).
        slack = (ulp(case.param_dtype) + 4 * ulp(torch.promote_types(case.dtype, torch.float32))) * norm(abs(want) + 1)
        assert error(after, want) <= slack


# ELU saturates at −6.2 in bfloat16, −8.3 in float16, −17.3 in float32. float64 goes on to −37, but the inverse stops where
# φ′ < 2⁻²⁴ (−16.6): between there and −30 it would show as 1e-10 in dγ.
OUTLIERS = [
    (dtype, sigmas)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for sigmas in (-60.0, -30.0, -17.5, -8.5, -6.0, 60.0)
    if (dtype, sigmas) != (torch.float64, -17.5)
]


@pytest.mark.parametrize("dtype, sigmas", OUTLIERS, ids=str)
@pytest.mark.parametrize("activation", INVERTIBLE)
def test_one_outlier_leaves_its_channel_as_it_was(activation, dtype, sigmas):
    """A pixel far out in φ's flat part: nothing becomes NaN, and every other gradient keeps its bound."""
    shape = (16, 3, 32, 32)
    case = Case(
        shape, "contiguous", "contiguous", dtype, torch.float32, True, False, True, 0.1, 1e-5, activation, 1.0, "II", 0
    )
    _, _, _, running, make_dz = data(case)
    x = torch.randn(shape).to(dtype)
    outlier = (5, 1, 7, 7)
    x[outlier] = sigmas
    assert not violations_on(case, x, torch.ones(3), torch.zeros(3), running, make_dz, outlier)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.timeout(600)
@settings(max_examples=150, **COMMON)
@given(cases())
def test_the_same_on_a_gpu(case):
    assert not violations(case, "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_host_never_waits_for_the_gpu(training, momentum):
    layer = InPlaceABN(4, momentum=momentum).cuda().train(training)
    x = torch.randn(2, 4, 8, 8, device="cuda", requires_grad=True)
    layer(x * 1).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x * 1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

from __future__ import annotations

import math

import pytest
import torch

from bounds import PHI, exact, ulp
from inplace_abn import ACTIVATIONS, InPlaceABN, inplace_abn
from inplace_abn.activations import expm1, log1p, resolve

INVERTIBLE = [phi for phi in ACTIVATIONS.values() if phi.inverse is not None]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
names = lambda phi: phi.name
# Piecewise boundaries, both signs of zero, tiny and moderate values, the switch-overs of the series.
POINTS = torch.tensor(
    [0.0, -0.0, 1e-30, -1e-30, 1e-8, -1e-8, 1e-3, -1e-3, 0.1, -0.1, 0.2999, -0.3, 0.3001, 0.3499, -0.35, 0.3501]
    + [-0.69, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.0, -2.0, 3.0, -3.0],
    dtype=torch.float64,
)


def test_the_table_names_its_rows():
    assert all(name == phi.name for name, phi in ACTIVATIONS.items())
    assert set(ACTIVATIONS) == set(PHI)
    with pytest.raises(TypeError):
        ACTIVATIONS["leaky_relu"] = ACTIVATIONS["elu"]


@pytest.mark.parametrize("phi", ACTIVATIONS.values(), ids=names)
def test_forward_is_torchs_activation(phi):
    for a in (0.01, 0.5, 1.0, 1.7):
        assert torch.allclose(phi.forward(POINTS, a), phi.plain(POINTS.clone(), a), rtol=1e-13, atol=0)


@pytest.mark.parametrize("phi", INVERTIBLE, ids=names)
def test_inverse_undoes_forward(phi):
    """To the precision that z itself holds, |δy| ≤ 4 ulp·(|y| + |z|/φ′), wherever φ′ ≥ 1e-3."""
    value, slope = PHI[phi.name]
    for dtype in (torch.float64, torch.float32):
        for a in (0.01, 1.0, 1.7):
            y = POINTS.to(dtype)
            y = y[torch.from_numpy(slope(exact(y), a) >= 1e-3)]
            z = phi.forward(y, a)
            room = torch.tensor((abs(value(exact(y), a)) / slope(exact(y), a)).astype(float))
            assert ((phi.inverse(z, a) - y).abs() <= 4 * ulp(dtype) * (y.abs() + room)).all()


@pytest.mark.parametrize("phi", ACTIVATIONS.values(), ids=names)
def test_backward_is_autograds(phi):
    y = POINTS.clone().requires_grad_()
    for a in (0.01, 1.0, 1.7):
        dz = torch.randn_like(y)
        (want,) = torch.autograd.grad(phi.plain(y * 1, a), y, dz)
        source = y.detach() if phi.inverse is None else phi.forward(y.detach(), a)
        # φ′ from a rounded z: 1 − z² and the like lose what z lost.
        assert torch.allclose(
            phi.backward(dz, source, a), want, rtol=1e-13, atol=4 * ulp(y.dtype) * float(dz.abs().max())
        )


@pytest.mark.parametrize("phi", [p for p in INVERTIBLE if p.fused], ids=names)
def test_the_fused_form_equals_the_formula(phi):
    y, dz = torch.randn(1000), torch.randn(1000)
    z = phi.forward(y, 0.01)
    assert torch.equal(phi.fused[0](y.clone(), 0.01), z)
    assert torch.equal(phi.fused[1](z, 0.01), phi.inverse(z, 0.01))
    assert torch.equal(phi.fused[2](dz, z, 0.01), phi.backward(dz, z, 0.01))


def test_series_are_exact_where_cancellation_bites():
    t = torch.cat(
        [torch.linspace(-0.9, 0.9, 4001, dtype=torch.float64), torch.logspace(-300, -1, 300, dtype=torch.float64)]
    )
    for got, want in ((expm1(t), torch.expm1(t)), (log1p(t), torch.log1p(t))):
        assert ((got - want).abs() <= 4 * ulp(t.dtype) * want.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("phi", INVERTIBLE, ids=names)
def test_inverse_is_finite_for_every_storable_value(phi, dtype):
    """Every 16-bit pattern; for the wider dtypes the extremes of φ's range, infinities and zeros."""
    if dtype.itemsize == 2:
        z = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        z = torch.tensor(
            [-1.7580993408473766, -1.3, -1.0, 0.0, -0.0, 1.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny]
        )
        z = torch.cat([z, torch.nextafter(z, z + 1), torch.nextafter(z, z - 1)]).to(dtype)
    wide = z.to(torch.promote_types(dtype, torch.float32))
    wide = wide[wide.isfinite()]
    a = 1.3
    reached = phi.plain(torch.tensor([-200.0, 200.0], dtype=torch.float64), a)
    if phi.name not in ("leaky_relu", "identity"):
        low = float(reached[0])
        wide = wide[(wide >= low) & (wide <= (1.0 if phi.name in ("tanh", "sigmoid") else math.inf))]
    y = phi.inverse(wide, a)
    assert wide.numel() and y.isfinite().all()
    assert phi.backward(torch.ones_like(wide), wide, a).isfinite().all()


@pytest.mark.parametrize("name", ["gleu", "ReLU", 3])
def test_an_unknown_name_lists_the_known(name):
    with pytest.raises(ValueError, match=r"is unknown; one of: .*leaky_relu.*none"):
        InPlaceABN(4, activation=name)


@pytest.mark.parametrize(
    "name, a, says", [("leaky_relu", -0.1, "cannot be inverted"), ("leaky_relu", math.nan, "finite")]
)
def test_a_slope_that_cannot_be_inverted_is_refused(name, a, says):
    with pytest.raises(ValueError, match=says):
        resolve(name, a)


@pytest.mark.parametrize("name", ["elu", "celu"])
def test_alpha_must_be_positive(name):
    with pytest.raises(ValueError, match="alpha > 0"):
        resolve(name, 0.0)


def test_aliases():
    assert resolve("none", 0.01) == resolve(None, 0.01) == resolve("identity", 0.01)
    assert resolve("leaky_relu", 0.0)[0].name == "relu"


@pytest.mark.parametrize(
    "slope, dtype, warns", [(1e-6, torch.float16, True), (1e6, torch.float16, True), (1e-6, torch.bfloat16, False)]
)
def test_a_slope_outside_the_dtype_warns_once(slope, dtype, warns):
    def step():
        x = torch.randn(4, 3, 5, 5).to(dtype).requires_grad_()
        inplace_abn(x * 1, torch.ones(3), torch.zeros(3), None, None, activation_param=slope).sum().backward()

    if warns:
        with pytest.warns(UserWarning, match="outside"):
            step()
    step()


def test_an_underflowed_negative_keeps_its_slope():
    """y·a flushes to −0 in float16; the derivative there is the slope, not 1."""
    phi, a = resolve("leaky_relu", 1e-3)
    z = torch.tensor([-1e-6], dtype=torch.float16) * 1e-3
    assert z == 0 and torch.signbit(z)
    assert phi.backward(torch.ones(1), z.float(), a) == torch.tensor([1e-3])

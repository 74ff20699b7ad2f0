"""The kernels against the reference in float64 on the same stored bits: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bounds import ulp
from inplace_abn import ACTIVATIONS, InPlaceABN, inplace_abn, reference, saved_bytes
from inplace_abn.activations import resolve
from layouts import LAYOUTS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
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
}


@pytest.fixture
def kernels(monkeypatch):
    module = pytest.importorskip("inplace_abn.kernels")
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "TILE", 256)
    module.plan.cache_clear()
    yield module
    module.plan.cache_clear()


def near(got, want, terms, dtype=torch.float32):
    """Within the rounding of float32 sums of so many terms, and one rounding to the dtype."""
    room = (4 * ulp(torch.float32) * terms**0.5 + ulp(dtype)) * (1 + float(want.abs().max()))
    return (got.double() - want).abs().max() <= room


def step(kernels, shape, layout, dtype, name, a, momentum, affine=True):
    """Forward and backward by the kernels, and by the reference in float64 from what they stored."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=g).to(DEVICE)
    phi, a = resolve(name, a)
    base, view = LAYOUTS[layout]((draw(*shape) * 2 + 3).to(dtype))
    x, channels, m = view(base), shape[1], base.numel() // shape[1]
    if kernels.layout(x) is None:
        pytest.skip("left to the reference")
    weight, bias = (draw(channels) * 0.3 + 1, draw(channels) * 0.3) if affine else (None, None)
    running = draw(channels), draw(channels).abs()
    counter = torch.tensor(2, device=DEVICE)
    rest = (1e-5, phi, a)
    truth = x.double()
    mean, var, count = reference.moments(truth)
    expected = [r.double() for r in running]
    reference.track(*expected, torch.tensor(2, device=DEVICE), mean, var * count / (count - 1), momentum)
    z64 = truth.clone()
    reference.normalize_(z64, mean, (var + 1e-5).rsqrt(), weight, bias, *rest)
    invstd = kernels.normalize_batch_(x, weight, bias, *running, counter, momentum, 1e-5, *rest)
    assert near(x, z64, m, dtype) and near(invstd, (var + 1e-5).rsqrt(), m)
    assert near(running[0], expected[0], m) and near(running[1], expected[1], m) and counter == 3
    dz = draw(*shape).to(dtype)
    for variant in ("I", "II"):
        dx, dgamma, dbeta = kernels.input_grad_batch(dz, x, weight, bias, invstd, *rest, variant)
        sum_dy, sum_dy_xhat = reference.sums(dz.double(), x.double(), weight, bias, *rest, variant)
        want = reference.input_grad(
            dz.double(), x.double(), weight, bias, invstd, sum_dy, sum_dy_xhat, count, *rest, variant
        )
        assert dx.stride() == x.stride() and near(dx, want, m, dtype)
        assert near(dgamma, sum_dy_xhat, m) and near(dbeta, sum_dy, m)
    fixed = kernels.input_grad(dz, x, weight, bias, invstd, None, None, 0, *rest, "II")
    assert near(
        fixed, reference.input_grad(dz.double(), x.double(), weight, bias, invstd, None, None, 0, *rest, "II"), m, dtype
    )


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
    assert kernels.layout(x) == (False, 4, 6, 35, 210, 35)
    assert kernels.layout(x.contiguous(memory_format=torch.channels_last)) == (True, 140, 6, 1, 6, 1)
    assert kernels.layout(x[:, 1:3]) == (False, 4, 2, 35, 210, 35)
    assert kernels.layout(x.transpose(2, 3)) is None and kernels.layout(x[..., ::2]) is None
    assert kernels.layout(torch.empty(4, 6)) == (True, 4, 6, 1, 6, 1)


AHEAD_OF_TIME = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from inplace_abn import ACTIVATIONS, kernels
from inplace_abn.kernels import device

NUMBERS = "rows channels pixels row_stride channel_stride across tiles P".split()
KINDS = {"x_ptr": "*bf16", "z_ptr": "*bf16", "dz_ptr": "*bf16", "dx_ptr": "*bf16", "count_ptr": "*i32", "tracked_ptr": "*i64"}

def build(kernel, architecture, constants):
    other = lambda n: "*fp32" if n.endswith("_ptr") else "i32" if n in NUMBERS else "fp32"
    kinds = {n: "constexpr" if n in constants else KINDS.get(n, other(n)) for n in kernel.arg_names}
    compile(ASTSource(fn=kernel, signature=kinds, constexprs=constants), target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": kernels.WARPS})

for name, phi in ACTIVATIONS.items():
    if phi.inverse is None:
        continue
    forward, inverse, backward = kernels.compiled(phi)
    has = {"HAS_WEIGHT": True, "HAS_BIAS": True}
    back = {**has, "INVERSE": inverse, "BACKWARD": backward, "VARIANT_I": False}
    for architecture in (80, 90, 100) if name == "leaky_relu" else (90,):
        for inner in (True, False):
            cut = {"INNER": inner, "BR": 64, "BC": 64, "W": 64 if inner else 1, "VEC": 8}
            build(device.moments_kernel, architecture, {**cut, "TRACK": True, "CUMULATIVE": True, "BP": 16})
            build(device.transform_kernel, architecture, {**cut, **has, "COUNTED": True, "PHI": forward})
            build(device.sums_kernel, architecture, {**cut, **back, "BP": 16})
            build(device.input_grad_kernel, architecture, {**cut, **back, "FIXED": False})
print("built")
"""


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_every_kernel_compiles_ahead_of_time(tmp_path):
    """Without a GPU: one activation for three architectures, every activation for one."""
    pytest.importorskip("triton")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src"), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", AHEAD_OF_TIME], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "built" in done.stdout, done.stderr[-3000:]


on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def train(x, dz):
    layer = InPlaceABN(x.shape[1]).cuda()
    leaf = x.clone().requires_grad_()
    z = layer(leaf * 1)
    z.backward(dz)
    return [z.detach(), leaf.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]


@on_a_gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_same_input_gives_the_same_bits_on_every_stream(layout):
    x, dz = (torch.randn(32, 48, 56, 56, device="cuda").bfloat16().contiguous(memory_format=layout) for _ in range(2))
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
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_captured_graph_replays_bit_for_bit():
    layer, twin = InPlaceABN(16).cuda(), InPlaceABN(16).cuda()
    x = torch.randn(8, 16, 28, 28, device="cuda", requires_grad=True)
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
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_more_than_two_to_the_31_elements(layout):
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of GPU memory")
    shape = (33, 64, 1024, 1024)
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

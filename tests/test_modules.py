from __future__ import annotations

import copy
import pickle
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import inplace_abn
from inplace_abn import ABN, InPlaceABN, InPlaceABNSync, active_group, set_active_group

LAYERS = [ABN, InPlaceABN, InPlaceABNSync]


def run(layer, x):
    """One step on a computed input, as after a convolution."""
    x = x.clone().requires_grad_()
    z = layer(x * 1)
    return z, x


@pytest.fixture(autouse=True)
def quiet_sync():
    """The sync layer says once that there is no process group; that is tested elsewhere."""
    text = "inplace_abn_sync: torch.distributed is not initialised; statistics are those of this process alone"
    inplace_abn.activations.WARNED.add(text)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_parameters_and_buffers_are_batch_norms(kind, affine, tracked):
    ours, theirs = (
        kind(5, affine=affine, track_running_stats=tracked),
        nn.BatchNorm2d(5, affine=affine, track_running_stats=tracked),
    )
    for get in ("named_parameters", "named_buffers"):
        a, b = list(getattr(ours, get)()), list(getattr(theirs, get)())
        assert [n for n, _ in a] == [n for n, _ in b]
        assert all(torch.equal(p, q) and p.dtype == q.dtype for (_, p), (_, q) in zip(a, b, strict=True))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert not isinstance(ours, nn.modules.batchnorm._BatchNorm)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_state_dict_loads_and_computes_the_same(kind, training):
    theirs = nn.BatchNorm2d(5)
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    theirs(torch.randn(4, 5, 6, 6) * 2 + 1)
    ours = kind(5, activation="identity")
    ours.load_state_dict(theirs.state_dict())
    ours.train(training), theirs.train(training)
    x = torch.randn(4, 5, 6, 6)
    assert torch.allclose(run(ours, x)[0], theirs(x), rtol=1e-5, atol=1e-6)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "momentum, dtype, bound",
    # At 0.01 float32 buffers gather some 1e-6 of rounding over their memory of 100 steps, batch norm's and ours.
    [(0.1, torch.float32, 1e-6), (None, torch.float32, 1e-6), (1.0, torch.float32, 1e-6), (0.01, torch.float64, 1e-14)],
)
def test_running_statistics_equal_batch_norms_over_1000_steps(kind, momentum, dtype, bound):
    ours, theirs = kind(3, momentum=momentum, dtype=dtype), nn.BatchNorm2d(3, momentum=momentum, dtype=dtype)
    for i in range(1000):
        x = torch.randn(4, 3, 3, 3, dtype=dtype) * (1 + i % 7) + i % 5
        run(ours, x)
        theirs(x)
    assert torch.equal(ours.num_batches_tracked, theirs.num_batches_tracked)
    for name in ("running_mean", "running_var"):
        assert torch.allclose(getattr(ours, name), getattr(theirs, name), rtol=bound, atol=bound)


def test_the_counter_keeps_its_identity():
    layer = InPlaceABN(3)
    counter = layer.num_batches_tracked
    run(layer, torch.randn(2, 3, 4, 4))
    assert layer.num_batches_tracked is counter and counter == 1


@pytest.mark.parametrize("kind", LAYERS)
def test_without_running_statistics_evaluation_uses_the_batch(kind):
    layer = kind(3, track_running_stats=False).eval()
    x = torch.randn(4, 3, 5, 5)
    assert torch.allclose(run(layer, x)[0], F.leaky_relu(F.batch_norm(x, None, None, training=True), 0.01), atol=1e-6)


@pytest.mark.parametrize("kind", LAYERS)
def test_tracking_can_be_switched_off_later(kind):
    layer = kind(3)
    layer.track_running_stats = False
    run(layer, torch.randn(4, 3, 5, 5) + 3)
    assert torch.equal(layer.running_mean, torch.zeros(3))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 7), (4, 3, 5, 6), (2, 3, 4, 5, 6)], ids=len)
def test_ranks_two_to_five(kind, shape):
    x = torch.randn(shape)
    z, leaf = run(kind(3), x)
    assert torch.allclose(z, F.leaky_relu(F.batch_norm(x, None, None, training=True), 0.01), atol=1e-6)
    z.sum().backward()
    assert leaf.grad.shape == shape


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "shape, layout", [((4, 3, 5, 6), torch.channels_last), ((2, 3, 4, 5, 6), torch.channels_last_3d)]
)
def test_channels_last_is_kept(kind, shape, layout):
    x = torch.randn(shape).contiguous(memory_format=layout)
    z, leaf = run(kind(3), x)
    assert z.is_contiguous(memory_format=layout)
    z.pow(2).sum().backward()
    assert leaf.grad.is_contiguous(memory_format=layout)


def test_settings_are_the_numbers_they_are_at_the_call():
    """Whatever kind of number they come as, and whatever an equal one was before; what changes inside one is seen."""
    x = torch.randn(4, 3, 5, 5)
    want = F.leaky_relu(F.batch_norm(x, None, None, training=True, eps=0.25), 0.01)
    for eps, momentum in ((Decimal("0.25"), Fraction(1, 2)), (np.array(0.25), np.float32(0.5)), (0.25, 0.5)):
        layer = InPlaceABN(3, eps=eps, momentum=momentum)
        layer.training = np.array(True)
        assert torch.allclose(run(layer, x)[0], want, atol=1e-6)
        assert torch.allclose(layer.running_mean, 0.5 * x.mean((0, 2, 3)), atol=1e-6)
    layer = InPlaceABN(3)
    layer.eps = torch.tensor(0.25)
    run(layer, x)
    layer.eps.fill_(-5.0)
    with pytest.raises(ValueError, match=r"eps is -5\.0"):
        run(layer, x)
    assert layer.num_batches_tracked == 1
    layer.eps, layer.variant = 0.25, ["I"]
    with pytest.raises(ValueError, match="variant .* is unknown"):
        run(layer, x)


def test_a_parametrized_weight_is_the_one_that_counts():
    layer, x = InPlaceABN(3), torch.randn(4, 3, 5, 5)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    want = F.leaky_relu(F.batch_norm(x, None, None, layer.weight, None, training=True), 0.01)
    assert torch.allclose(run(layer, x)[0], want, atol=1e-6) and not torch.allclose(layer.weight, torch.ones(3))


def test_attributes_may_change_after_construction():
    layer = InPlaceABN(3)
    layer.activation = "identity"
    layer.eps, layer.momentum = 0.5, 0.7
    x = torch.randn(4, 3, 5, 5)
    assert torch.allclose(run(layer, x)[0], F.batch_norm(x, None, None, training=True, eps=0.5), atol=1e-6)
    assert torch.allclose(layer.running_mean, 0.7 * x.mean((0, 2, 3)), atol=1e-6)
    layer.variant = "I"
    layer.activation, layer.activation_param = "elu", 1.0
    run(layer, x)[0].sum().backward()


def test_repr_shows_the_activation():
    assert repr(ABN(4)) == (
        "ABN(4, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, activation=leaky_relu[0.01])"
    )
    assert "activation=identity, variant=I" in repr(InPlaceABN(4, activation="none", variant="I"))
    assert "activation=leaky_relu[0.0]" in repr(InPlaceABN(4, activation_param=0.0))
    layer = InPlaceABN(4, weight_floor=0.1)
    layer.activation = "gleu"
    assert "activation=gleu, variant=II, weight_floor=0.1" in repr(layer)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_file_without_the_counter_loads(kind):
    """The original's releases up to 1.0, and its released networks, have no num_batches_tracked."""
    state = nn.BatchNorm2d(3).state_dict()
    del state["num_batches_tracked"]
    layer = nn.Sequential(kind(3))
    layer.load_state_dict({f"0.{k}": v for k, v in state.items()})
    state._metadata = {"": {"version": 2}}
    kind(3).load_state_dict(state)


def test_a_partial_load_leaves_the_counter():
    ours, theirs = InPlaceABN(3, momentum=None), nn.BatchNorm2d(3, momentum=None)
    x = torch.randn(4, 3, 5, 5)
    for layer in (ours, theirs):
        for i in range(5):
            layer(x + i)
        layer.load_state_dict({}, strict=False)
        layer(x + 100)
    assert ours.num_batches_tracked == theirs.num_batches_tracked == 6
    assert torch.allclose(ours.running_mean, theirs.running_mean)


def test_loading_into_a_meta_layer_by_assignment():
    with torch.device("meta"):
        layer = InPlaceABN(3)
    state = nn.BatchNorm2d(3).state_dict()
    del state["num_batches_tracked"]
    layer.load_state_dict(state, assign=True)
    assert not any(t.is_meta for t in layer.state_dict().values()) and layer.num_batches_tracked == 0


@pytest.mark.parametrize("kind", LAYERS)
def test_copies_and_pickles(kind):
    layer = kind(3, activation="elu", activation_param=0.5)
    run(layer, torch.randn(4, 3, 5, 5))
    x = torch.randn(4, 3, 5, 5)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(run(twin, x)[0], run(copy.deepcopy(layer), x)[0])


def test_device_and_dtype():
    layer = InPlaceABN(3, device="meta", dtype=torch.float64)
    assert all(t.device.type == "meta" for t in [*layer.parameters(), *layer.buffers()])
    assert layer.weight.dtype == layer.running_mean.dtype == torch.float64
    with torch.device("meta"):
        assert InPlaceABN(3).weight.device.type == "meta"
    z = layer(torch.randn(2, 3, 4, 4, device="meta", dtype=torch.float64, requires_grad=True) * 1)
    z.sum().backward()
    assert layer.weight.grad.shape == (3,)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("activation", ["leaky_relu", "identity"])
def test_gamma_moved_into_the_next_convolution(kind, activation):
    """γ > 0 commutes with a scale-covariant φ: affine='bias' before a rescaled convolution is the same function."""
    full, conv = kind(4, activation=activation), nn.Conv2d(4, 6, 3)
    with torch.no_grad():
        full.weight.uniform_(0.2, 3)
        full.bias.normal_()
    lean, next_conv = kind(4, affine="bias", activation=activation), copy.deepcopy(conv)
    assert [name for name, _ in lean.named_parameters()] == ["bias"] and lean.weight is None
    with torch.no_grad():
        lean.bias.copy_(full.bias / full.weight)
        next_conv.weight.mul_(full.weight.view(1, -1, 1, 1))
    x = torch.randn(4, 4, 8, 8)
    for training in (True, False):
        outputs = [c(run(layer.train(training), x)[0]) for layer, c in ((full, conv), (lean, next_conv))]
        assert torch.allclose(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["elu", "tanh", "sigmoid", "softplus", "selu", "celu"])
def test_gamma_cannot_be_fixed_where_it_does_not_commute(activation):
    with pytest.raises(ValueError, match="scale-covariant"):
        InPlaceABN(4, affine="bias", activation=activation)
    layer = InPlaceABN(4, affine="bias")
    layer.activation = activation
    with pytest.raises(ValueError, match="scale-covariant"):
        layer(torch.randn(2, 4, 3, 3))


@pytest.mark.parametrize(
    "change, says",
    [
        ({"variant": "2"}, "variant"),
        ({"num_features": 0}, "num_features is 0"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"weight_floor": -1.0}, "weight_floor is -1.0"),
        ({"affine": "weight"}, "True, False or 'bias'"),
    ],
)
def test_construction_is_checked(change, says):
    with pytest.raises(ValueError, match=says):
        InPlaceABN(**{"num_features": 4, **change})


@pytest.mark.parametrize("yes", [1, np.bool_(True)])
def test_affine_takes_anything_that_is_true_or_false(yes):
    assert [name for name, _ in InPlaceABN(3, affine=yes).named_parameters()] == ["weight", "bias"]
    assert not list(InPlaceABN(3, affine=not yes).parameters())


def test_warnings_point_at_the_caller():
    for kind in (ABN, InPlaceABN):
        with pytest.warns(DeprecationWarning) as caught:
            kind(3, slope=0.1)
        assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="no inverse") as caught:
        nn.Sequential(InPlaceABN(3, activation="relu"))(torch.randn(2, 3, 4, 4))
    assert caught[0].filename == __file__


def test_groups_without_a_process_group():
    assert active_group(True) is None and active_group(False) is None
    net = nn.Sequential(InPlaceABNSync(3), nn.Sequential(InPlaceABNSync(4)), InPlaceABN(3))
    set_active_group(net, "some group")
    assert net[0].group == net[1][0].group == "some group"


def test_sync_takes_its_group_by_position():
    layer = InPlaceABNSync(3, 1e-5, 0.1, True, True, "elu", 0.5, "some group")
    assert (layer.activation, layer.activation_param, layer.group) == ("elu", 0.5, "some group")
    with pytest.warns(DeprecationWarning, match="fifth argument"):
        layer = InPlaceABNSync(3, 1e-5, 0.1, True, "elu", 0.5, "some group")
    assert (layer.activation, layer.activation_param, layer.group) == ("elu", 0.5, "some group")


def test_one_rank_with_a_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inplace_abn.activations.WARNED.clear()
        layer, local = InPlaceABNSync(3), InPlaceABN(3)
        group = active_group(True)
        assert (
            group is torch.distributed.group.WORLD
            and active_group(False) is torch.distributed.GroupMember.NON_GROUP_MEMBER
        )
        set_active_group(layer, group)
        x = torch.randn(4, 3, 5, 5)
        assert torch.equal(run(layer, x)[0], run(local, x)[0])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_ordinary_layer_takes_no_more_steps_than_torchs_own(dtype):
    """It is what the in-place layer is compared with."""

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name().split("::")[1])
            return func(*args, **kwargs or {})

    counts = []
    for layer in (nn.Sequential(nn.BatchNorm2d(4), nn.LeakyReLU(0.01, inplace=True)), ABN(4)):
        seen = []
        with Counted():
            layer(torch.randn(3, 4, 5, 5, dtype=dtype, requires_grad=True))
        counts.append(sorted(name for name in seen if not name.startswith("randn")))
    assert counts[1] == counts[0]


def test_channels_are_a_whole_number():
    assert InPlaceABN(np.int64(8)).num_features == 8
    for wrong in ("8", 8.0, None):
        with pytest.raises(TypeError, match="num_features is .*; it must be a whole number"):
            InPlaceABN(wrong)

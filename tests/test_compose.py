"""With what else training scripts use: export, scalers, selective checkpointing, FSDP, tracing, optimizers' groups."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import worlds
import zoo
from inplace_abn import ABN, ACTIVATIONS, InPlaceABN, InPlaceABNSync, param_groups, saved_bytes, update_bn


def network(**options):
    torch.manual_seed(0)
    blocks = [nn.Conv2d(3, 8, 3, padding=1, bias=False), InPlaceABN(8, **options), nn.Conv2d(8, 4, 1)]
    net = nn.Sequential(*blocks)
    with torch.no_grad():
        net[1].weight.uniform_(-1.5, 1.5)
        net[1].bias.normal_()
        net[1].running_mean.normal_()
        net[1].running_var.uniform_(0.5, 2)
    return net


def plain(net, x):
    """The same network in evaluation, out of torch's own steps."""
    norm = net[1]
    phi = ACTIVATIONS["identity" if norm.activation == "none" else norm.activation]
    y = F.batch_norm(net[0](x), norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
    return net[2](phi.plain(y, norm.activation_param))


def ops_of(graph):
    return {str(n.target) for n in graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize("activation", ["leaky_relu", "elu", "identity", "relu"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.filterwarnings("ignore:relu has no inverse")
def test_an_exported_model_is_a_plain_graph(activation, strict):
    net, x = network(activation=activation, activation_param=0.2).eval(), torch.randn(2, 3, 8, 8)
    exported = torch.export.export(net, (x,), strict=strict)
    assert not any("inplace_abn" in op for op in ops_of(exported.graph))
    assert any("batch_norm" in op for op in ops_of(exported.graph))
    assert torch.allclose(exported.module()(x), plain(net, x), atol=1e-6)
    assert torch.allclose(net(x), plain(net, x), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_traced_model_is_the_model():
    net, x = network().eval(), torch.randn(2, 3, 8, 8)
    traced = torch.jit.trace(net, x)
    other = torch.randn(3, 3, 5, 9)
    assert torch.allclose(traced(other), net(other), atol=1e-6) and "aten::batch_norm" in str(traced.inlined_graph)


@pytest.mark.parametrize("activation", ["leaky_relu", "elu"])
@pytest.mark.filterwarnings("ignore")
def test_onnx_gives_what_torch_gives(activation, tmp_path):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    net, x = network(activation=activation, activation_param=0.2).eval(), torch.randn(2, 3, 8, 8)
    path = tmp_path / "net.onnx"
    torch.onnx.export(net, (x,), path, dynamo=True, verbose=False)
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert kinds <= {"Conv", "BatchNormalization", "LeakyRelu", "Elu", "Mul", "Add"}
    session = runtime.InferenceSession(path)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    want = net(x).detach()
    assert (torch.from_numpy(got) - want).abs().max() <= 1e-5 * want.abs().max()


def test_fx_takes_the_layer_as_a_leaf():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, ABN) or super().is_leaf_module(m, name)

    net, x = network(), torch.randn(2, 3, 8, 8)
    twin = copy.deepcopy(net)
    graph = torch.fx.GraphModule(net, Tracer().trace(net))
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["0", "1", "2"]
    for model in (graph, twin):
        model(x).square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), twin.parameters(), strict=True))


def test_features_taken_by_a_hook_are_the_layers_output():
    net, x = network(), torch.randn(2, 3, 8, 8)
    features = []
    net[1].register_forward_hook(lambda _, __, z: features.append(z))
    net(x).sum().backward()
    norm = net[1]
    want = F.leaky_relu(F.batch_norm(net[0](x), None, None, norm.weight, norm.bias, True), 0.01)
    assert torch.allclose(features[0], want, atol=1e-5)


def test_a_skipped_step_moves_the_statistics_and_nothing_else():
    """As with torch's batch norm: the forward pass has happened."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    before = copy.deepcopy(net.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.randn(2, 3, 8, 8)).square().mean() * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**14 and net[1].num_batches_tracked == 1
    changed = {name for name, v in net.state_dict().items() if not torch.equal(v, before[name])}
    assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_in_16_bits_keeps_its_statistics_there(dtype):
    """As torch's batch norm: .half() converts buffers, too; keep the layer in float32 for statistics in float32."""
    net = network().to(dtype)
    net(torch.randn(2, 3, 8, 8, dtype=dtype)).square().mean().backward()
    assert net[1].running_mean.dtype == dtype and net[1].weight.grad.dtype == dtype
    net[1].float()
    net(torch.randn(2, 3, 8, 8, dtype=dtype)).square().mean().backward()
    assert net[1].running_mean.dtype == torch.float32 and net[1].running_mean.isfinite().all()


def test_selective_checkpointing():
    net, x = network().double(), torch.randn(2, 3, 8, 8, dtype=torch.double)
    twin = copy.deepcopy(net)
    keep = [torch.ops.aten.convolution.default]

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(net, x, use_reentrant=False, context_fn=context).square().sum().backward()
    twin(x).square().sum().backward()
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad)
    assert all(torch.allclose(a, b) for a, b in zip(net.buffers(), twin.buffers(), strict=True))


def test_torchs_converter_leaves_the_layers_alone():
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3), network()))
    assert type(net[0]) is nn.SyncBatchNorm and type(net[1][1]) is InPlaceABN


def test_groups_for_an_optimizer():
    shared = nn.Linear(4, 4)
    net = nn.Sequential(
        network(), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), shared, shared, InPlaceABN(4).requires_grad_(False)
    )
    decayed, spared = param_groups(net, 1e-4)
    assert decayed["weight_decay"] == 1e-4 and spared["weight_decay"] == 0
    assert {id(p) for p in decayed["params"]} == {id(net[0][0].weight), id(net[0][2].weight), id(shared.weight)}
    frozen = set(net[5].parameters())
    assert len(decayed["params"]) + len(spared["params"]) == len(set(net.parameters()) - frozen)
    torch.optim.SGD(param_groups(net, 1e-4), lr=0.1)


def test_statistics_over_a_loader():
    ours, torchs = (
        nn.Sequential(InPlaceABN(3, momentum=0.3), nn.Dropout()),
        nn.Sequential(nn.BatchNorm2d(3), nn.Dropout()),
    )
    ours.eval()
    ours[1].train()
    batches = [torch.randn(4, 3, 5, 5) * 3 + 1 for _ in range(5)]
    update_bn([(b, 0) for b in batches], ours)
    torch.optim.swa_utils.update_bn(batches, torchs)
    update_bn(batches, both := nn.Sequential(nn.BatchNorm2d(3)))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.allclose(getattr(ours[0], name), getattr(torchs[0], name), rtol=1e-5)
        assert torch.allclose(getattr(both[0], name), getattr(torchs[0], name), rtol=1e-5)
    assert ours[0].momentum == 0.3 and not ours[0].training and ours[1].training
    update_bn(batches, nn.Linear(2, 2))


def sharded(rank, world, where):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    net = network().double()
    if where == "layer":
        fully_shard(net[1], mesh=mesh)
    fully_shard(net, mesh=mesh)
    x = torch.randn(2, 3, 8, 8, dtype=torch.double, generator=torch.Generator().manual_seed(rank))
    net(x).square().sum().backward()
    return [p.grad.full_tensor() for p in net.parameters()]


def parallel(rank, world):
    net = network().double()
    wrapped = nn.parallel.DistributedDataParallel(net)
    x = torch.randn(2, 3, 8, 8, dtype=torch.double, generator=torch.Generator().manual_seed(rank))
    wrapped(x).square().sum().backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("how", ["block", "layer", "ddp"])
def test_fsdp_and_ddp_average_what_each_rank_would_compute(how):
    results = worlds.run(2, parallel) if how == "ddp" else worlds.run(2, sharded, how)
    alone = []
    for rank in range(2):
        net = network().double()
        x = torch.randn(2, 3, 8, 8, dtype=torch.double, generator=torch.Generator().manual_seed(rank))
        net(x).square().sum().backward()
        alone.append([p.grad for p in net.parameters()])
    for got in results:
        for mine, parts in zip(got, zip(*alone, strict=True), strict=True):
            assert torch.allclose(mine, sum(parts) / 2)


def test_timms_own_layer_trains():
    timm = zoo.timm()
    from timm.layers import create_norm_act_layer

    layer = create_norm_act_layer("iabn", 6, act_layer="leaky_relu").double()
    twin = ABN(6).double()
    x = torch.randn(4, 6, 5, 5, dtype=torch.double)
    gradients = []
    for norm in (layer, twin):
        leaf = x.clone().requires_grad_()
        norm(leaf * 1).square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.allclose(*gradients), timm.__version__


def test_a_network_of_timm_built_with_the_layer():
    """Trains as the same network with plain steps does in float64, and keeps less."""
    timm = zoo.timm()

    from timm.layers.inplace_abn import InplaceAbn

    def iabn(channels, inplace=None, act_kwargs=None, device=None, dtype=None, **options):
        """Its networks of today hand over more than its layer takes."""
        return InplaceAbn(channels, **options)

    def build(norm):
        torch.manual_seed(0)
        return timm.create_model("test_efficientnet", num_classes=5, norm_layer=norm, act_layer="leaky_relu").double()

    ours, plain = build(iabn), build("batchnorm2d")
    assert any(isinstance(m, InplaceAbn) for m in ours.modules())
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(4, 3, 64, 64, dtype=torch.double)
    assert zoo.distance(zoo.gradients(ours, x), zoo.gradients(plain, x)) < 1e-9
    theirs = dict(plain.named_buffers())
    for name, mine in ours.named_buffers():
        assert torch.allclose(mine, theirs[name])
    assert saved_bytes(ours, x).total < 0.75 * saved_bytes(plain, x).total


def test_memory_is_the_same_with_a_layer_of_ranks():
    """A layer that could synchronise, but is alone, keeps no more."""
    x = torch.randn(2, 3, 8, 8)
    with pytest.warns(UserWarning, match="not initialised"):
        kept = [
            saved_bytes(nn.Sequential(nn.Conv2d(3, 8, 1), kind(8)), x).total for kind in (InPlaceABNSync, InPlaceABN)
        ]
    assert kept[0] == kept[1] and not dist.is_initialized()

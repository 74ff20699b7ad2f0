"""Several ranks against one process that has all their samples: values, gradients, statistics; and that nobody waits for ever."""

from __future__ import annotations

import copy
import pickle
import random
import signal
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import worlds
from bounds import ulp
from inplace_abn import (
    InPlaceABN,
    InPlaceABNSync,
    active_group,
    convert_sync,
    functions,
    inplace_abn_sync,
    ranks,
    set_active_group,
)
from inplace_abn.ranks import merged_moments

C = 5
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def draw(seed, shape, dtype):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g, dtype=torch.float64) * 2 + 1).to(dtype)


def columns(tensors):
    """Samples of all ranks as one batch of shape (1, C, L)."""
    return torch.cat([t.transpose(0, 1).reshape(C, -1) for t in tensors], 1).unsqueeze(0)


def built(kind, activation="leaky_relu", a=0.1, **options):
    layer = kind(C, activation=activation, activation_param=a, **options)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1.5, 1.5, C))
        layer.bias.copy_(torch.linspace(-0.5, 0.5, C))
    return layer


def one_step(layer, x, dz):
    """z, dx and the parameters' gradients; x is fed through a node, so that it may be overwritten."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    z = layer(x * 1)
    z.backward(dz)
    return [z.detach(), x.grad, layer.weight.grad, layer.bias.grad]


def statistics(layer):
    return [b.clone() for b in layer.buffers()]


def steps(rank, world, shapes, dtype, count, options, device="cpu"):
    """Several steps of a synchronised layer; shapes[step][rank]."""
    dtype = DTYPES[dtype]
    layer = built(InPlaceABNSync, **options).to(device)
    if dtype == torch.float64:
        layer.double()
    outcome = []
    for s in range(count):
        shape = shapes[s % len(shapes)][rank]
        x, dz = draw(100 * s + rank, shape, dtype), draw(7000 + 100 * s + rank, shape, dtype)
        outcome.append([t.cpu() for t in (*one_step(layer, x.to(device), dz.to(device)), *statistics(layer))])
    return outcome


def compare(world, shapes, dtype, count, options, results):
    """Errors against float64 in one process at most twice those of the local layer in the same dtype, and a few roundings."""
    kind = DTYPES[dtype]
    exact, local = built(InPlaceABN, **options).double(), built(InPlaceABN, **options)
    if kind == torch.float64:
        local.double()
    for s in range(count):
        by_rank = shapes[s % len(shapes)]
        xs, dzs = ([draw(seed + 100 * s + r, by_rank[r], kind) for r in range(world)] for seed in (0, 7000))
        x, dz = columns(xs), columns(dzs)
        want = [*one_step(exact, x.double(), dz.double()), *statistics(exact)]
        near = [*one_step(local, x, dz), *statistics(local)]
        mine = [results[r][s] for r in range(world)]
        got = [columns([m[i] for m in mine]) for i in range(2)] + [sum(m[i].double() for m in mine) for i in (2, 3)]
        for rank in mine[1:]:
            assert all(torch.equal(a, b) for a, b in zip(rank[4:], mine[0][4:], strict=True)), "statistics differ"
        got += mine[0][4:]
        room = 4 * ulp(torch.float64 if kind == torch.float64 else torch.float32)
        for name, g, w, n in zip("z dx dgamma dbeta mean var count".split(), got, want, near, strict=True):
            error, allowed = (g.double() - w.double()).norm(), 2 * (n.double() - w.double()).norm()
            assert error <= allowed + room * (1 + w.double().norm()), (name, s, error, allowed)


UNEVEN = [
    [(2, C, 4, 3), (1, C, 2, 2), (3, C, 1, 5), (1, C, 1, 1), (2, C, 3, 3), (0, C, 2, 2), (1, C, 6, 1), (2, C, 2, 2)],
    [(1, C, 1, 1), (2, C, 5, 5), (0, C, 3, 3), (1, C, 4, 4), (1, C, 2, 1), (3, C, 1, 1), (2, C, 2, 2), (1, C, 3, 2)],
]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_twenty_steps_equal_one_process(world):
    case = (UNEVEN, "float32", 20, {})
    compare(world, *case, worlds.run(world, steps, *case))


@pytest.mark.parametrize("options", [{"variant": "I"}, {"momentum": None}, {"activation": "elu", "a": 1.0}], ids=str)
def test_options_and_float64(options):
    case = (UNEVEN, "float64", 3, options)
    compare(2, *case, worlds.run(2, steps, *case))


def in_detail(rank, world, *case):
    """Torch checks that all ranks run the same collectives, with the same shapes and dtypes."""
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    return steps(rank, world, *case)


def test_torch_finds_no_mismatch_between_ranks(monkeypatch):
    monkeypatch.setattr(worlds, "LEVEL", "DETAIL")
    case = (UNEVEN, "bfloat16", 3, {})
    compare(3, *case, worlds.run(3, in_detail, *case))


def many(rank, world, cases):
    return [steps(rank, world, *case) for case in cases]


def random_cases(world, count, seed):
    g = random.Random(seed)
    cases = []
    while len(cases) < count:
        shapes = [(g.choice([0, 1, 1, 2, 3]), C, g.randint(1, 4), g.randint(1, 4)) for _ in range(world)]
        if sum(n * h * w for n, _, h, w in shapes) > 1:
            activation, a = g.choice([("leaky_relu", 0.01), ("elu", 1.0), ("identity", 0.0), ("tanh", 0.0)])
            dtype = g.choice(["float32", "float32", "float16", "bfloat16"])
            # What a saturated φ rounds away is not the ranks' doing.
            if activation == "tanh" and dtype != "float32":
                continue
            cases.append(([shapes], dtype, 1, {"activation": activation, "a": a}))
    return cases


@pytest.mark.parametrize("world, count", [(3, 40), pytest.param(4, 460, marks=pytest.mark.long)])
def test_random_uneven_and_empty_ranks(world, count):
    cases = random_cases(world, count, world)
    results = worlds.run(world, many, cases, seconds=600)
    for i, case in enumerate(cases):
        compare(world, *case, [results[r][i] for r in range(world)])


def with_flags(rank, world, combinations):
    """Every mixture of: this rank's x needs a gradient, its parameters do, it has no samples."""
    outcome = []
    for flags in combinations:
        needs, learns, empty = flags[3 * rank : 3 * rank + 3]
        layer = built(InPlaceABNSync).requires_grad_(learns)
        x = draw(rank, (0 if empty else 3, C, 2, 2), torch.float32).requires_grad_(needs)
        try:
            layer(x * 1).sum().backward()
        except ValueError:
            assert flags[2] and flags[5]
        outcome.append([x.grad, layer.weight.grad, layer.running_mean])
    return outcome


def test_no_mixture_of_flags_and_empty_ranks_hangs():
    mixtures = [[bool(i >> b & 1) for b in range(6)] for i in range(64)]
    results = worlds.run(2, with_flags, mixtures, seconds=30)
    for i, flags in enumerate(mixtures):
        nothing = flags[2] and flags[5]
        means = [results[rank][i][2] for rank in range(2)]
        assert torch.equal(*means) and torch.equal(means[0], torch.zeros(C)) == nothing
        for rank in range(2):
            dx, dweight, _ = results[rank][i]
            needs, learns, empty = flags[3 * rank : 3 * rank + 3]
            assert (dx is not None) == (needs and not nothing) and (dweight is not None) == (learns and not nothing)
            if learns and empty and not nothing:
                assert torch.equal(dweight, torch.zeros(C))


def too_few(rank, world):
    """Nothing at all, then one sample on one rank: an error on all of them, and nothing moved."""
    layer = built(InPlaceABNSync)
    before = statistics(layer)
    errors = []
    for samples in (0, int(rank == 1)):
        x = torch.ones(samples, C, 1, 1, requires_grad=True) * 1
        try:
            layer(x)
        except ValueError as error:
            errors.append(str(error))
        assert torch.equal(x, torch.ones(samples, C, 1, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))
    return errors


def test_too_few_samples_in_all_is_an_error_on_every_rank():
    assert all("got 0 on all 2 ranks" in a and "got 1 on all 2 ranks" in b for a, b in worlds.run(2, too_few))


def counted(rank, world):
    """How many collectives of which sizes a step takes, in training and evaluation, alone and together."""
    sent = []
    for name, at in (("all_gather", 1), ("all_reduce", 0)):
        real = getattr(dist, name)

        def spy(*args, real=real, name=name, at=at, **kwargs):
            sent.append((name, args[at].numel(), str(args[at].dtype)))
            return real(*args, **kwargs)

        setattr(dist, name, spy)
    outcome = []
    solo = [dist.new_group([r]) for r in range(world)][rank]
    for training, group in ((True, None), (False, None), (True, solo)):
        layer = built(InPlaceABNSync, group=group).train(training)
        z = layer(draw(rank, (2, C, 3, 3), torch.bfloat16).requires_grad_() * 1)
        forward = list(sent)
        z.sum().backward()
        outcome.append([forward, sent[len(forward) :]])
        sent.clear()
    return outcome


def test_one_collective_forward_one_backward_none_in_evaluation_or_alone():
    for training, evaluation, alone in worlds.run(2, counted):
        assert training == [[("all_gather", 2 * C + 1, "torch.float64")], [("all_reduce", 2 * C, "torch.float64")]]
        assert evaluation == [[], []] and alone == [[], []]


def steps_through_collectives(rank, world, *case):
    """As steps; a lone rank, too, takes the collectives, which it would leave out."""
    functions.ranks = SimpleNamespace(**{**vars(ranks), "size": lambda group: 2})
    return steps(rank, world, *case)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("world, backend", [(2, "gloo"), (1, "nccl")])
def test_ranks_on_a_gpu(monkeypatch, world, backend):
    """Two processes share one GPU over gloo; nccl wants a GPU for each, so there is one, which talks to itself."""
    monkeypatch.setattr(worlds, "BACKEND", backend)
    case = (UNEVEN if world > 1 else [[(2, C, 4, 3)], [(1, C, 5, 5)]], "float32", 20, {})
    compare(world, *case, worlds.run(world, steps_through_collectives, *case, "cuda"))


def far_apart(rank, world):
    mean = torch.tensor([0.0, 1e4, -1e4], dtype=torch.float64)[rank].expand(C)
    return merged_moments(mean, torch.full((C,), 2.0, dtype=torch.float64), 1000 + rank, None)


def test_means_far_apart_cost_no_digits():
    (mean, var, count), *others = worlds.run(3, far_apart)
    n, means = torch.tensor([1000.0, 1001.0, 1002.0]).double(), torch.tensor([0.0, 1e4, -1e4]).double()
    true_mean = (n * means).sum() / n.sum()
    true_var = 2 + (n * (means - true_mean) ** 2).sum() / n.sum()
    assert count == 3003 and ((mean - true_mean).abs() <= 1e-9).all() and ((var / true_var - 1).abs() <= 1e-12).all()
    assert all(torch.equal(a, b) for other in others for a, b in zip(other, (mean, var, count), strict=True))


# z is kept, and x.
ACTIVATIONS_OF_GROUPS = ("leaky_relu", "tanh", "gelu")


def gradient(layer, batches):
    """dx of a loss that is no sum of z, of these batches as one."""
    x, weights = torch.cat(batches).requires_grad_(), torch.cat([batch.flip(0) for batch in batches])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (dx,) = torch.autograd.grad((layer(x * 1) * weights).sum(), x)
    return dx


def in_groups(rank, world):
    """Pairs; overlapping threes, one after the other; and those that have work."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    threes = {(0, 1, 2): dist.new_group([0, 1, 2]), (1, 2, 3): dist.new_group([1, 2, 3])}
    net = nn.Sequential(nn.Sequential(built(InPlaceABNSync)), built(InPlaceABNSync))
    x = draw(rank, (2, C, 3, 3), torch.float32)
    means = {}
    for layer in (net[0][0], net[1]):
        layer.momentum = 1.0

    def mean_in(group):
        set_active_group(net, group)
        net(x.clone().requires_grad_() * 1)
        return net[0][0].running_mean.clone()

    means["pair"] = mean_in(pairs[rank // 2])
    for activation in ACTIVATIONS_OF_GROUPS:
        layer = InPlaceABNSync(C, activation=activation, group=pairs[rank // 2]).double()
        means[activation] = gradient(layer, [x.double()])
    for members, group in threes.items():
        if rank in members:
            means[str(members)] = mean_in(group)
    for busy in ((1, 3), (0, 1, 2, 3), (), (1, 3)):
        group = active_group(rank in busy)
        assert (group is dist.GroupMember.NON_GROUP_MEMBER) == (rank not in busy)
        if rank in busy:
            means[str(busy)] = mean_in(group)
    try:
        inplace_abn_sync(x, None, None, None, None, group=pairs[1 - rank // 2])
    except ValueError as error:
        assert "not in the layer's process group" in str(error)
        means["stranger"] = torch.ones(1)
    return means


def test_groups():
    results = worlds.run(4, in_groups)
    mean = lambda members: torch.stack([draw(r, (2, C, 3, 3), torch.float32).mean((0, 2, 3)) for r in members]).mean(0)
    for rank, means in enumerate(results):
        assert torch.allclose(means["pair"], mean([0, 1] if rank < 2 else [2, 3]), atol=1e-6) and "stranger" in means
        for members in ((0, 1, 2), (1, 2, 3), (1, 3), (0, 1, 2, 3)):
            assert (str(members) in means) == (rank in members)
            if rank in members:
                assert torch.allclose(means[str(members)], mean(members), atol=1e-6)
    for pair in ((0, 1), (2, 3)):
        for activation in ACTIVATIONS_OF_GROUPS:
            batches = [draw(rank, (2, C, 3, 3), torch.float32).double() for rank in pair]
            want = gradient(InPlaceABN(C, activation=activation).double(), batches)
            assert torch.allclose(torch.cat([results[rank][activation] for rank in pair]), want, rtol=1e-12, atol=1e-12)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 8, 3), InPlaceABN(8)
        self.body, self.exact = nn.Conv2d(8, 8, 3), InPlaceABN(8, activation="relu")
        self.head = nn.Conv2d(8, 2, 1)

    def features(self, x):
        return self.exact(self.body(self.norm(self.stem(x))))

    def forward(self, x):
        return self.head(self.features(x))


def wrapped(rank, world, how):
    warnings.simplefilter("ignore")
    net = convert_sync(Network().double())
    x = draw(rank, (2, 3, 8, 8), torch.float64)
    if how == "ddp":
        parallel = DistributedDataParallel(net)
        parallel(x).square().sum().backward()
    elif how == "compiled":
        from torch._dynamo.testing import CompileCounterWithBackend

        counter = CompileCounterWithBackend("aot_eager")
        torch.compile(net, backend=counter)(x).square().sum().backward()
        # Graphs break at the layers; what lies before, between and behind them is compiled.
        assert sum("conv2d" in [n.name for n in graph.graph.nodes] for graph in counter.graphs) == 3
    else:
        h = checkpoint(net.features, x.requires_grad_(), use_reentrant=how == "reentrant")
        net.head(h).square().sum().backward()
    return [[p.grad for p in net.parameters()], list(net.buffers())]


@pytest.mark.parametrize("how", ["ddp", "compiled", "reentrant", "not reentrant"])
@pytest.mark.filterwarnings("ignore:relu has no inverse")
def test_wrapped_in(how):
    """DistributedDataParallel averages, the others leave each rank its own part; either way statistics move once."""
    alone = Network().double()
    alone(torch.cat([draw(r, (2, 3, 8, 8), torch.float64) for r in range(2)])).square().sum().backward()
    results = worlds.run(2, wrapped, how)
    for i, p in enumerate(alone.parameters()):
        parts = [gradients[i] for gradients, _ in results]
        total = parts[0] * 2 if how == "ddp" else sum(parts)
        assert torch.allclose(total, p.grad, rtol=1e-9, atol=1e-9)
    for _, buffers in results:
        for mine, want in zip(buffers, alone.buffers(), strict=True):
            assert torch.allclose(mine, want, rtol=1e-12)


def until_killed(rank, world, folder):
    """Train until another rank is gone; then say when, and whether the statistics are those of a whole step."""
    layer = built(InPlaceABNSync)
    recorded = statistics(layer)
    open(f"{folder}/ready{rank}", "w").close()
    try:
        while True:
            z = layer(draw(rank, (2, C, 3, 3), torch.float32).requires_grad_() * 1)
            recorded = statistics(layer)
            z.sum().backward()
    except RuntimeError:
        whole = all(torch.equal(a, b) for a, b in zip(recorded, layer.buffers(), strict=True))
        torch.save([time.time(), whole], f"{folder}/end{rank}.pt")
    # Without a word to the others, of whom one is dead.
    signal.raise_signal(signal.SIGKILL)


@pytest.mark.parametrize("times", [3, pytest.param(27, marks=pytest.mark.long)])
def test_survivors_of_a_killed_rank_raise_in_time(times):
    world, patience = 3, 5
    for i in range(times):
        with tempfile.TemporaryDirectory() as folder:
            processes = worlds.start(world, folder, patience, until_killed, folder)
            while len(list(Path(folder).glob("ready*"))) < world:
                assert any(p.is_alive() for p in processes)
                time.sleep(0.01)
            time.sleep(random.Random(i).uniform(0, 0.3))
            victim = i % world
            processes[victim].kill()
            killed = time.time()
            # Seen of gloo where both cores are busy: its timeout passes twice. The rest is for processes that get no core.
            limit = 2 * patience + 5
            for p in processes:
                p.join(limit)
            for rank in set(range(world)) - {victim}:
                at, whole = torch.load(f"{folder}/end{rank}.pt")
                assert at - killed <= limit and whole


def test_layers_are_converted_and_back():
    shared = InPlaceABN(4, activation="elu", variant="I")
    net = nn.Sequential(InPlaceABN(3), nn.Sequential(shared, nn.ReLU()), shared)
    twin = copy.deepcopy(net)
    group = object()
    assert convert_sync(net, group) is net
    # The same object: whoever holds it, holds a converted one.
    assert net[2] is shared and net[1][0] is shared and type(shared) is InPlaceABNSync and shared.group is group
    assert net.state_dict().keys() == twin.state_dict().keys() and shared.variant == "I"
    net.eval(), twin.eval()
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(net[0](x), twin[0](x))
    convert_sync(net, sync=False)
    assert repr(net) == repr(twin) and not hasattr(shared, "group")
    assert type(convert_sync(InPlaceABN(2))) is InPlaceABNSync

    class Own(InPlaceABN):
        pass

    with pytest.warns(UserWarning, match="leaves a Own as it is"):
        assert type(convert_sync(nn.Sequential(Own(2)))[0]) is Own


def copied(rank, world):
    """A layer with a group can be copied, and saved without it."""
    layer = InPlaceABNSync(3, group=dist.group.WORLD)
    assert copy.deepcopy(layer).group is layer.group and copy.deepcopy(layer).weight is not layer.weight
    return pickle.loads(pickle.dumps(layer)).group is None


def test_copies_of_a_layer_with_a_group():
    assert all(worlds.run(2, copied))


def by_itself(rank, world):
    """What one rank may do without the others."""
    if rank == 0:
        # Evaluation without running statistics.
        InPlaceABNSync(3, track_running_stats=False).eval()(draw(0, (2, 3, 4, 4), torch.float32))
        try:
            # Neither in nor out of it: the rank is told.
            layer = InPlaceABNSync(3, group=dist.GroupMember.NON_GROUP_MEMBER)
            layer(draw(0, (2, 3, 4, 4), torch.float32))
        except ValueError as error:
            assert "not in the layer's process group" in str(error)
            return True
    return rank == 1


def test_one_rank_by_itself():
    assert all(worlds.run(2, by_itself, seconds=30))


def without_gradients(rank, world):
    weight = torch.randn(3, 3, 1, 1, requires_grad=True)
    h = torch.nn.functional.conv2d(draw(rank, (2, 3, 4, 4), torch.float32), weight)
    before = h.detach().clone()
    with torch.no_grad():
        InPlaceABNSync(3)(h)
    return torch.equal(h, before)


def test_without_gradients_the_input_is_not_overwritten():
    assert all(worlds.run(2, without_gradients))

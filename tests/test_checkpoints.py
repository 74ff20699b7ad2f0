"""Files go in whole or not at all, mean what their scale says, and run nothing."""

from __future__ import annotations

import hashlib
import os
import pickle

import pytest
import torch
from torch import nn

from inplace_abn import ABN, InPlaceABN, checkpoints


def network(kind=InPlaceABN):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), kind(4), nn.Sequential(nn.Conv2d(4, 4, 1), kind(4)))
    for norm in (net[1], net[2][1]):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.num_batches_tracked.fill_(7)
    return net


def unlike(net):
    torch.manual_seed(1)
    for v in net.state_dict().values():
        v.copy_(torch.randint_like(v, 9) if v.dtype == torch.long else torch.rand_like(v))
    return net


def released(net):
    """As the original wrote its files: under a wrapper, beside other things, without counters."""
    state = {f"module.{n}": v for n, v in net.state_dict().items() if not n.endswith("num_batches_tracked")}
    return {
        "epoch": 90,
        "arch": "net",
        "best_prec1": 0.5,
        "state_dict": state,
        "optimizer": {"state": {}, "param_groups": []},
    }


def of_original(net, x):
    """What the original's in-place layers compute: γ = |w| + eps."""
    twin = network(ABN)
    twin.load_state_dict(net.state_dict())
    with torch.no_grad():
        for norm in (twin[1], twin[2][1]):
            norm.weight.copy_(norm.weight.abs() + norm.eps)
    return twin.eval()(x)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("scale", ["signed", "abs+eps"])
def test_a_released_file(tmp_path, scale, legacy):
    source, path, x = network(ABN), tmp_path / "net.pth.tar", torch.randn(2, 3, 8, 8)
    torch.save(released(source), path, _use_new_zipfile_serialization=not legacy)
    net = unlike(network())
    checkpoints.load(net, path, scale)
    want = of_original(source, x) if scale == "abs+eps" else source.eval()(x)
    with torch.no_grad():
        assert torch.allclose(net.eval()(x), want, atol=1e-6)
    assert net[1].num_batches_tracked == 0


def test_a_batch_norm_network_in_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    source, path = network(nn.BatchNorm2d), tmp_path / "net.safetensors"
    safetensors.save_file(source.state_dict(), path)
    net = unlike(network())
    checkpoints.load(net, path, "signed")
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), source.state_dict().values(), strict=True))


def test_the_file_in_parts_and_the_keys_of_2018(tmp_path):
    body, head = network(), nn.Sequential(InPlaceABN(2))
    inner = {
        n.replace("1.weight", "1.bn.weight").replace("1.bias", "1.bn.bias"): v for n, v in body.state_dict().items()
    }
    torch.save({"state_dict": {"body": inner, "head": head.state_dict()}}, tmp_path / "parts.pth")
    model = nn.ModuleDict({"body": unlike(network()), "head": unlike(nn.Sequential(InPlaceABN(2)))})
    checkpoints.load(model, tmp_path / "parts.pth", "signed")
    want = {
        **{f"body.{n}": v for n, v in body.state_dict().items()},
        **{f"head.{n}": v for n, v in head.state_dict().items()},
    }
    assert all(torch.equal(v, want[n]) for n, v in model.state_dict().items())


def test_the_scale_must_be_said_unless_the_file_is_known(tmp_path, monkeypatch):
    source, path = network(ABN), tmp_path / "net.pth"
    torch.save(source.state_dict(), path)
    net = unlike(network())
    with pytest.raises(ValueError, match="none of the released files"):
        checkpoints.load(net, path)
    with pytest.raises(ValueError, match="scale is 'both'"):
        checkpoints.load(net, path, "both")
    monkeypatch.setitem(checkpoints.RELEASED, hashlib.md5(path.read_bytes()).hexdigest(), "abs+eps")
    checkpoints.load(net, path)
    assert torch.equal(net[1].weight, source[1].weight.abs() + 1e-5)
    assert len(checkpoints.RELEASED) == 11 and all(len(md5) == 32 for md5 in checkpoints.RELEASED)


@pytest.mark.parametrize("change, says", [
    (lambda s: s.pop("1.bias"), "missing: 1.bias"),
    (lambda s: s.update(extra=torch.zeros(1)), "not in the model: extra"),
    (lambda s: s.update({"0.weight": torch.zeros(1)}), r"0.weight has shape \(1,\), the model's \(4, 3, 3, 3\)"),
])  # fmt: skip
def test_what_does_not_fit_changes_nothing(tmp_path, change, says):
    state = dict(network().state_dict())
    change(state)
    torch.save(state, tmp_path / "net.pth")
    net = unlike(network())
    before = {n: v.clone() for n, v in net.state_dict().items()}
    with pytest.raises(ValueError, match=says):
        checkpoints.load(net, tmp_path / "net.pth", "signed")
    assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())


class Trap:
    def __reduce__(self):
        return os.mkdir, (os.environ["TRAP"],)


def test_no_code_in_a_file_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    torch.save({"state_dict": Trap()}, tmp_path / "net.pth")
    with open(tmp_path / "plain.pth", "wb") as file:
        pickle.dump(Trap(), file, protocol=2)
    for name in ("net.pth", "plain.pth"):
        with pytest.raises(ValueError, match="could run code, so it is refused"):
            checkpoints.load(network(), tmp_path / name, "signed")
    assert not (tmp_path / "sprung").exists()


def test_what_is_no_state_dict_is_named(tmp_path):
    torch.save({"state_dict": {"0.weight": 3}}, tmp_path / "net.pth")
    with pytest.raises(ValueError, match=r"0.weight is a int, not a state dict"):
        checkpoints.load(network(), tmp_path / "net.pth", "signed")

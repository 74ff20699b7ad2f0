"""Runs that are stopped, killed, spread over ranks or fed with broken files end as they would have otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from inplace_abn.recipes import named, storage, task_of
from inplace_abn.recipes.building import built, rate
from inplace_abn.recipes.config import Optim, override
from inplace_abn.recipes.data import Order, Permuted, number
from inplace_abn.recipes.loop import Run, train
from inplace_abn.recipes.scenes import KINDS

SRC = Path(__file__).parent.parent / "src"
TINY = [
    "data.resize=16",
    "data.crop=12",
    "data.length=36",
    "train.batch=8",
    "train.epochs=2",
    "train.log_every=1",
    "train.save_minutes=0",
    "train.evaluate_every=1",
]
CPU = torch.device("cpu")


def tiny(*changes: str):
    return override(named("embedded-classify"), [*TINY, *changes])


def run(config, folder, **options):
    return train(config, task_of(config), folder, device=CPU, tell=lambda line: None, **options)


def state(folder):
    return storage.latest(folder)[1]


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def log(folder) -> list[dict]:
    """What does not depend on the clock."""
    clock = {"images_per_second", "data_wait"}
    return [{k: v for k, v in line.items() if k not in clock} for line in storage.lines(folder)]


class Interrupted(Exception):
    pass


def interrupted_after(monkeypatch, steps: int, config, folder, **options) -> None:
    """Begin a run, or go on with it, and let it die without a word after so many steps."""
    one_step = Run.one_step
    count = 0

    def dying(self, batches):
        nonlocal count
        if count == steps:
            raise Interrupted
        count += 1
        one_step(self, batches)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(Run, "one_step", dying)
        run(config, folder, **options)


# A reason each: everything that has a state of its own, and workers, which must not matter.
CASES = {
    "plain": [],
    "two-workers": ["data.workers=2"],
    "averaged-clipped-parts": ["optim.ema=0.9", "optim.clip=1", "train.accumulate=2"],
    "scaled-float16": ["train.dtype=float16", "network.norm=inplace-1"],
    "recomputed-relu": ["network.activation=relu", "optim.ema=0.9", "optim.decay=weights"],
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(changes, tmp_path, monkeypatch):
    config = tiny(*changes)
    scores = run(config, tmp_path / "whole")
    # In the middle of an epoch, at its end, and in the next one.
    interrupted_after(monkeypatch, 3, config, tmp_path / "parts")
    interrupted_after(monkeypatch, 1, config, tmp_path / "parts", resume=True)
    interrupted_after(monkeypatch, 2, override(config, ["data.workers=0"]), tmp_path / "parts", resume=True)
    assert run(config, tmp_path / "parts", resume=True) == scores
    assert equal(state(tmp_path / "parts"), state(tmp_path / "whole"))
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    assert [line["step"] for line in log(tmp_path / "whole") if "loss" in line] == list(range(1, 9))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
def test_seeds_matter_and_workers_do_not(tmp_path):
    states = [
        state_of(tmp_path / str(i), *changes)
        for i, changes in enumerate([(), ("data.workers=4",), ("train.seed=1",), ("data.cache=false",)])
    ]
    assert equal(states[0]["model"], states[1]["model"]) and equal(states[0]["model"], states[3]["model"])
    assert not equal(states[0]["model"], states[2]["model"])


def state_of(folder, *changes):
    run(tiny(*changes), folder)
    return state(folder)


class Numbers:
    """A data set that is only counted."""

    classes = ("one",)

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def order(self, seed, epoch):
        return Permuted(self.length, seed, epoch)


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_the_order_does_not_depend_on_ranks_and_parts(ranks, parts):
    samples, batch, steps = Numbers(103), 12, 8 * 3
    orders = [list(Order(samples, batch, steps, 0, rank, ranks, parts, seed=5)) for rank in range(ranks)]
    per_step = [
        [draw for part in range(parts) for rank in range(ranks) for draw in orders[rank][step * parts + part]]
        for step in range(steps)
    ]
    alone = list(Order(samples, batch, steps, seed=5))
    assert per_step == alone
    for epoch in range(3):
        seen = [draw.sample for step in alone[8 * epoch : 8 * epoch + 8] for draw in step]
        assert len(seen) == 96 and len(set(seen)) == 96
    # From the middle on, the same; and no two epochs alike.
    assert list(Order(samples, batch, steps, 11, seed=5)) == alone[11:]
    assert alone[:8] != alone[8:16] and len({draw.seed for step in alone for draw in step}) == 96 * 3


def test_shares_that_do_not_come_out_even_are_refused():
    with pytest.raises(ValueError, match="take a multiple of 6"):
        Order(Numbers(100), 8, 1, ranks=3, parts=2)
    with pytest.raises(ValueError, match="there are 5 samples"):
        Order(Numbers(5), 8, 1)


def test_rates():
    at = lambda optim, *steps: [rate(optim, step, 10, 100) for step in steps]
    assert at(Optim(drop_every=3), 0, 29, 30, 60) == pytest.approx([0.1, 0.1, 0.01, 0.001])
    assert at(Optim(schedule="linear", final_lr=1e-6), 0, 99) == pytest.approx([0.1, 1e-6])
    assert at(Optim(schedule="poly", lr=1.0), 0, 50) == pytest.approx([1.0, 0.5**0.9])
    assert at(Optim(schedule="cosine", final_lr=0.02), 0, 50, 100) == pytest.approx([0.1, 0.06, 0.02])
    assert at(Optim(schedule="constant", warmup=1), 0, 4, 9, 10, 99) == pytest.approx([0.01, 0.05, 0.1, 0.1, 0.1])


# The folder.


def test_a_flipped_byte_is_noticed_and_the_checkpoint_before_is_used(tmp_path):
    content = {"model": {"w": torch.arange(1000.0)}, "step": 1}
    storage.save(tmp_path, 1, content, keep=2)
    newest = storage.save(tmp_path, 2, {**content, "step": 2}, keep=2)
    raw, chance = newest.read_bytes(), random.Random(0)
    for _ in range(200):
        where = chance.randrange(len(raw))
        newest.write_bytes(raw[:where] + bytes([raw[where] ^ (1 << chance.randrange(8))]) + raw[where + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            storage.load(newest)
    with pytest.warns(UserWarning, match="passed over for the one before it"):
        path, found = storage.latest(tmp_path)
    assert found["step"] == 1 and path.name.startswith("step-00000001-")


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_a_failed_save_leaves_the_last_checkpoint_and_is_told(failure, tmp_path, monkeypatch):
    storage.save(tmp_path, 1, {"step": 1}, keep=1)

    def half(state, file):
        file.write(b"half of it")
        raise failure

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match=failure.strerror):
        storage.save(tmp_path, 2, {"step": 2}, keep=1)
    assert [path.name[:13] for path in tmp_path.iterdir()] == ["step-00000001"]
    assert storage.latest(tmp_path)[1] == {"step": 1}


def test_old_checkpoints_go_and_the_newest_stay(tmp_path):
    for step in (5, 30, 100, 200):
        storage.save(tmp_path, step, {"step": step}, keep=2)
    assert [storage.load(path)["step"] for path in storage.checkpoints(tmp_path)] == [200, 100]


def test_a_run_is_not_begun_over_another_nor_continued_as_another(tmp_path):
    run(tiny("train.epochs=1"), tmp_path)
    with pytest.raises(ValueError, match="holds a run; continue it with --resume"):
        run(tiny("train.epochs=1"), tmp_path)
    with pytest.raises(ValueError, match="other settings: optim.lr, train.epochs"):
        run(tiny("optim.lr=0.2"), tmp_path, resume=True)
    # Complete already: only evaluated.
    assert "top1" in run(tiny("train.epochs=1"), tmp_path, resume=True)


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path, monkeypatch):
    config = tiny("optim.lr=1e30", "optim.warmup=0")
    with pytest.raises(FloatingPointError, match="smaller optim.lr"):
        run(config, tmp_path)
    assert all(torch.isfinite(line["loss"] * torch.ones(())) for line in storage.lines(tmp_path))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    config = tiny("optim.lr=1e30", "optim.warmup=0", "optim.name=sgd", "train.log_every=8")
    with pytest.raises(FloatingPointError, match="not saved"):
        run(config, tmp_path)
    for path in storage.checkpoints(tmp_path):
        assert all(v.isfinite().all() for k, v in storage.load(path)["model"].items() if "running" not in k)


def test_damaged_checkpoints_do_not_push_out_new_ones(tmp_path):
    config = tiny("train.keep=1")
    run(config, tmp_path)
    (path,) = storage.checkpoints(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is damaged: .*goes on from the one before it, or from its beginning"):
        run(config, tmp_path, resume=True)
    assert state(tmp_path)["step"] == 8
    assert [line["step"] for line in log(tmp_path) if "loss" in line] == list(range(1, 9))
    assert [p.suffix for p in tmp_path.glob("step-*")].count(".damaged") == 1


def test_checkpoints_that_cannot_be_read_are_put_aside(tmp_path, monkeypatch):
    for step in (1, 2):
        storage.save(tmp_path, step, {"step": step}, 2)
    newest, older = storage.checkpoints(tmp_path)
    real = storage._digest

    def failing(file):
        if Path(file.name) == newest:
            raise OSError(5, "Input/output error")
        return real(file)

    monkeypatch.setattr(storage, "_digest", failing)
    with pytest.raises(UserWarning, match="Input/output error"):
        storage.tidy(tmp_path)  # warnings are errors here, and it is out of the way all the same
    assert storage.checkpoints(tmp_path) == [older] and newest.with_suffix(".damaged").exists()
    storage.tidy(tmp_path)
    assert storage.latest(tmp_path)[1] == {"step": 1}


def test_what_a_killed_save_left_is_removed(tmp_path):
    tmp_path.joinpath("step-00000003.pt.part").write_bytes(b"half")
    run(tiny("train.epochs=1"), tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_another_data_set_does_not_continue_a_run(tmp_path):
    run(tiny(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["data"]["length"] = 40
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="begun with 36 samples of 4 classes, and there are 40"):
        run(tiny("data.length=40"), tmp_path, resume=True)


def test_a_signal_in_an_evaluation_finds_the_state_saved(tmp_path, monkeypatch):
    from inplace_abn.recipes import loop

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        raise AssertionError("not stopped")

    config = tiny("train.save_minutes=60")
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as stopped:
        patched.setattr(loop, "evaluate", signalled)
        run(config, tmp_path / "stopped")
    assert stopped.value.code == 143 and state(tmp_path / "stopped")["step"] == 4
    run(config, tmp_path / "stopped", resume=True)
    run(config, tmp_path / "whole")
    assert equal(state(tmp_path / "stopped"), state(tmp_path / "whole"))
    assert log(tmp_path / "stopped") == log(tmp_path / "whole")


def test_one_signal_that_arrives_twice_is_one(monkeypatch):
    from inplace_abn.recipes.processes import Signals

    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.got == signal.SIGTERM and not left
        signals.since -= 10
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [130]


# Signals and kills, from outside.


def interpreter(ranks: int = 0, restarts: int = 0) -> list[str]:
    spread = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return [sys.executable, *(spread if ranks else []), "-m", "inplace_abn.cli"]


def command(folder: Path, *more: str, ranks: int = 0, restarts: int = 0, changes: Sequence[str] = ()) -> list[str]:
    sets = [part for change in [*TINY, *changes] for part in ("--set", change)]
    start = [*interpreter(ranks, restarts), "train", "embedded-classify"]
    return [*start, "--device", "cpu", "--out", str(folder), *sets, *more]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **more}


def finish(folder: Path, *more: str, **options) -> subprocess.CompletedProcess:
    return ended(command(folder, *more, **options))


def ended(words: list[str]) -> subprocess.CompletedProcess:
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@contextlib.contextmanager
def started(folder: Path, *more: str, **options):
    process = subprocess.Popen(
        command(folder, *more, **options), env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def wait_for_step(folder: Path, step: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        found = storage.checkpoints(folder) if folder.exists() else []
        if found and int(found[0].name.split("-")[1]) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"no step {step} after two minutes")


LONGER = ["train.epochs=40"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_run_with_its_code(number, tmp_path):
    with started(tmp_path, changes=[*LONGER, "data.workers=2", "train.save_minutes=60"]) as process:
        while not storage.lines(tmp_path):
            time.sleep(0.02)
            assert process.poll() is None, process.stderr.read()
        # To the whole group, as a terminal or a scheduler does: workers must not die of it first.
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    step = state(tmp_path)["step"]
    assert 0 < step < 160 and f"after step {step}; --resume goes on" in said


def killed_runs(folder: Path, kills: int, seed: int) -> None:
    """Kill a run without warning at random moments, again and again; the last checkpoint loads each time."""
    chance = random.Random(seed)
    changes = ["train.epochs=6"]
    for _ in range(kills):
        with started(folder, "--resume", changes=changes) as process:
            before = storage.checkpoints(folder)
            step = int(before[0].name.split("-")[1]) if before else 0
            wait_for_step(folder, min(step + chance.randrange(1, 4), 24))
            time.sleep(chance.random() * 0.15)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert storage.load(storage.checkpoints(folder)[0])["step"] >= 1
    finish(folder, "--resume", changes=changes)


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(3000)])])
def test_a_killed_run_ends_as_an_uninterrupted_one(kills, tmp_path):
    finish(tmp_path / "whole", changes=["train.epochs=6"])
    # Five kills spend a run; then another begins.
    for round_, first in enumerate(range(0, kills, 5)):
        folder = tmp_path / f"killed-{round_}"
        killed_runs(folder, min(5, kills - first), round_)
        assert equal(state(folder), state(tmp_path / "whole"))
        assert log(folder) == log(tmp_path / "whole")


def test_two_ranks_with_synchronised_norms_are_one_process(tmp_path):
    # SGD: Adam would divide what is rounding by its own size.
    changes = ["network.norm=sync", "data.corrupt=raise", "train.epochs=1", "optim.name=sgd", "optim.lr=0.05"]
    finish(tmp_path / "two", ranks=2, changes=changes)
    finish(tmp_path / "one", changes=changes)
    one, two = state(tmp_path / "one"), state(tmp_path / "two")
    assert one["step"] == two["step"] == 4
    torch.manual_seed(number(0, "weights"))
    began = built(override(tiny(), changes), task_of(tiny()), len(KINDS), CPU).state_dict()
    learned = [name for name, value in began.items() if value.is_floating_point()]
    flat = lambda state: torch.cat([state[name].double().flatten() for name in learned])
    off = (flat(two["model"]) - flat(one["model"])).norm() / (flat(one["model"]) - flat(began)).norm()
    # Sums of 288 pixels in another order, nine layers deep, four times: no more than each adding its worst case.
    rounding = 288**0.5 * torch.finfo(torch.float32).eps * 9 * 4
    assert off <= rounding, off
    for a, b in zip(log(tmp_path / "one"), log(tmp_path / "two"), strict=True):
        assert a.keys() == b.keys()
        assert all(a[k] == pytest.approx(b[k], rel=rounding) for k in a)
    # Two ranks share what is evaluated, and one of them tells the scores.
    scores = tmp_path / "scores.json"
    said = ended([*interpreter(2), "evaluate", str(tmp_path / "two"), "--device", "cpu", "--json", str(scores)]).stdout
    assert said.count("top1") == 1
    logged = log(tmp_path / "two")[-1]
    assert all(
        value == pytest.approx(logged[name], rel=rounding) for name, value in json.loads(scores.read_text()).items()
    )


def test_torchrun_restarts_after_a_killed_rank(tmp_path):
    changes = ["network.norm=sync", "train.epochs=8", "train.batch=8"]
    finish(tmp_path / "whole", ranks=2, changes=changes)
    folder = tmp_path / "killed"
    with started(folder, "--resume", ranks=2, restarts=2, changes=changes) as process:
        wait_for_step(folder, 3)
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert len(children) >= 2
        os.kill(int(children[1]), signal.SIGKILL)
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said[-3000:]
    assert equal(state(folder)["model"], state(tmp_path / "whole")["model"])


def test_metrics_are_on_the_board_and_in_the_log(tmp_path):
    run(tiny("train.epochs=1"), tmp_path)
    assert any((tmp_path / "tensorboard").iterdir())
    lines = storage.lines(tmp_path)
    assert lines[-1].keys() == {"step", "epoch", "top1", "top5", "val_loss"}
    assert lines[0].keys() >= {"step", "epoch", "loss", "lr", "images_per_second", "data_wait"}
    assert json.loads((tmp_path / "config.json").read_text())["train"]["epochs"] == 1

"""The command line, as users type it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from inplace_abn import cli, convert
from inplace_abn.pages import page

SRC = Path(__file__).parent.parent / "src"


def run(*arguments, cwd=None, **environment):
    env = {**os.environ, "PYTHONPATH": str(SRC), **environment}
    command = [sys.executable, "-m", "inplace_abn.cli", *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=200)


@pytest.fixture
def mine(tmp_path):
    """A module of one's own in the current directory."""
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def small():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3), nn.BatchNorm2d(2))\n"
        "def number():\n    return 7\n"
        "def wide(channels):\n    return nn.Conv2d(3, channels, 3)\n"
        "def broken():\n    return nn.Nonsense()\n"
        "constant = 7\n"
        "def elsewhere():\n    from helpers import small\n    return small()\n"
    )
    (tmp_path / "helpers.py").write_text("from nets import small\n")
    return tmp_path


def test_convert_writes_table_json_and_page(mine, capsys, monkeypatch):
    monkeypatch.chdir(mine)
    assert cli.main(["convert", "nets:small", "--input", "2,3,32,32", "--json", "r.json", "--html", "r.html"]) == 0
    out = capsys.readouterr().out
    assert "bn + relu" in out and "recompute" in out and "of 2 batch norms converted" in out
    data = json.loads((mine / "r.json").read_text())
    assert data["after_bytes"] < data["before_bytes"] and data["lines"][0]["layer"] == "1"
    text = (mine / "r.html").read_text()
    assert "<script" not in text and "http" not in text and "NOTHING_TO_SAVE" in text


def test_plan_doctor_and_info(mine, capsys, monkeypatch):
    monkeypatch.chdir(mine)
    assert cli.main(["plan", "nets:small", "--input", "2,3,32,32", "--memory", "50MB", "--json", "p.json"]) == 0
    assert "largest batch" in capsys.readouterr().out and json.loads((mine / "p.json").read_text())["rows"]
    assert cli.main(["doctor", "nets:small"]) == 0
    assert "inverts" in capsys.readouterr().out
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out and "backend" in out


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [[], ["--fused"]])
def test_export_gives_the_same_outputs(mine, capsys, monkeypatch, options):
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    monkeypatch.chdir(mine)
    assert cli.main(["export", "nets:small", "net.onnx", "--input", "1,3,16,16", *options]) == 0
    difference = float(capsys.readouterr().out.split("outputs: ")[1])
    assert difference < 1e-5
    operators = {node.op_type for node in onnx.load(mine / "net.onnx").graph.node}
    assert ("BatchNormalization" in operators) == (not options)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["convert", "resnet50"], "torchvision:NAME, timm:NAME, or module:callable"),
        (["convert", "nets:nothing"], "nothing"),
        (["convert", "nowhere:net"], "nowhere"),
        (["convert", "nets:number"], "not an nn.Module"),
        (["convert", "torchvision:nonsense"], "no model 'nonsense'"),
        (["convert", "nets:small", "--input", "many"], "8,3,224,224"),
        (["convert", "nets:small", "--input", "2,3,32,32", "--json", "no/such/folder.json"], "cannot write"),
        (["plan", "nets:small", "--memory", "lots"], "24GB"),
        (["doctor", "nets:small", "--weights", "missing.pt"], "missing.pt"),
        (["convert", "nets:wide"], "'nets:wide' must be callable without arguments: missing"),
        (["convert", "nets:constant"], "'nets:constant' must be callable without arguments"),
        (["convert", "nets:small", "--input", "8,3"], "nets:small does not run on a batch of shape 8,3: RuntimeError"),
        (["convert", "nets:small", "--preserve", "0", "layer9"], "'layer9', which is the path of no module"),
        (["plan", "nets:small", "--input", "2,5,64,64"], "nets:small does not run on a batch of shape 2,5,64,64"),
        (["export", "nets:small", "net.onnx", "--input", "2,5,64,64"], "does not run on a batch of shape 2,5,64,64"),
        (["plan", "nets:small", "--memory", "24"], "memory is '24'; give a number and a unit, such as 24GB"),
        (["plan", "nets:small", "--memory", "1.2.3GB"], "memory is '1.2.3GB'"),
        (["plan", "nets:small", "--memory", "0GB"], "memory is '0GB'"),
        (["plan", "nets:small", "--optimizer-states=-3"], "--optimizer-states -3"),
        (["convert", "torchvision:ssdlite320_mobilenet_v3_large"], "does not run on a batch of shape 8,3,224,224"),
    ],
    ids=str,
)
def test_mistakes_are_told_in_a_line(mine, capsys, monkeypatch, arguments, message):
    if "torchvision" in arguments[1]:
        pytest.importorskip("zoo").torchvision()
    monkeypatch.chdir(mine)
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("inplace-abn: ") and message in error and "Traceback" not in error


def test_code_of_ones_own_may_import_when_it_is_called(mine):
    # As the installed command runs: without the current directory on the path.
    program = "import sys; from inplace_abn import cli; sys.path.remove(''); sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "convert", "nets:elsewhere", "--input", "2,3,32,32"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SRC)}, cwd=mine, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_error_in_code_of_ones_own_comes_with_its_place(mine, monkeypatch):
    monkeypatch.chdir(mine)
    with pytest.raises(AttributeError, match="Nonsense"):
        cli.main(["convert", "nets:broken"])


def test_exit_codes_of_the_process(mine):
    done = run("convert", "nets:nothing", cwd=mine)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert run("convert").returncode == 2
    assert run("dance").returncode == 2


@pytest.mark.alone
def test_help_comes_at_once():
    """Within half a second of what importing torch takes."""

    def spent(*command):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, *command], env={**os.environ, "PYTHONPATH": str(SRC)}, check=True, capture_output=True
        )
        return time.perf_counter() - began

    spent("-c", "import torch")
    plain = min(spent("-c", "import torch") for _ in range(3))
    assert min(spent("-m", "inplace_abn.cli", "--help") for _ in range(3)) <= plain + 0.5


def test_without_rich_it_names_the_extra(mine):
    (mine / "rich.py").write_text("raise ImportError('no rich')\n")
    done = run("info", cwd=mine, PYTHONPATH=f"{mine}:{SRC}")
    assert done.returncode == 1 and "inplace_abn[cli]" in done.stderr


def test_the_page_in_a_browser(tmp_path):
    """Looked at: the chart has its bars, as long as they should be, and nothing is fetched."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here")
    from torch import nn

    net = nn.Sequential(*[m for _ in range(12) for m in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.SiLU())])
    _, report = convert(net, example=torch.empty(2, 3, 64, 64, device="meta"))
    text = page(report, "a <network> of twelve")
    assert len(text) < 20_000
    probe = (
        "<script>const w = [...document.querySelectorAll('#chart .bar')].map(b => b.getBoundingClientRect().width);"
        "document.title = JSON.stringify({n: w.length, w, h: document.body.scrollHeight, over: document.body.scrollWidth > "
        "window.innerWidth, rows: document.querySelectorAll('#lines tr').length, h1: document.querySelector('h1').textContent})"
        "</script></body>"
    )
    (tmp_path / "page.html").write_text(text.replace("</body>", probe))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1200,900",
        f"--user-data-dir={tmp_path}/profile",
    ]
    done = subprocess.run(
        [browser, *options, "--dump-dom", f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=120
    )
    import html

    seen = json.loads(html.unescape(done.stdout.split("<title>")[1].split("</title>")[0]))
    assert seen["n"] == 24 and seen["rows"] == 13 and seen["h1"] == "a <network> of twelve" and not seen["over"]
    before, after = seen["w"][0], seen["w"][1]
    # Three maps before (the last norm's output is nobody's to keep, and has two), one after.
    assert before > 200 and after == pytest.approx(before / 3, rel=0.02)
    shot = subprocess.run(
        [browser, *options, f"--screenshot={tmp_path}/page.png", f"file://{tmp_path}/page.html"],
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert shot.returncode == 0 and (tmp_path / "page.png").stat().st_size > 5_000


def test_recipes_are_listed_one_per_line_and_explained(capsys):
    assert cli.main(["recipes"]) == 0
    listed = capsys.readouterr().out.split()
    assert "resnext101-inplace-512" in listed and "vistas-wide-resnet38-sync-12x776-uniform" in listed
    assert cli.main(["recipes", "imagenette"]) == 0
    assert "optim.lr" in capsys.readouterr().out


TINY = ["data.length=8", "data.resize=16", "data.crop=12", "train.batch=4", "train.epochs=1", "train.log_every=1"]
SETS = [part for change in TINY for part in ("--set", change)]


def test_training_and_evaluation_with_another_activation(tmp_path, capsys):
    folder = str(tmp_path / "run")
    assert cli.main(["train", "embedded-classify", "--device", "cpu", "--out", folder, *SETS]) == 0
    assert "top1" in capsys.readouterr().out
    scores = {}
    for activation in ("leaky_relu", "relu"):
        file = tmp_path / f"{activation}.json"
        assert cli.main(["evaluate", folder, "--device", "cpu", "--activation", activation, "--json", str(file)]) == 0
        scores[activation] = json.loads(file.read_text())
    assert scores["relu"]["val_loss"] != scores["leaky_relu"]["val_loss"]
    assert cli.main(["evaluate", folder, "--device", "cpu", "--flip"]) == 1
    assert "--flip are of segmentation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "resnext"], "recipe 'resnext' is unknown; one of: resnext101-stdbn-relu-256"),
        (["train", "imagenette"], "imagenette needs data: --data FOLDER"),
        (["train", "imagenette", "--data", "nowhere"], "there is no folder nowhere"),
        (
            ["train", "embedded-classify", "--set", "optim.rate=1"],
            "setting 'optim.rate' is unknown; names: network.name",
        ),
        (["evaluate", "nowhere"], "nowhere is not the folder of a run"),
        (["evaluate", "nowhere", "--view", "nine"], "nowhere is not the folder of a run"),
        (["predict", "nowhere", ".", "out", "--scales", "0"], "numbers above 0"),
        (["evaluate", "nowhere", "--scales", "1,"], "--scales '1,': numbers above 0"),
        (["recipes", "resnext"], "is unknown; one of"),
        (["train", "embedded-classify", "--find-batch-size", "--device", "cpu"], "give --memory"),
        (["train", "embedded-classify", "--device", "gpu"], "--device gpu: "),
        (["train", "embedded-classify", "--set", "data.resize=0"], "8 pixels high"),
        (["train", "embedded-segment", "--body", "nowhere", "--device", "cpu"], "no body to load"),
    ],
)
def test_mistakes_in_training_are_told_in_a_line(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("inplace-abn: ") and message in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_the_error_of_a_worker_is_one_line(tmp_path, capsys):
    from PIL import Image

    (tmp_path / "classes.json").write_text('{"classes": [{"name": "a"}, {"name": "b"}]}')
    for part in ("train", "val"):
        for kind, mode in (("images", "RGB"), ("labels", "L")):
            folder = tmp_path / part / kind
            folder.mkdir(parents=True)
            for i in range(4):
                Image.new(mode, (16, 16), 7 if mode == "L" else None).save(folder / f"{i}.png")
    options = [
        "data.kind=pairs",
        "network.name=small",
        "train.batch=2",
        "data.workers=1",
        "data.cache=false",
        "data.crop=8",
    ]
    sets = [part for option in options for part in ("--set", option)]
    arguments = ["train", "camvid", "--data", str(tmp_path), "--out", str(tmp_path / "run"), "--device", "cpu", *sets]
    assert cli.main(arguments) == 1
    said = capsys.readouterr().err.strip()
    assert "pixels of value 7" in said.splitlines()[-1] and "Traceback" not in said


def test_out_of_memory_comes_with_what_would_fit(tmp_path, capsys, monkeypatch):
    from inplace_abn.recipes import loop

    def full(*arguments, **options):
        raise torch.OutOfMemoryError("Tried to allocate 7 GiB.")

    monkeypatch.setattr(loop, "train", full)
    monkeypatch.setattr(cli, "_memory", lambda device: 10**7)
    options = ["--set", "network.norm=standard", "--out", str(tmp_path / "run")]
    assert cli.main(["train", "embedded-classify", *options]) == 1
    said = capsys.readouterr().err
    assert "out of memory: Tried to allocate 7 GiB" in said and "network.norm=inplace" in said and "fits" in said


def test_the_largest_batch_is_found_without_training(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "embedded-segment", "--find-batch-size", "--memory", "100MB"]) == 0
    assert "largest batch of a rank" in capsys.readouterr().out and not list(tmp_path.iterdir())

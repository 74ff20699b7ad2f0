"""The package as users get it: what it contains, what importing it does, and that it needs no compiler."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import inplace_abn

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"

# Each room may import from those above it.
ROOMS = [
    "activations",
    "context",
    "settings",
    "ranks",
    "reference",
    "guard",
    "kernels",
    "library",
    "recompute",
    "functions",
    "modules",
    "doctor",
    "strategies",
    "training",
    "outside",
    "checkpoints",
    "memory",
    "tracing",
    "chains",
    "rewriting",
    "conversion",
    "planning",
    "pages",
    "models",
    "recipes",
    "cli",
]


def python(code: str, *flags: str, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(SRC), **environment}
    done = subprocess.run([sys.executable, *flags, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_point_one_way():
    for path in (SRC / "inplace_abn").rglob("*.py"):
        parts = path.relative_to(SRC / "inplace_abn").with_suffix("").parts
        if parts == ("__init__",):
            continue
        assert parts[0] in ROOMS, f"{path} is in no known room: add it to ROOMS"
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.ImportFrom) and node.level):
                continue
            inside = node.level <= len(parts) - 1
            targets = (
                [parts[0]] if inside else [node.module.split(".")[0]] if node.module else [a.name for a in node.names]
            )
            for target in targets:
                assert inside or ROOMS.index(target) < ROOMS.index(parts[0]), f"{path} imports {target}"


def test_the_core_imports_torch_alone():
    """Outside the recipes, only torch and the standard library; a reader of files asks for its package when it meets one."""
    for path in (SRC / "inplace_abn").glob("*.py"):
        when_needed = {"checkpoints.py": {"safetensors"}, "cli.py": {"inplace_abn", "rich", "triton"}}.get(
            path.name, set()
        )
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level and node.module else []
            for name in names:
                top = name.split(".")[0]
                assert top in {"torch", *when_needed, *sys.stdlib_module_names}, f"{path} imports {name}"


def test_every_public_name_is_documented():
    for name in inplace_abn.__all__:
        if name != "ACTIVATIONS":
            assert getattr(inplace_abn, name).__doc__


@pytest.mark.alone
def test_import_is_quick():
    """At most 0.3 s on top of torch; the best of three, as other programs may run."""
    code = "import time, torch; t = time.perf_counter(); import inplace_abn; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(3)) <= 0.3


def test_import_starts_nothing_opens_nothing_writes_nothing():
    code = """
import json, sys, torch
events = []
def hook(event, args):
    started = ("subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "socket.", "os.mkdir", "os.rename")
    if event.startswith(started) or event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        events.append([event, str(args[0])])
sys.addaudithook(hook)
import inplace_abn
print(json.dumps(events))
"""
    assert json.loads(python(code, "-B").splitlines()[-1]) == []


def test_it_works_uninstalled():
    code = "import inplace_abn; print(inplace_abn.__version__, inplace_abn.__file__)"
    version, path = python(code, "-S", PYTHONPATH=f"{SRC}{os.pathsep}{Path(torch.__file__).parent.parent}").split()
    assert version == inplace_abn.__version__ and Path(path).is_relative_to(SRC)


def test_the_wheel_is_pure_python_and_installs_without_a_compiler(tmp_path):
    pytest.importorskip("hatchling")
    run = lambda *command, **env: subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT, env=env or None
    )
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"inplace_abn-{inplace_abn.__version__}-py3-none-any.whl"
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    assert "inplace_abn/py.typed" in names
    assert all(n.startswith("inplace_abn/") and n.endswith((".py", "py.typed")) for n in names)
    metadata = zipfile.ZipFile(wheel).read(f"inplace_abn-{inplace_abn.__version__}.dist-info/METADATA").decode()
    needs = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert needs == ["Requires-Dist: torch>=2.10"]

    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False)
    theirs = Path(sysconfig.get_path("purelib", "venv", {"base": str(fresh), "platbase": str(fresh)}))
    bare = {"PATH": str(fresh / "bin"), "HOME": str(tmp_path)}
    target = ("--python", str(fresh / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    run(sys.executable, "-m", "pip", *target, **bare)
    # The torch of this environment, without what else is there.
    (theirs / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = """
import inplace_abn, torch
inplace_abn.InPlaceABN(3)(torch.randn(2, 3, 4, 4, requires_grad=True) * 1).sum().backward()
print(inplace_abn.__file__)
"""
    done = run(str(fresh / "bin" / "python"), "-c", code, **bare)
    assert Path(done.stdout.strip()).is_relative_to(theirs)


def test_versions_agree():
    assert f"version: {inplace_abn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {inplace_abn.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_ci_runs_the_documented_command():
    assert "./test" in (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text()
    assert readme.index("./run") < 1500 and readme.index("./test") < 1500
    assert all(os.access(ROOT / name, os.X_OK) for name in ("run", "test", ".ci/run"))

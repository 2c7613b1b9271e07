"""The two commands rest on one set-up, made once: what make would run, without running it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORK = {"demo": "-m kvferry_demo.run --model llama", "test": "-m pytest -m 'not long'"}
INSTALL = "-m pip install --quiet --editable '.[sidecar,test]'"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone that was never set up."""
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy2(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "native", tmp_path / "native")
    return tmp_path


def plan(tree: Path, goal: str) -> str:
    """Return the commands that ``make GOAL`` would run there."""
    ours = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "--dry-run", goal, "MODEL=llama"],
        cwd=tree, env=ours, capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip


@pytest.mark.parametrize("goal", sorted(WORK))
def test_the_second_run_reuses_the_set_up(tree: Path, goal: str) -> None:
    first = plan(tree, goal)
    steps = ("-m venv .venv", INSTALL, "touch .venv/.installed", WORK[goal])
    places = [first.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)
    stamp = tree / ".venv" / ".installed"
    stamp.parent.mkdir()
    stamp.touch()
    assert WORK[goal] in plan(tree, goal)
    assert "pip" not in plan(tree, goal)
    native = next((tree / "native" / "src").rglob("*.cpp"))
    later_ns = stamp.stat().st_mtime_ns + 10**9
    os.utime(native, ns=(later_ns, later_ns))
    assert INSTALL in plan(tree, goal), "what is built is built again"


def test_the_gate_makes_check_and_test() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    assert "make check && make test" in text

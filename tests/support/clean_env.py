"""Clean virtual environments, as a user's or an image's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.sources import ROOT

# What an image is built from; the same list as in .dockerignore.
BUILD_INPUTS = (
    "connector",
    "sidecar",
    "native",
    "demo",
    "ui",
    "images/constraints.txt",
    "CMakeLists.txt",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "node_modules", "page")


def run(command: Sequence[str], cwd: Path, *, environment: Mapping[str, str] | None = None) -> str:
    """Run a command with a small environment; return its output. Raises AssertionError."""
    variables = [f"{name}={value}" for name, value in (environment or {}).items()]
    # No variable of a developer's shell may help a build.
    clean = ["env", "-u", "PYTHONPATH", "-u", "CFLAGS", "-u", "CXXFLAGS", "-u", "VIRTUAL_ENV"]
    done = subprocess.run(
        [*clean, *variables, *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def copy_sources(target: Path, names: Sequence[str] = BUILD_INPUTS) -> Path:
    """Copy what a build needs, without what earlier builds left."""
    for name in names:
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=_LEFT_OUT)
        else:
            shutil.copy2(source, copy)
    return target


def make_venv(target: Path) -> Path:
    """Make an environment without pip; return its folder of commands."""
    run([sys.executable, "-m", "venv", "--without-pip", str(target)], target.parent)
    return target / "bin"


def pip_into(bin_dir: Path, *arguments: str, cwd: Path = ROOT) -> None:
    """Install into another environment by the tests' own pip."""
    pip = [sys.executable, "-m", "pip", "--python", str(bin_dir / "python")]
    run([*pip, "install", "--quiet", *arguments], cwd)

"""The connector as a copied folder: what an init container does, without installing kvferry."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import kvferry_connector
import kvferry_demo
import pytest
from kvferry_demo.processes import in_environment
from support.engine import Texts, hit_of, running_engine
from support.sidecar import running_sidecar

pytestmark = pytest.mark.engine


def copy_package(module_file: str | None, target: Path) -> None:
    assert module_file is not None
    source = Path(module_file).parent
    shutil.copytree(
        source, target / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )


def test_engine_with_a_copied_connector(tmp_path: Path) -> None:
    """-S leaves site-packages' .pth files unread: the installed kvferry cannot be found."""
    copy_package(kvferry_connector.__file__, tmp_path)
    copy_package(kvferry_demo.__file__, tmp_path)  # the driver, which imports nothing of ours
    python = in_environment(
        {"PYTHONPATH": f"{tmp_path}:{sysconfig.get_path('purelib')}"},
        [sys.executable, "-S", "-m", "kvferry_demo.engine"],
    )
    tokens = Texts().take(1300)
    with running_sidecar() as sidecar:
        with running_engine(sidecar.run_dir) as installed:
            cold = installed.run(tokens)
        with running_engine(sidecar.run_dir, python=python) as engine:
            warm = engine.run(tokens)
            modules = engine.inspect(
                "kvferry_connector", "kvferry_connector.entry", "kvferry_sidecar", "kvferry_native"
            ).modules
    assert modules["kvferry_connector"] == str(tmp_path / "kvferry_connector" / "__init__.py")
    assert modules["kvferry_connector.entry"] == str(tmp_path / "kvferry_connector" / "entry.py")
    assert modules["kvferry_sidecar"] == ""
    assert modules["kvferry_native"] == ""
    assert warm.hit_tokens == hit_of(tokens)
    assert warm.output == cold.output

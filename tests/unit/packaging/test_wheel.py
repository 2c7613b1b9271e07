"""The wheel is what users install: packages, dependencies, extras, the console script."""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # What it holds is looked at, nothing of it runs: compiled without optimisation, in little time.
    build = ["-C", f"build-dir={folder}/build", "-C", "cmake.build-type=Debug"]
    build += ["--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, *build, str(ROOT)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("kvferry-*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_it_holds_the_packages_and_nothing_of_the_tree(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}
    assert tops == {"kvferry_connector", "kvferry_sidecar", "kvferry_native", "kvferry_demo"}
    names = wheel.namelist()
    assert any(n.startswith("kvferry_native/_native") and n.endswith(".so") for n in names)
    assert {f"{top}/py.typed" for top in tops - {"kvferry_demo"}} <= set(names)
    assert "kvferry_native/_native.pyi" in names


def test_the_base_install_brings_only_what_an_engine_image_has(wheel: zipfile.ZipFile) -> None:
    requires = metadata(wheel).get_all("Requires-Dist") or []
    base = {r.split(";")[0].split(">")[0].strip() for r in requires if "extra ==" not in r}
    assert base == {"msgspec", "pyzmq", "numpy"}
    extras = set(metadata(wheel).get_all("Provides-Extra") or [])
    assert {"sidecar", "cuda12", "cuda13", "test"} <= extras
    assert metadata(wheel)["Requires-Python"] == ">=3.11"


def test_it_brings_the_command(wheel: zipfile.ZipFile) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "kvferry = kvferry_sidecar.cli:main" in text.replace("kvferry=", "kvferry = ")
    assert "vllm.general_plugins" not in text  # installing kvferry changes no engine by itself


def test_importing_the_connector_loads_nothing_else() -> None:
    script = (
        "import sys, kvferry_connector\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in "
        "('cupy', 'torch', 'vllm', 'kvferry_sidecar', 'kvferry_native', 'kvferry_demo')]\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr

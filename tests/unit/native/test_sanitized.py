"""The native tests under ASan with UBSan, and under TSan; one is stepped through, without.

The builds stay in build/native-<sanitizer>: the first run takes minutes, later ones seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STEPPED = "test_pool_steps"
TESTS = sorted({path.stem for path in (ROOT / "native/tests").glob("test_*.cpp")} - {STEPPED})
FLAGS = "-O1 -g1"  # a build takes half the time of one with -O2 -g
SANITIZERS = {"asan": "address,undefined", "tsan": "thread"}


def run(*command: str, deadline_s: float) -> None:
    """Run a command of ours; its whole output is the failure's text."""
    # Importing vLLM for CPU in this process sets LD_PRELOAD, and ASan must come first.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout.decode(errors='replace')}"


def build_of(sanitizer: str, *targets: str) -> Path:
    """Build these targets (none: all) and return the folder of the build."""
    folder = ROOT / "build" / f"native-{sanitizer}"
    cmake = str(Path(sys.executable).with_name("cmake"))  # of the `test` extra, or the system's
    cmake = cmake if Path(cmake).exists() else "cmake"
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE="]
    options = [f"-DCMAKE_CXX_FLAGS={FLAGS}", "-DKVFERRY_PYTHON=OFF", "-DKVFERRY_TESTS=ON"]
    run(*configure, *options, f"-DKVFERRY_SANITIZE={SANITIZERS[sanitizer]}", deadline_s=120)
    chosen = ["--target", *targets] if targets else []
    run(cmake, "--build", str(folder), "--parallel", "2", *chosen, deadline_s=1200)
    return folder / "native"


@pytest.fixture(scope="module", params=sorted(SANITIZERS))
def build(request: pytest.FixtureRequest) -> Path:
    return build_of(request.param)


@pytest.mark.timeout(1500)  # the first test of a sanitizer builds everything
@pytest.mark.parametrize("name", TESTS)
def test_under_sanitizer(build: Path, name: str) -> None:
    run(str(build / name), deadline_s=300)


@pytest.mark.timeout(1500)
def test_every_state_that_a_kill_inside_an_operation_of_the_pool_leaves() -> None:
    run(str(build_of("asan", STEPPED) / STEPPED), deadline_s=300)

"""The whole sidecar with a stand-in engine: save, kill both, load with other processes, compare."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu.ipc import need_sharing
from gpu.runner import Sizes
from support.sidecar import SidecarUnderTest, running_sidecar

from bench.common import at_most

TESTS = Path(__file__).parents[1]
RECORDING = Path(__file__).with_name("recording.json")
GPU = ("--set", "copy.gpu=true")


class StandIn:
    """The engine's process (gpu/engine.py)."""

    def __init__(self, run_dir: Path, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpu.engine", str(run_dir), kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS,
        )  # fmt: skip
        self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next line. Raises EOFError when the process ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the stand-in engine ended with code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def do(self, part: str) -> dict[str, Any]:
        """Play a part of the recording."""
        assert self.process.stdin is not None
        self.process.stdin.write(part + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and reap; what a fake GPU's memory was made of goes too."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
        for left in Path("/dev/shm").glob(f"kvferry-fake-gpu-{self.process.pid}-*"):
            left.unlink()


@contextmanager
def stand_in(run_dir: Path, kind: str) -> Iterator[StandIn]:
    """Yield an engine that serves; it is killed at the end."""
    engine = StandIn(run_dir, kind)
    try:
        yield engine
    finally:
        engine.kill()


def save_kill_load(kind: str, pool_bytes: int = 64 << 20) -> dict[str, Any]:
    """Save with one engine, kill it and the sidecar, load with another of each; returns figures.

    Before that the sidecar alone is killed, and the engine attaches to the next one.
    Raises AssertionError for a hit or a byte that is not as recorded.
    """
    flags = () if kind == "cpu" else GPU
    with running_sidecar(pool_bytes=pool_bytes, flags=flags) as sidecar:
        with stand_in(sidecar.run_dir, kind) as engine:
            saved = engine.do("first")
            killed_s = time.monotonic()
            sidecar.kill(signal.SIGKILL)
            sidecar.restart()
            served_s = time.monotonic() - killed_s
            engine.do("again")
            again_s = time.monotonic() - killed_s
        sidecar.kill(signal.SIGKILL)
        sidecar.restart()
        with stand_in(sidecar.run_dir, kind) as engine:
            loaded = engine.do("second")
            check(loaded)
        status = settled(sidecar)
    return {
        "save_s": saved["seconds"], "load_s": loaded["seconds"], "sidecar_serves_s": served_s,
        "counts": loaded["counts"], "loaded_bytes": status["pipeline"]["ledger"]["loaded_bytes"],
        "gpus": status["gpus"],
        "goals": [at_most("attached again after SIGKILL of the sidecar", again_s, "s", 2)],
    }  # fmt: skip


def on_gpu(sizes: Sizes) -> dict[str, Any]:
    """The step of `make gpu`."""
    need_sharing()
    return save_kill_load("fake" if sizes.small else "cuda")


def settled(sidecar: SidecarUnderTest) -> dict[str, Any]:
    """Return the sidecar's status, in whose books nothing failed."""
    status = sidecar.wait_idle()
    ledger = status["pipeline"]["ledger"]
    assert ledger["failed"] == ledger["cancelled"] == 0, ledger
    return status


def check(loaded: dict[str, Any]) -> None:
    """Compare what was loaded with the recording."""
    recorded = json.loads(RECORDING.read_bytes())["hits"]  # gpu.replay would need vLLM's names
    assert loaded["hits"] == {ask: recorded[ask] for ask in loaded["hits"]}, loaded["hits"]
    counts = loaded["counts"]
    assert not [name for name in counts if "wrong" in name], counts
    assert not counts.get("full untouched"), counts
    for kind in ("full", "swa", "mamba"):
        assert counts.get(f"{kind} right"), f"nothing of kind {kind} was loaded: {counts}"

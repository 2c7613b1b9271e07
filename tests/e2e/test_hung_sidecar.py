"""A sidecar that hangs (SIGSTOP) beside vLLM's own engine process: nothing waits for ever."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from kvferry_demo.processes import ENGINE_ENVIRONMENT, Child, in_environment
from support.engine import Texts, model_dir
from support.group import GroupChild
from support.logs import watch_log
from support.sidecar import SidecarUnderTest, running_sidecar
from support.waiting import wait_until

pytestmark = pytest.mark.engine

AWAKE_MS_MAX = 4_000
ENDS_S_MAX = AWAKE_MS_MAX / 1000 + 120  # on a busy machine


@contextmanager
def deployment(sidecar: SidecarUnderTest, log: Path) -> Iterator[Child]:
    """vLLM's front end and one engine core, attached."""
    environment = {
        **ENGINE_ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, "-m", "support.dp_child", str(model_dir("llama"))]
    command += [str(sidecar.run_dir), json.dumps({"awake_ms_max": AWAKE_MS_MAX})]
    with (
        watch_log("deployment", log),
        GroupChild(in_environment(environment, command), log, pipes=True) as child,
    ):
        assert child.process.stdout is not None
        assert child.process.stdout.readline() == b"{}\n", child.tail()
        wait_until(lambda: any(one["ready"] for one in sidecar.status()["sessions"]), "ready")
        yield child


def say(child: Child, request: dict[str, Any]) -> list[int]:
    ask(child, request)
    assert child.process.stdout is not None
    line = child.process.stdout.readline()
    assert line, child.tail()
    output: list[int] = json.loads(line)["output"]
    return output


def ask(child: Child, request: dict[str, Any]) -> None:
    assert child.process.stdin is not None
    child.process.stdin.write(json.dumps(request).encode() + b"\n")
    child.process.stdin.flush()


def engine_core(child: Child) -> int:
    """Return the pid of the one engine core: it attached, and is not the front end."""
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    (core,) = [int(pid) for pid in children if b"EngineCore" in _command(int(pid))]
    return core


def wait_for_end(core: int, child: Child) -> None:
    """Wait until ``core`` is gone; one that hangs says where (SIGABRT: all threads' stacks)."""
    workers = Path(f"/proc/{core}/task/{core}/children").read_text().split()
    try:
        wait_until(lambda: not Path(f"/proc/{core}").exists(), "the core ends", ENDS_S_MAX)
    except AssertionError as error:
        for pid in (core, *map(int, workers)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        wait_until(lambda: not Path(f"/proc/{core}").exists(), "its stacks are written")
        raise AssertionError(f"{error}; it was here:\n{child.tail(600)}") from None


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/comm").read_bytes()


def test_pause_and_sigterm_end_although_the_sidecar_hangs(tmp_path: Path) -> None:
    """With saves in flight: requests are computed, a pause completes, and SIGTERM ends the core."""
    texts = Texts()
    with running_sidecar() as sidecar, deployment(sidecar, tmp_path / "vllm.log") as child:
        core = engine_core(child)
        say(child, {"rank": 0, "tokens": texts.take(900)})
        sidecar.wait_idle()
        os.kill(sidecar.process.pid, signal.SIGSTOP)
        assert len(say(child, {"rank": 0, "tokens": texts.take(1200)})) == 8
        started_s = time.monotonic()
        say(child, {"pause": "abort"})
        assert time.monotonic() - started_s < ENDS_S_MAX
        assert len(say(child, {"rank": 0, "tokens": texts.take(700)})) == 8
        os.kill(sidecar.process.pid, signal.SIGCONT)
        sidecar.wait_idle()
        tokens = texts.take(1000)
        say(child, {"rank": 0, "tokens": tokens})
        assert sidecar.wait_idle()["pipeline"]["ledger"]["saved_bytes"] > 0
        os.kill(sidecar.process.pid, signal.SIGSTOP)
        say(child, {"rank": 0, "tokens": texts.take(1300)})
        os.kill(core, signal.SIGTERM)
        # Python runs a handler between two instructions of the main thread. One that the signal
        # meets on its way into an idle core's endless wait sleeps on with it: the next request
        # wakes it, whatever becomes of that.
        ask(child, {"rank": 0, "tokens": texts.take(100)})
        wait_for_end(core, child)
        os.kill(sidecar.process.pid, signal.SIGCONT)

"""The watchdog in the real sidecar: a hang ends the process, standing still does not."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from kvferry_demo.processes import Child, in_environment, new_pool_name, unlink_pool
from support.client_half import client_engine
from support.logs import watch_log
from support.sidecar import running_sidecar
from support.waiting import wait_until

STALL_MS = 2_000
STALLED = 7


@pytest.mark.parametrize("kind", ["loop", "gil"])
def test_a_loop_that_hangs_ends_the_process_with_its_stacks(kind: str) -> None:
    with running_sidecar(pool_bytes=16 << 20) as former:  # only for its folders
        former.process.stop()
        log, pool = former.log.with_name("stuck.log"), new_pool_name("test")
        flags = ["--run-dir", str(former.run_dir), "--pool-bytes", "16MiB"]
        flags += [
            "--http-listen",
            "",
            "--set",
            f"tiers.host.name={pool}",
            "--set",
            f"limits.stall_ms_max={STALL_MS}",
        ]
        command = [sys.executable, "-m", "support.stuck_child", kind, *flags]
        environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
        try:
            with watch_log("stuck", log), Child(in_environment(environment, command), log) as child:
                wait_until(lambda: " serving" in log.read_text(), "it serves")
                with client_engine(former.run_dir) as engine:
                    engine.put("kept")
                    epoch = engine.wait_ready()
                    os.kill(child.pid, signal.SIGUSR1)
                    assert child.process.wait(STALL_MS / 1000 + 30) == STALLED
                    dead = engine.worker_half.client.is_dead
                    wait_until(lambda: dead(epoch), "its end is proof for engines")
                text = log.read_text()
                assert f"no progress for {STALL_MS} ms" in text
                assert f"hang_{kind}" in text, "the stack says where"
        finally:
            unlink_pool(pool)


def test_a_stopped_process_is_no_stall() -> None:
    flags = ["--set", f"limits.stall_ms_max={STALL_MS}"]
    with (
        running_sidecar(pool_bytes=16 << 20, flags=flags) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        engine.put("kept")
        epoch = engine.wait_ready()
        os.kill(sidecar.process.pid, signal.SIGSTOP)
        end_s = time.monotonic() + 2 * STALL_MS / 1000  # the passing of time is the test
        wait_until(lambda: time.monotonic() > end_s, "long enough", every_s=0.05)
        os.kill(sidecar.process.pid, signal.SIGCONT)
        assert engine.get("kept") == 48
        assert engine.wait_ready() == epoch
        turns = sidecar.status()["loop"]["turns"]
        wait_until(lambda: sidecar.status()["loop"]["turns"] > turns + 3, "it goes on")

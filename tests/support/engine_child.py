"""A worker half in a process of its own: ``python engine_child.py RUN_DIR LIFE INSTANCE [gpu]``.

Attaches as rank 0 (with memory of the fake GPU where a fourth argument says ``gpu``), then obeys
lines on stdin: ``save PROMPT`` puts a prompt, ``load ADMISSION`` submits a load of 3 blocks that
waits for a step which never comes, ``copy ADMISSION`` one that waits for none, ``fork`` leaves a
child that holds everything, ``again`` attaches a second time. Answers with one line each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvferry_connector.wire.attach import Ready
from kvferry_connector.wire.hot import JobState, JobStatus
from support.hot_engine import HotEngine
from support.raw_half import KvMemory, RawHalf


class WorkerChild:
    """The process, seen from the test."""

    def __init__(
        self,
        run_dir: Path,
        life: bytes,
        *,
        instance: str = "one",
        prefix: Sequence[str] = (),
        gpu: bool = False,
    ) -> None:
        child = [sys.executable, "-m", "support.engine_child", str(run_dir), life.hex(), instance]
        child += ["gpu"] * gpu
        environment = dict(os.environ)
        if gpu:
            from support.fake_cuda import as_driver

            environment |= as_driver()
        self.process = subprocess.Popen(
            [*prefix, *child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[1],
        )

    def do(self, command: str) -> str:
        """Give a command (or "" for none) and return the next line of its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if command:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.process.kill()
        self.process.communicate()


def main() -> None:
    run_dir, life = Path(sys.argv[1]), bytes.fromhex(sys.argv[2])
    memory = _gpu_memory() if "gpu" in sys.argv[4:] else KvMemory()

    def attached() -> RawHalf:
        half = RawHalf(run_dir, 0, instance_id=sys.argv[3], memory=memory)
        half.attach()
        half.register(memory.registration(0, 1))
        print("registered", flush=True)
        return half

    worker = attached()
    worker.stream.expect(Ready)
    engine = HotEngine(worker, worker, memory, life)
    for line in sys.stdin:
        verb, _, what = line.strip().partition(" ")
        if verb == "save":
            engine.put(what)
            print("saved", flush=True)
        elif verb in ("load", "copy"):
            step = 99 if verb == "load" else 0
            job = engine.submit(engine.load_job(int(what), (4, 5, 6), step=step))
            worker.send(JobStatus(job))
            print(worker.receive(JobState).state, flush=True)
        elif verb == "fork":
            heir = os.fork()
            if not heir:
                signal.pause()
                os._exit(0)
            print(heir, flush=True)
        elif verb == "again":
            attached()


def _gpu_memory() -> KvMemory:
    from support.fake_cuda import FakeGpu, GpuKvMemory  # builds the driver: seconds

    return GpuKvMemory(FakeGpu())


if __name__ == "__main__":
    main()

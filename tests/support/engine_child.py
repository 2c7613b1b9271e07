"""A worker half in a process of its own, to be killed: ``python engine_child.py RUN_DIR LIFE``.

Attaches as rank 0, then obeys lines on stdin: ``save PROMPT`` puts a prompt, ``load ADMISSION``
submits a load of 3 blocks that waits for a step which never comes. Answers with one line each.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvferry_connector.wire.attach import Ready
from kvferry_connector.wire.hot import JobState, JobStatus
from support.hot_engine import HotEngine
from support.raw_half import KvMemory, RawHalf


class WorkerChild:
    """The process, seen from the test."""

    def __init__(self, run_dir: Path, life: bytes) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.engine_child", str(run_dir), life.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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
    memory = KvMemory()
    worker = RawHalf(run_dir, 0, memory=memory)
    worker.attach()
    worker.register(memory.registration(0, 1))
    print("registered", flush=True)
    worker.stream.expect(Ready)
    engine = HotEngine(worker, worker, memory, life)
    for line in sys.stdin:
        verb, _, what = line.strip().partition(" ")
        if verb == "save":
            engine.put(what)
            print("saved", flush=True)
        elif verb == "load":
            job = engine.submit(engine.load_job(int(what), (4, 5, 6), step=99))
            worker.send(JobStatus(job))
            print(worker.receive(JobState).state, flush=True)


if __name__ == "__main__":
    main()

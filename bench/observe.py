"""What operators see costs the sidecar, in instructions of its control loop (by callgrind).

Each round is one request that hits and loads and one that misses and saves, of 1,024 tokens. The
whole is what the loop's thread of a real `kvferry serve` executes for a request, spoken to by raw
halves over the real sockets. What is seen costs the difference between two runs of the pipeline in
one process (bench/bed.py), where nothing depends on time: with journal, records, curve and
histograms, and without. The loop's own histograms and a reading of everything once a second are
added. Instructions of the kernel are not counted, so the share of the time is less.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvferry_demo.processes import Child, in_environment, new_pool_name, unlink_pool
from kvferry_sidecar.cli.api import Api
from kvferry_sidecar.errors import NoSidecarError

import bench.halves as halves
from bench.common import Figure, at_most, bench_main, cpu_s, plain

CHUNKS = 64  # of a request: 1,024 tokens
POOL_BYTES = 16 << 20
WARM_ROUNDS = 150  # then pool and records are full
OBSERVED = 5000
START_S = 300.0  # under valgrind
GOAL_PERCENT = 2.0
CHILD = (sys.executable, "-m", "bench.observe_child")


def run(quick: bool) -> dict[str, object]:
    """Return the share of what operators see, in percent of the loop's instructions."""
    if shutil.which("vgdb") is None:
        raise RuntimeError("valgrind is not installed (Debian package valgrind): it counts")
    rounds = 20 if quick else 200
    pipeline = {mode: _alone(mode, rounds) for mode in ("unseen", "seen", "no-samples", "reading")}
    loop = _loop(rounds)
    reading = pipeline["reading"] - pipeline["seen"]  # of one per request
    histograms = 2 * sum(_alone(mode, OBSERVED) * loop[mode] for mode in ("turns", "messages"))
    each = pipeline["seen"] - pipeline["unseen"]
    parts = {
        "journal, records, histograms of jobs": pipeline["no-samples"] - pipeline["unseen"],
        "capacity curve": pipeline["seen"] - pipeline["no-samples"],
        "histograms of turns and messages": histograms,
        "a reading once a second": reading * loop["cpu_s"],
    }
    share = 100 * (each + histograms + reading * loop["cpu_s"]) / loop["instructions"]
    figures: list[Figure] = [
        at_most("what operators see", share, "% of the loop's instructions", GOAL_PERCENT),
        plain("the loop", loop["instructions"], "instructions per request"),
        *(plain(name, count, "instructions per request") for name, count in parts.items()),
    ]
    return {"figures": figures, "rounds": rounds}


# --- the pipeline alone ---------------------------------------------------------------------------


def _alone(mode: str, rounds: int) -> float:
    """Return instructions per request of the pipeline alone, which does the same every time."""
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        counter = Counter(Path(folder))
        command = counter.command([*CHILD, mode, str(WARM_ROUNDS), str(rounds)])
        environment = in_environment({"PYTHONHASHSEED": "0"}, command)
        with Child(environment, Path(folder) / "log", pipes=True) as child:

            def step() -> None:
                """Have the child take its next step, and wait for its end."""
                assert child.process.stdin is not None
                assert child.process.stdout is not None
                child.process.stdin.write(b"go\n")
                child.process.stdin.flush()
                if child.process.stdout.readline() != b"done\n":
                    raise RuntimeError(f"{mode}: {child.tail()}")

            step()
            return counter.counted(child.pid, step) / rounds / 2


# --- the loop -------------------------------------------------------------------------------------


def _loop(rounds: int) -> dict[str, float]:
    """Return what a real sidecar's loop does per request: instructions, values it observes, CPU.

    CPU is measured on another one, which nobody counts.
    """
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        counter = Counter(Path(folder))
        with _Serving(Path(folder), counter.command) as load:
            load.rounds(WARM_ROUNDS // 10)
            before = load.observed()
            count = counter.counted(load.pid, lambda: load.rounds(rounds))
            after = load.observed()
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder, _Serving(Path(folder), list) as load:
        load.rounds(WARM_ROUNDS)
        before_s = cpu_s(load.pid)
        load.rounds(rounds)
        used_s = cpu_s(load.pid) - before_s
    each = {
        "instructions": count,
        "turns": after[0] - before[0],
        "messages": after[1] - before[1],
        "cpu_s": used_s,
    }
    return {name: value / rounds / 2 for name, value in each.items()}


class _Serving:
    """A sidecar, and one engine at it."""

    def __init__(self, folder: Path, counted: Callable[[list[str]], list[str]]) -> None:
        self._run_dir = folder / "run"
        self._run_dir.mkdir(mode=0o700)
        self._pool = new_pool_name("bench")
        command = counted([
            *CHILD, "serve", "--run-dir", str(self._run_dir), "--pool-name", self._pool,
            "--pool-bytes", str(POOL_BYTES), "--http-listen", "",
        ])  # fmt: skip
        self._child = Child(in_environment({}, command), folder / "log")
        self._seed = 0

    def __enter__(self) -> _Serving:
        self._child.__enter__()
        try:
            halves.wait_until(self._answers, "the sidecar answers", START_S)
        except BaseException:
            self._end()
            raise
        self._engine = halves.RawEngine(self._run_dir, groups=1, ranks=1, chunks=CHUNKS)
        self._known = halves.hashes(CHUNKS, seed=0)
        self._engine.save(self._known)
        return self

    def __exit__(self, *what: object) -> None:
        self._engine.close()
        self._end()

    def _end(self) -> None:
        self._child.__exit__(None, None, None)
        unlink_pool(self._pool)

    @property
    def pid(self) -> int:
        return self._child.pid

    def rounds(self, count: int) -> None:
        """One request that hits and loads, one that misses and saves, so many times."""
        engine, tokens = self._engine, CHUNKS * halves.BLOCK_TOKENS
        for _ in range(count):
            admission, _ = engine.probe(self._known)
            if engine.ask(admission, tokens).hit_tokens != tokens:
                raise RuntimeError("no hit")
            engine.load(admission, tokens)
            engine.release(admission)
            self._seed += 1
            fresh = halves.hashes(CHUNKS, seed=self._seed)
            admission, _ = engine.probe(fresh)
            engine.save(fresh)
            engine.release(admission)

    def observed(self) -> tuple[int, int]:
        """How many values the histograms of turns and of messages have."""
        loop = Api(self._run_dir).get("status")["loop"]
        messages = sum(sum(one["counts"]) for one in loop["message_seconds"].values())
        return sum(loop["turn_seconds"]["counts"]), messages

    def _answers(self) -> bool:
        try:
            return bool(Api(self._run_dir).get("status"))
        except NoSidecarError:
            return False


# --- counting -------------------------------------------------------------------------------------


class Counter:
    """Callgrind over a process: the instructions of its first thread, in user space."""

    def __init__(self, folder: Path) -> None:
        self._out = folder / "counted"

    def command(self, command: list[str]) -> list[str]:
        """Return the command that runs ``command`` so that it can be counted."""
        return [
            "valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no",
            "--separate-threads=yes", f"--callgrind-out-file={self._out}", *command,
        ]  # fmt: skip

    def counted(self, pid: int, work: Callable[[], None]) -> int:
        """Return what ``work`` makes the process execute. Raises RuntimeError."""
        self._say(pid, "instrumentation on")
        self._say(pid, "zero")
        work()
        self._say(pid, "dump")
        self._say(pid, "instrumentation off")
        text = Path(f"{self._out}.1-01").read_text()
        found = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
        if found is None:
            raise RuntimeError("callgrind has written no total")
        return int(found[1])

    def _say(self, pid: int, words: str) -> None:
        subprocess.run(["vgdb", f"--pid={pid}", *words.split()], check=True, capture_output=True)


if __name__ == "__main__":
    bench_main(__doc__, run)

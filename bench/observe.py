"""What operators see costs the sidecar: CPU of `kvferry serve` with and without it.

Two real sidecars, spoken to by raw halves over the real sockets, turn by turn; each round is one
request that hits and loads and one that misses and saves. The figure is the median of the ratios of
two turns that follow each other. Without: the journal keeps nothing and histograms count nothing.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from kvferry_demo.processes import Child, in_environment, new_pool_name, unlink_pool
from kvferry_sidecar import pipeline
from kvferry_sidecar.cli.api import Api
from kvferry_sidecar.errors import NoSidecarError
from kvferry_sidecar.outcomes.histogram import Histogram
from kvferry_sidecar.stages.journal import Journal

import bench.halves as halves
from bench.common import Figure, at_most, bench_main, cpu_s, plain

CHUNKS = 64  # of a request: 1,024 tokens
POOL_BYTES = 16 << 20
ROUNDS = 10  # of a turn
GOAL_PERCENT = 2.0
MODES = ("unseen", "seen")


def run(quick: bool) -> dict[str, object]:
    """Return the share of what operators see, in percent of the sidecar's CPU under this load."""
    turns = 20 if quick else 300
    with contextlib.ExitStack() as stack:
        loads = {mode: Load(*stack.enter_context(_serving(mode))) for mode in MODES}
        spent: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(turns + 2):
            for mode in MODES:
                spent[mode].append(loads[mode].turn())
        for load in loads.values():
            load.engine.close()
    usual = {mode: median(seconds) / ROUNDS / 2 * 1e6 for mode, seconds in spent.items()}
    pairs = zip(spent["seen"], spent["unseen"], strict=True)
    percent = (median(seen / unseen for seen, unseen in pairs) - 1) * 100
    figures: list[Figure] = [
        at_most("journal, records and histograms", percent, "% of CPU", GOAL_PERCENT),
        *(plain(f"CPU, {mode}", us, "us per request") for mode, us in usual.items()),
    ]
    return {"figures": figures, "turns": turns, "rounds": ROUNDS}


@contextmanager
def _serving(mode: str) -> Iterator[tuple[Path, int]]:
    """Yield run directory and process id of a sidecar."""
    pool = new_pool_name("bench")
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir(mode=0o700)
        command = [
            *(sys.executable, "-m", "bench.observe", mode, "serve", "--run-dir", str(run_dir)),
            *("--pool-name", pool, "--pool-bytes", str(POOL_BYTES), "--http-listen", ""),
        ]
        try:
            with Child(in_environment({}, command), Path(folder) / "log") as child:
                halves.wait_until(lambda: _answers(run_dir), "the sidecar answers")
                yield run_dir, child.pid
        finally:
            unlink_pool(pool)


def _answers(run_dir: Path) -> bool:
    try:
        return bool(Api(run_dir).get("status"))
    except NoSidecarError:
        return False


class Load:
    """One engine at one sidecar."""

    def __init__(self, run_dir: Path, pid: int) -> None:
        self._pid = pid
        self._seed = 1
        self.engine = halves.RawEngine(run_dir, groups=1, ranks=1, chunks=CHUNKS)
        self._known = halves.hashes(CHUNKS, seed=0)
        self.engine.save(self._known)

    def turn(self) -> float:
        """Return the sidecar's CPU seconds for ROUNDS rounds."""
        before_s = cpu_s(self._pid)
        for _ in range(ROUNDS):
            self._round()
        return cpu_s(self._pid) - before_s

    def _round(self) -> None:
        engine, tokens = self.engine, CHUNKS * halves.BLOCK_TOKENS
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


class Nothing(Journal):
    """A journal that keeps nothing."""

    def _nothing(self, *_: object, **__: object) -> None: ...

    probed = hinted = answered = refused = unasked = released = opened = settled = _nothing


def _serve(mode: str) -> int:
    from kvferry_sidecar.cli import main  # noqa: PLC0415 - in the sidecar's process only

    if mode == "unseen":
        pipeline.Journal = Nothing  # what is measured
        Histogram.observe = lambda *_: None
    return main(sys.argv[2:])


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in MODES:
        sys.exit(_serve(sys.argv[1]))
    bench_main(__doc__, run)

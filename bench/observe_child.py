"""What bench/observe.py counts: `kvferry serve`, or a pipeline with and without what is seen."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

from kvferry_sidecar import pipeline
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.outcomes.histogram import SECONDS, Histogram
from kvferry_sidecar.outcomes.ledger import Ledger
from kvferry_sidecar.stages import journal
from kvferry_sidecar.stages.curve import Curve
from kvferry_sidecar.stages.journal import Journal

import bench.halves as halves
from bench.bed import NOW_S, Bed, Engine, fill, pool_of

CHUNKS = 64
KEYS_MAX = 1 << 16
RECORDS = 256  # full after the first rounds, as the pool is from the start


def main(mode: str, words: list[str]) -> int:
    """Serve, or do rounds of one mode, a step whenever a line comes."""
    if mode == "serve":
        return _serve(words)
    warm, rounds = map(int, words)
    work = _work(mode)
    for count in (warm, rounds):
        sys.stdin.readline()
        work(count)
        print("done", flush=True)
    sys.stdin.readline()
    return 0


def _serve(words: list[str]) -> int:
    from kvferry_sidecar.cli import main as serve  # noqa: PLC0415 - in this process only

    os.pidfd_open = _own_pidfd
    return serve(["serve", *words])


def _own_pidfd(pid: int, flags: int = 0) -> int:
    """Stand for pidfd_open, which valgrind 3.19 does not know."""
    if pid != os.getpid() or flags:
        raise OSError("only of this process")
    one, other = socket.socketpair()
    with one, other:
        return one.getsockopt(socket.SOL_SOCKET, 77)  # SO_PEERPIDFD


def _work(mode: str) -> Callable[[int], None]:
    """Return what does so many rounds."""
    if mode == "turns":
        return _observing
    if mode == "messages":
        return _timing
    if mode == "unseen":
        pipeline.Journal = _Nothing  # what is measured
        _silence(Ledger, "_observe")
    if mode in ("unseen", "no-samples"):
        journal.Curve = _NoCurve  # what is measured
    return _Rounds(with_reading=mode == "reading").do


def _silence(kind: type, *names: str) -> None:
    for name in names:
        setattr(kind, name, _nothing)


def _nothing(*_: object, **__: object) -> None: ...


class _NoCurve(Curve):
    """A curve that counts nothing."""

    def __init__(self, pool_bytes: int) -> None:
        super().__init__(pool_bytes)
        self.looked_up = self.stored = _nothing


class _Nothing(Journal):
    """A journal that keeps nothing."""

    probed = declined = hinted = held = answered = refused = unasked = _nothing
    used_locally = stored = released = gone = opened = settled = _nothing


def _observing(rounds: int) -> None:
    observe = Histogram(SECONDS).observe
    for _ in range(rounds):
        observe(2e-4)


def _timing(rounds: int) -> None:
    histogram = Histogram(SECONDS)
    timer = histogram.begin, histogram.end
    for _ in range(rounds):
        timer[0]()
        timer[1]()


class _Rounds:
    """The requests of bench/observe.py, of a pipeline alone."""

    def __init__(self, *, with_reading: bool) -> None:
        pool = pool_of(KEYS_MAX)
        fill(pool, KEYS_MAX)
        self._bed, self._engine = Bed(pool, Limits(records_max=RECORDS)), Engine(0, 1)
        self._with_reading = with_reading
        self._known = halves.hashes(CHUNKS, seed=0)
        self._bed.save(self._engine, self._known)
        self._seed = 0

    def do(self, rounds: int) -> None:
        """Do so many rounds."""
        bed, engine, tokens = self._bed, self._engine, CHUNKS * halves.BLOCK_TOKENS
        for _ in range(rounds):
            admission = bed.probe(engine, self._known)
            if bed.ask(engine, admission, tokens) != tokens:
                raise RuntimeError("no hit")
            bed.load(engine, admission, tokens)
            bed.release(engine, admission)
            self._seed += 1
            fresh = halves.hashes(CHUNKS, seed=self._seed)
            admission = bed.probe(engine, fresh)
            bed.save(engine, fresh, admission)
            bed.release(engine, admission)
            if self._with_reading:
                for _ in range(2):
                    bed.pipeline.snapshot(NOW_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

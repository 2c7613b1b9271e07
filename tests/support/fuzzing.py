"""A real sidecar to attack, and what must hold of it after every attack."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from kvferry_connector.wire.attach import ToPeer
from support.books import descriptors, read_status, resident_bytes, wait_settled
from support.hot_engine import HotEngine
from support.raw_half import KvMemory, RawStream, attach_pair
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags
from support.waiting import wait_until

# Small, so that an attack reaches them within seconds.
LIMITS = {
    "tombstones_max": 512,
    "jobs_max": 64,
    "fence_ms_max": 30_000,
    "hello_ms_max": 6_000,
    "lease_idle_ms_max": 5_000,
    "outcomes_unacked_max": 256,
    "admissions_max": 1_024,
}
SHORT_MAX = 1_000  # examples of the normal gate are fewer
GROWTH_BYTES_MAX = 48 << 20  # of one whole module's attacks: buffers of malloc and ZeroMQ


def gates(short: int, long: int) -> list[object]:
    """Return a test's size in the normal gate and in the long one."""
    return [pytest.param(short, id="short"), pytest.param(long, id="long", marks=pytest.mark.long)]


def bounded(examples: int) -> settings:
    """Return the settings of one gate: the short one always tries the same examples."""
    return settings(
        max_examples=examples,
        derandomize=examples < SHORT_MAX,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def stream_to(target: Target) -> Iterator[RawStream]:
    """Yield an attach stream that has said nothing yet."""
    stream = RawStream(target.run_dir)
    try:
        yield stream
    finally:
        stream.close()


def ended(stream: RawStream) -> list[ToPeer]:
    """Return what came until the sidecar closed the stream. TimeoutError if it never does."""
    found = []
    while (message := stream.receive()) is not None:
        found.append(message)
    return found


class Target:
    """The sidecar, and the engine that behaves."""

    def __init__(self, sidecar: SidecarUnderTest) -> None:
        self.run_dir: Path = sidecar.run_dir
        self.pid = sidecar.process.pid
        self.limits = LIMITS
        self._numbers = itertools.count(1)
        self._memory, life = KvMemory(), os.urandom(16)
        scheduler, worker = attach_pair(self.run_dir, self._memory, life, "witness")
        self._halves = (scheduler, worker)
        self._witness = HotEngine(scheduler, worker, self._memory, life)
        self._serves()
        status = wait_settled(self.run_dir)
        self.accepted = status["pipeline"]["ledger"]["accepted"]
        self._epoch = status["epoch"]
        self._base_fds = descriptors(self.pid)
        self._base_bytes = resident_bytes(self.pid)

    def new_name(self) -> str:
        """Return an engine id that nobody had."""
        return f"offender-{next(self._numbers)}"

    def status(self) -> dict[str, Any]:
        """Return the status document."""
        return read_status(self.run_dir)

    def refused_frames(self, reason: str) -> int:
        """Return how many frames were refused for this reason."""
        return int(self.status()["loop"]["frames_refused"].get(reason, 0))

    def has_refused(self, reason: str, count: int) -> bool:
        """Whether exactly so many frames were refused for this reason since the start."""
        return self.refused_frames(reason) == count

    def _serves(self) -> None:
        prompt = f"witness-{next(self._numbers)}"
        self._witness.put(prompt)
        assert self._witness.get(prompt) == 48
        assert self._witness.get(f"{prompt}, never saved") == 0

    def intact(self) -> None:
        """Fail unless the sidecar is as good as before, with nothing left of the attack."""
        wait_until(lambda: len(self.status()["sessions"]) == 1, "only the witness is attached")
        self._serves()
        status = wait_settled(self.run_dir)
        assert (status["pid"], status["epoch"]) == (self.pid, self._epoch), "still the same process"
        wait_until(lambda: self.status()["loop"]["leaving_halves"] == 0, "all have left")
        self.accepted = status["pipeline"]["ledger"]["accepted"]
        wait_until(lambda: descriptors(self.pid) <= self._base_fds, "all descriptors are closed")
        assert resident_bytes(self.pid) - self._base_bytes < GROWTH_BYTES_MAX

    @contextmanager
    def growth_below(self, bytes_max: int) -> Iterator[None]:
        """Fail when the block makes the sidecar's own memory grow by more."""
        before = resident_bytes(self.pid)
        yield
        grown = resident_bytes(self.pid) - before
        assert grown <= bytes_max, f"grew by {grown >> 20} MiB"

    def close(self) -> None:
        """Let the witness leave."""
        for half in self._halves:
            half.leave()
        self._memory.close()


@contextmanager
def fuzz_target() -> Iterator[Target]:
    """Yield a sidecar with a witness; it must drain in order at the end."""
    flags = set_flags({f"limits.{name}": value for name, value in LIMITS.items()})
    with running_sidecar(pool_bytes=16 << 20, flags=flags) as sidecar:
        target = Target(sidecar)
        yield target
        target.close()
        assert sidecar.process.stop() == 0, "SIGTERM ends it in order, still"

"""A real sidecar under test: its own run directory and pool, killed and restarted at will."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvferry_demo.processes import Sidecar, new_pool_name, unlink_pool
from support.books import read_status
from support.logs import watch_log
from support.memory import free_fake_gpu
from support.waiting import wait_until

POOL_BYTES = 128 << 20
# A machine that stands still for a while must not meet these; a test that is about one sets it.
PATIENCE = {
    f"limits.{name}": 120_000 for name in ("fence_ms_max", "lease_idle_ms_max", "ranks_wait_ms_max")
}


def set_flags(settings: Mapping[str, object]) -> list[str]:
    """Return the command line's words for values by their dotted keys."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


class SidecarUnderTest:
    """One run directory and pool, served by one ``kvferry serve`` after the other."""

    def __init__(self, folder: Path, pool_bytes: int, flags: Sequence[str]) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir(mode=0o700)
        self.pool_name = new_pool_name("test")
        self.log = folder / "sidecar.log"
        self._pool_bytes = pool_bytes
        self._flags = (*set_flags(PATIENCE), *flags)
        self._process: Sidecar | None = None

    @property
    def process(self) -> Sidecar:
        """The serving process. Raises AssertionError when none was started."""
        assert self._process is not None, "start() first"
        return self._process

    def start(self) -> None:
        """Start serving and return when the sidecar answers."""
        self._process = Sidecar(
            self.run_dir,
            self.log,
            pool_name=self.pool_name,
            pool_bytes=self._pool_bytes,
            flags=self._flags,
        )
        self._process.wait_ready()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal and wait for the process's end; the pool stays."""
        self.process.kill(number)
        free_fake_gpu(self.process.pid)

    def restart(self, flags: Sequence[str] | None = None) -> None:
        """Serve the same run directory and pool with a new process, and other flags if given."""
        self.process.stop()
        if flags is not None:
            self._flags = (*set_flags(PATIENCE), *flags)
        self.start()

    def status(self) -> dict[str, Any]:
        """Return the status document. Raises NoSidecarError when there is no answer."""
        return read_status(self.run_dir)

    def wait_idle(self) -> dict[str, Any]:
        """Wait until nothing is in flight, check the books, and return the status."""
        status = wait_until(lambda: _idle(self.status()), "the sidecar is idle", every_s=0.05)
        pipeline = status["pipeline"]
        for books in (pipeline["ledger"], *pipeline["sessions"].values()):
            assert books["accepted"] == books["done"] + books["failed"] + books["cancelled"], books
        assert pipeline["violations"] == []
        return status

    @property
    def segment(self) -> Path:
        """The pool's file."""
        return Path("/dev/shm") / self.pool_name

    def damage(self, before: bytes) -> None:
        """Change one byte of what was stored since the segment had the bytes ``before``.

        It is one of an object's in the middle of all that is new.
        """
        now = self.segment.read_bytes()
        arena = len(now) - self._pool_bytes
        pages = [
            at
            for at in range(arena // 4096 * 4096, len(now), 4096)
            if now[at : at + 4096] != before[at : at + 4096]
        ]
        page = pages[len(pages) // 2]
        at = next(at for at in range(page, page + 4096) if now[at] != before[at])
        with self.segment.open("r+b") as segment:
            segment.seek(at)
            segment.write(bytes([now[at] ^ 0xFF]))

    def close(self) -> None:
        """End the process if there is one, and remove the pool."""
        if self._process is not None:
            self._process.stop()
            free_fake_gpu(self._process.pid)
        unlink_pool(self.pool_name)


def _idle(status: dict[str, Any]) -> dict[str, Any] | None:
    """Return the status when nothing is in flight; raises KeyError if it cannot tell."""
    pipeline, pool = status["pipeline"], status["pool"]
    counts = (pipeline["leases"], pipeline["ledger"]["open"], pool["leased"], pool["writing"])
    return None if any((*counts, *pipeline["jobs_open"].values())) else status


@contextmanager
def make_sidecar(
    *, pool_bytes: int = POOL_BYTES, flags: Sequence[str] = ()
) -> Iterator[SidecarUnderTest]:
    """Yield a sidecar that is not started yet; process, pool and folder are gone afterwards."""
    # Socket paths are short by nature: pytest's own folders may be too deep for them.
    folder = Path(tempfile.mkdtemp(prefix="kvf-"))
    sidecar = SidecarUnderTest(folder, pool_bytes, flags)
    try:
        with watch_log("sidecar", sidecar.log):
            yield sidecar
    finally:
        sidecar.close()
        shutil.rmtree(folder)


@contextmanager
def running_sidecar(
    *, pool_bytes: int = POOL_BYTES, flags: Sequence[str] = ()
) -> Iterator[SidecarUnderTest]:
    """Yield a sidecar that serves."""
    with make_sidecar(pool_bytes=pool_bytes, flags=flags) as sidecar:
        sidecar.start()
        yield sidecar

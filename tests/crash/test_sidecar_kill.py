"""kill -9 of a working sidecar at every step of a reserve, a copy, a commit and a doom.

The fault kit kills at the named point, a random number of steps later each time. What is a hit
afterwards has the right bytes (``get`` compares each), and nothing else is left of the dead one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.books import wait_settled
from support.client_half import ClientEngine, GoneError, client_engine
from support.hot_engine import Job
from support.kit import ENABLED, Kit
from support.patient_engine import PatientEngine
from support.sidecar import SidecarUnderTest, running_sidecar

POINTS = ("reserve", "reserved", "save", "commit", "committed", "load", "doom")
PROMPTS = 40
BLOCKS = (1, 2, 3)
LOADED = (4, 5, 6)
SHM = Path("/dev/shm")


class Worked:
    """An engine that saves and loads until its sidecar is gone. 40 prompts do not fit the pool."""

    def __init__(self, sidecar: SidecarUnderTest, engine: ClientEngine, seed: int) -> None:
        self.sidecar, self.engine = sidecar, engine
        self.patient = PatientEngine(engine)
        self.rng = random.Random(seed)
        for half in (engine.scheduler_half, engine.worker_half):
            half.gone = self._gone

    def until_killed(self) -> None:
        """Work until the process has ended."""
        with suppress(GoneError):
            for _ in range(2_000):
                self._step()
        assert self._gone(), "it was never killed"

    def _step(self) -> None:
        engine, name = self.engine, f"prompt {self.rng.randrange(PROMPTS)}"
        if self.rng.random() < 0.6:
            engine.fill(name, BLOCKS)
            self._run(engine.save_job(name, BLOCKS))
            return
        admission, answer = self.patient.lease(name, len(BLOCKS))
        count = answer.hit_tokens // 16
        if count and self.rng.random() < 0.3:
            self._damage(name)
        if count:
            engine.wipe(LOADED[:count])
            if self._run(engine.load_job(admission, LOADED[:count])) == "done":
                assert engine.holds(name, LOADED[:count])
        self.patient.release(admission)

    def _run(self, job: Job) -> str:
        """Submit a job and wait for its end, or its sidecar's."""
        return self.patient.end_of(self.engine.submit(job))

    def _damage(self, name: str) -> None:
        """Change a byte of a stored chunk, so that its load dooms it."""
        segment = SHM / self.sidecar.pool_name
        found = segment.read_bytes().find(self.engine.content(name, 1)[:64])
        if found >= 0:
            with segment.open("r+b") as file:
                file.seek(found + 32)
                file.write(b"\x00\xff\x00\xff")

    def _gone(self) -> bool:
        return self.sidecar.process.process.poll() is not None


@contextmanager
def working(seed: int) -> Iterator[Worked]:
    with (
        running_sidecar(pool_bytes=4 << 20, flags=ENABLED) as sidecar,
        client_engine(sidecar.run_dir, page_bytes=32 << 10, blocks=16) as engine,
    ):
        yield Worked(sidecar, engine, seed)


def cycle(work: Worked, point: str, epoch: int) -> int:
    """One life: killed at a point, started again, everything that hits compared."""
    sidecar, engine = work.sidecar, work.engine
    Kit(sidecar.run_dir).rules(f"kill {point} skip={work.rng.randrange(1, 12)}")
    work.until_killed()
    assert sidecar.process.process.wait() == -9
    sidecar.restart()
    epoch = engine.wait_ready(beyond_epoch=epoch)
    status = sidecar.status()["pool"]
    assert (status["writing"], status["doomed"], status["leased"]) == (0, 0, 0)
    hits = 0
    for number in range(PROMPTS):
        admission, answer = engine.lease(f"prompt {number}", len(BLOCKS))
        used = LOADED[: answer.hit_tokens // 16]
        engine.wipe(used)
        if used:
            outcome = engine.ended(engine.submit(engine.load_job(admission, used)))
            hits += outcome.status == "done"
            assert outcome.status == "done" or outcome.reason == "checksum", "damaged by the test"
            assert outcome.status != "done" or engine.holds(f"prompt {number}", used)
        work.patient.release(admission)
    wait_settled(sidecar.run_dir)
    assert hits > 0, "nothing survived"
    return epoch


@pytest.mark.timeout(900)  # a machine that does much else
def test_every_point_of_a_save_and_a_load_survives_a_kill() -> None:
    with working(seed=1) as work:
        epoch = work.engine.wait_ready()
        for point in POINTS:
            epoch = cycle(work, point, epoch)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_crashes_leave_no_segment_and_no_socket() -> None:
    before = {path.name for path in SHM.iterdir()}
    with working(seed=random.SystemRandom().randrange(1 << 32)) as work:
        epoch = work.engine.wait_ready()
        for number in range(100):
            epoch = cycle(work, POINTS[number % len(POINTS)], epoch)
            left = {path.name for path in work.sidecar.run_dir.iterdir()}
            expected = {"attach.sock", "http.sock", "sidecar.lock", f"ctl-{epoch:016x}.sock"}
            assert left == expected, "a socket of a dead sidecar stays"
        mine = {path.name for path in SHM.iterdir()} - before
        assert {name for name in mine if name.startswith(work.sidecar.pool_name)} == {
            work.sidecar.pool_name
        }
        name = work.sidecar.pool_name
    assert not (SHM / name).exists()

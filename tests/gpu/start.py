"""From the stream's word to the start of a copy: the sidecar's own loop, desk and copy engine."""

from __future__ import annotations

import math
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import structlog
from gpu import device
from gpu.copies import Bench
from gpu.fence import BEFORE, WRONG
from gpu.peer import peer
from gpu.runner import Sizes
from kvferry_connector.wire.names import DONE_STEP_OFFSET, FENCE_PAGE_BYTES
from kvferry_native import Mapping
from kvferry_sidecar.engines.base import Direction, Extents
from kvferry_sidecar.engines.cuda_driver import Driver
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.loop import READ, Loop
from kvferry_sidecar.stages.copying import CopyDesk
from kvferry_sidecar.stages.parts import Part, PartState, PlannedCopy

from bench.common import at_most, percentile

PAGE, LAYERS = 4096, 2


class NotingDriver(Driver):
    """Notes when the first copy since ``forget`` was put on a stream (monotonic; 0: none yet)."""

    first_s = 0.0

    def forget(self) -> None:
        self.first_s = 0.0

    def __call__(self, name: str, *arguments: Any) -> None:
        if name.startswith("cuMemcpy") and not self.first_s:
            self.first_s = time.monotonic()
        super().__call__(name, *arguments)


class Bed:
    """A desk in its loop, and a page that is copied again and again, as urgent as a load."""

    def __init__(self) -> None:
        device.driver()
        self.driver = NotingDriver()
        self.driver.use(0)
        self.bench = Bench(16 << 20, LAYERS * 2 * PAGE, "rect", self.driver)
        self.desk = CopyDesk(
            self.bench.engine, Limits(), structlog.get_logger(), lambda _part, _now_s: None
        )
        self._loop = Loop(lambda error, what: print(what, error))
        self._loop.add_ticker("fences", self._tick)
        wake = self.bench.engine.wake_fd()
        self._loop.watch(wake, READ, lambda _events, now_s: self.desk.collect(now_s))

    def _tick(self, now_s: float) -> float:
        self.desk.poll_fences(now_s)
        wait_s = self.desk.fence_wait_s(now_s)
        return math.inf if wait_s is None else wait_s

    def part(self, page: Mapping, step: int) -> Part:
        """Return a job of one block, which waits for the word ``step``."""
        layout = self.bench.layout(PAGE, 2, LAYERS)
        blocks, zeros = np.ones(1, np.int32), np.zeros(1, np.uint64)
        extents = Extents(layout, blocks, zeros, np.zeros(1, np.uint32), None, crc=True)
        run: Any = SimpleNamespace(
            work=SimpleNamespace(kind="load", fence_offset=DONE_STEP_OFFSET),
            job=SimpleNamespace(job=step, step=step),
        )
        rank: Any = SimpleNamespace(fence=page)
        key: Any = (b"", step, 0)
        now_s = time.monotonic()
        copies = [PlannedCopy(0, Direction.GATHER, extents)]
        return Part(run, rank, key, 0, now_s, now_s, copies)

    def copy(self, part: Part) -> float:
        """Have a part copied once its word comes; returns when the copy was begun (monotonic)."""
        self.driver.forget()
        self.desk.admit(part, time.monotonic())
        wait_s = 0.0
        while part.state is not PartState.ENDED:
            wait_s = self._loop.turn(wait_s)
        ((_, result),) = part.results
        assert result.moved_bytes == LAYERS * PAGE, result
        return self.driver.first_s

    def close(self) -> None:
        """Give everything back."""
        self._loop.close()
        self.bench.close()


def word_to_copy(sizes: Sizes) -> dict[str, Any]:
    """Microseconds from the word in memory, as its writer's host sees it, to the call that copies.

    ``early``: rounds in which the word was there before the job.
    """
    bed, taken_us, early = Bed(), [], 0
    with peer() as engine:
        engine.export(sizes.fill_bytes)
        fd = os.open(engine.do("fence")["path"], os.O_RDWR)
        page = Mapping(fd, FENCE_PAGE_BYTES)
        os.close(fd)
        for step in range(1, sizes.rounds + 1):
            engine.send("timed", step=step, wrong=WRONG, times=BEFORE)
            part = bed.part(page, step)
            begun_s = bed.copy(part)
            seen_s = engine.answer()["at_s"]
            if seen_s < part.accepted_s:
                early += 1
            else:
                taken_us.append((begun_s - seen_s) * 1e6)
    bed.close()
    assert taken_us, "every word came before its job"
    p50_us = percentile(taken_us, 50)
    return {
        "early": early, "p90 us": round(percentile(taken_us, 90), 1),
        "goals": [at_most("fence to the start of a copy, p50", p50_us, "us", 100)],
    }  # fmt: skip

"""Which way of copying is the fastest on a GPU, measured when its first engine attaches.

On memory of our own in the shape that is hardest (a page per layer and block), so that no engine's
page is touched. The answer is kept per GPU and direction, by the length of a run and the number of
runs, for the next sidecar too (cuda_stored.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.engines.base import Direction
from kvferry_sidecar.engines.cuda_driver import CudaError, Driver
from kvferry_sidecar.engines.cuda_modes import KernelMover, Mover, movers_of
from kvferry_sidecar.engines.cuda_parts import Part
from kvferry_sidecar.engines.cuda_stored import Best, StoredWays, facts_of
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory

PAGES = (1024, 4096, 16384, 65536)  # bytes of a run
CHUNKS = (4, 32)  # of a slice
LAYERS = 8
# A kernel stops the engine's own while it runs (contexts of a GPU take turns), so it has to be so
# much faster to be taken.
kernel_gain_min = 1.5
_rounds = 3
_comparing = threading.Lock()  # both directions at once would measure each other


@dataclass(slots=True)
class Ways:
    """The ways on one GPU in one direction, the best first per kind of slice."""

    movers: list[Mover]
    best: Best = field(default_factory=dict)

    def choose(self, part: Part) -> Mover:
        """Return the way for a slice: the best, or the first that can; 2-D copies always can."""
        rects = part.layout.rects
        runs = sum(rect.count for rect in rects)
        wanted = self.best.get(_nearest(part.layout.payload_bytes // runs, len(part.blocks)))
        order = sorted(self.movers, key=lambda mover: mover.name != wanted)
        return next(mover for mover in order if mover.serves(part))

    @property
    def held_bytes(self) -> int:
        """What the ways hold of the GPU's memory."""
        return sum(one.held_bytes for one in self.movers if isinstance(one, KernelMover))

    def close(self) -> None:
        """Give the GPU's memory back; what cannot be falls with this process."""
        for mover in self.movers:
            if isinstance(mover, KernelMover):
                with suppress(CudaError):
                    mover.close()


def _nearest(run_bytes: int, chunks: int) -> tuple[int, int]:
    def closest(value: int, known: Sequence[int]) -> int:
        return min(known, key=lambda one: abs(math.log2(one / max(1, value))))

    return closest(run_bytes, PAGES), closest(chunks, CHUNKS)


def find_ways(
    driver: Driver,
    ordinal: int,
    direction: Direction,
    stream: c_void_p,
    *,
    mode: str,
    stored: StoredWays,
    log: Log,
) -> Ways:
    """Return the ways on the current GPU, compared where there are several and none is asked for.

    What an earlier sidecar ``stored`` is believed instead, if nothing has changed. Where comparing
    fails (a GPU that is full), 2-D copies are left, which need nothing.
    """
    movers, reasons = movers_of(driver, ordinal, mode)
    ways = Ways(movers)
    measured = False
    if mode == "auto" and len(movers) > 1:
        try:
            facts = facts_of(driver, ordinal, direction, tuple(mover.name for mover in movers))
            ways.best = stored.read(facts, set(product(PAGES, CHUNKS)))
            if not ways.best:
                with _comparing:
                    ways.best = _compare(driver, ordinal, direction, stream, movers)
                measured = True
                stored.write(facts, ways.best)
        except CudaError as error:
            reasons.append(str(error))
            ways.close()
            ways.movers = movers[-1:]
    log.info(
        "ways of copying", gpu=ordinal, direction=direction.name.lower(),
        ways=[mover.name for mover in ways.movers], without=reasons, measured=measured,
        best={f"{page}x{chunks}": name for (page, chunks), name in ways.best.items()},
    )  # fmt: skip
    return ways


def _compare(
    driver: Driver, ordinal: int, direction: Direction, stream: c_void_p, movers: list[Mover]
) -> Best:
    most = max(PAGES) * max(CHUNKS) * LAYERS
    device, host = c_uint64(), c_void_p()
    driver("cuMemAlloc_v2", byref(device), c_size_t(most))
    try:
        driver("cuMemHostAlloc", byref(host), c_size_t(most), c_uint(0))
        try:
            best = {}
            for page_bytes, chunks in product(PAGES, CHUNKS):
                memory = DeviceMemory(ordinal, device.value, most)
                part = _part(memory, host.value or 0, direction, page_bytes, chunks)
                times = {
                    mover.name: _seconds(driver, mover, part, stream)
                    for mover in movers
                    if mover.serves(part)
                }
                best[page_bytes, chunks] = min(times, key=lambda name: _cost(name, times[name]))
            return best
        finally:
            driver("cuMemFreeHost", host)
    finally:
        driver("cuMemFree_v2", device)


def _cost(name: str, seconds: float) -> float:
    return seconds * (kernel_gain_min if name == "kernel" else 1.0)


def _part(
    memory: DeviceMemory, host: int, direction: Direction, page_bytes: int, chunks: int
) -> Part:
    offsets = np.arange(LAYERS, dtype=np.int64) * page_bytes * chunks
    same = np.full(LAYERS, page_bytes, np.int64)
    layout = CudaLayout(memory, offsets, same, same, chunks)
    blocks = np.random.default_rng(chunks).permutation(chunks).astype(np.int64)
    payloads = np.arange(chunks, dtype=np.int64) * layout.payload_bytes
    return Part(layout, direction, blocks, host + payloads, np.zeros(chunks, np.int64))


def _seconds(driver: Driver, mover: Mover, part: Part, stream: c_void_p) -> float:
    """Return the best time of a few rounds, the first not counted."""
    times = []
    for _ in range(1 + _rounds):
        started_s = time.perf_counter()
        kept = mover.move(part, stream)
        driver("cuStreamSynchronize", stream)
        times.append(time.perf_counter() - started_s)
        del kept
    return min(times[1:])

"""Copy engine against memcpy: save and load, by run length, with and without checksums.

The reference is memcpy between the same two touched shared-memory mappings, on as many threads.
It is timed before every copy, and `ratio` is taken against its best round of the whole run: on a
machine that others use, a reference that was starved for one case would flatter that case.
`ratio_paired` uses the rounds of the case alone; `memcpy_cpu_share` is the share of a core that
the best reference threads got (well below 1: the machine was busy, run again). `ratio_cpu`
compares bytes per CPU second of all threads: preemption does not count there, but it is no
substitute for `ratio` on a free machine. `memcpy_anonymous_gib_s` says what memcpy reaches in
private memory (huge pages where allowed).
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import mmap
import os
import select
import threading
import time
from dataclasses import dataclass

import numpy as np
from kvferry_native import GATHER, SCATTER, CopyEngine, Layout, Mapping
from numpy.typing import NDArray

GIB = 1 << 30
RUN_BYTES = (256, 1024, 4 << 10, 64 << 10, 1 << 20)
RUNS_MAX = 32  # layers: runs of a block lie this many regions apart
PAYLOAD_BYTES_MAX = 4 << 20
ROUNDS = 7
JOB_BYTES = 64 << 20
RUN_BYTES_WITH_TARGET = {4 << 10, 64 << 10, 1 << 20}
TARGET = {False: 0.85, True: 0.70}  # by crc


@dataclass(frozen=True, slots=True)
class Memory:
    """`total_bytes` of the engine's memory and as much of the pool, both touched."""

    engine: Mapping
    pool: Mapping
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Case:
    run_bytes: int
    direction: int
    crc: bool
    shuffled: bool

    @property
    def name(self) -> str:
        side = "save" if self.direction == GATHER else "load"
        order = "shuffled" if self.shuffled else "ascending"
        return f"{side}/{self.run_bytes}/{'crc' if self.crc else 'plain'}/{order}"


def shared(total_bytes: int) -> Mapping:
    fd = os.memfd_create("kvferry-bench", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        mapping = Mapping(fd, total_bytes)
    finally:
        os.close(fd)
    ctypes.memset(mapping.address, 1, total_bytes)
    return mapping


@dataclass(frozen=True, slots=True)
class Reference:
    """One memcpy on all threads: wall and CPU seconds, the least share of a core a thread got."""

    seconds: float
    cpu_s: float
    cpu_share: float


def memcpy(dst: int, src: int, total_bytes: int, threads: int) -> Reference:
    part = total_bytes // threads
    start = threading.Barrier(threads)
    spans: list[tuple[float, float, float]] = []

    def move(index: int) -> None:
        start.wait()
        began, cpu = time.perf_counter(), time.thread_time()
        ctypes.memmove(dst + index * part, src + index * part, part)
        spans.append((began, time.perf_counter(), time.thread_time() - cpu))

    workers = [threading.Thread(target=move, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    wall = max(end for _, end, _ in spans) - min(began for began, _, _ in spans)
    shares = [cpu / (end - began) for began, end, cpu in spans]
    return Reference(wall, sum(cpu for _, _, cpu in spans), min(shares))


def memcpy_anonymous_gib_s(total_bytes: int, threads: int) -> float:
    source, target = mmap.mmap(-1, total_bytes), mmap.mmap(-1, total_bytes)
    for memory in (source, target):
        memory.madvise(mmap.MADV_HUGEPAGE)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in (source, target)]
    for address in addresses:
        ctypes.memset(address, 1, total_bytes)
    rounds = [memcpy(addresses[1], addresses[0], total_bytes, threads) for _ in range(ROUNDS)]
    return total_bytes / min(r.seconds for r in rounds) / GIB


def layout_of(run_bytes: int, memory: Memory) -> tuple[Layout, int]:
    """Layer-outermost: a block has one run in each of several regions. Returns blocks too."""
    runs = max(1, min(RUNS_MAX, PAYLOAD_BYTES_MAX // run_bytes))
    blocks = memory.total_bytes // runs // run_bytes
    offsets = np.arange(runs, dtype=np.int64) * (blocks * run_bytes)
    same = np.full(runs, run_bytes, dtype=np.int64)
    return Layout(memory.engine, offsets, same, same, blocks), blocks


@dataclass(frozen=True, slots=True)
class Measured:
    """Best rounds of one case, and of the reference timed between them."""

    gib_s: float
    memcpy_gib_s: float
    memcpy_cpu_share: float
    ratio_cpu: float


class Bench:
    def __init__(self, memory: Memory, threads: int) -> None:
        self.memory = memory
        self.threads = threads
        self.engine = CopyEngine(threads)

    def copy_s(self, case: Case, layout: Layout, ids: NDArray[np.int32]) -> tuple[float, float]:
        """Wall and CPU seconds to move every block but 0, in jobs of about JOB_BYTES.

        A verified load is preceded, outside the time, by the save that yields its checksums.
        """
        payload = layout.payload_bytes
        per_job = max(1, JOB_BYTES // payload)
        offsets = np.arange(len(ids), dtype=np.uint64) * np.uint64(payload)
        expected = np.zeros(len(ids), dtype=np.uint32)
        if case.crc and case.direction == SCATTER:
            expected = self.stored_crcs(layout, ids, offsets)
        began, cpu = time.perf_counter(), time.process_time()
        for ticket, first in enumerate(range(0, len(ids), per_job)):
            part = slice(first, first + per_job)
            verify = case.crc and case.direction == SCATTER
            self.engine.submit(
                ticket,
                case.direction,
                layout,
                ids[part],
                self.memory.pool.address,
                offsets[part],
                case.crc,
                expected=expected[part] if verify else None,
                pool_bytes=self.memory.pool.total_bytes,
            )
        self.drain()
        return time.perf_counter() - began, time.process_time() - cpu

    def stored_crcs(
        self, layout: Layout, ids: NDArray[np.int32], offsets: NDArray[np.uint64]
    ) -> NDArray[np.uint32]:
        self.engine.submit(0, GATHER, layout, ids, self.memory.pool.address, offsets, True)
        (done,) = self.drain()
        assert done.crcs is not None
        return done.crcs

    def drain(self) -> list:
        poller = select.poll()
        poller.register(self.engine.eventfd, select.POLLIN)
        results = []
        while self.engine.pending:
            poller.poll()
            results += self.engine.poll()
        assert all(done.status == 0 for done in results), "a copy failed"
        return results

    def measure(self, case: Case, rounds: int) -> Measured:
        layout, blocks = layout_of(case.run_bytes, self.memory)
        ids = np.arange(1, blocks, dtype=np.int32)
        if case.shuffled:
            np.random.default_rng(7).shuffle(ids)
        memory = self.memory
        references, copies = [], []
        for _ in range(rounds):
            references.append(
                memcpy(memory.pool.address, memory.engine.address, memory.total_bytes, self.threads)
            )
            copies.append(self.copy_s(case, layout, ids))
        moved = len(ids) * layout.payload_bytes
        best = min(references, key=lambda reference: reference.seconds)
        memcpy_cpu_s = min(reference.cpu_s for reference in references)
        copy_cpu_s = min(cpu_s for _, cpu_s in copies)
        return Measured(
            gib_s=moved / min(wall_s for wall_s, _ in copies) / GIB,
            memcpy_gib_s=memory.total_bytes / best.seconds / GIB,
            memcpy_cpu_share=best.cpu_share,
            ratio_cpu=(moved / copy_cpu_s) / (memory.total_bytes / memcpy_cpu_s),
        )


def cases() -> list[Case]:
    return [
        Case(run_bytes, direction, crc, shuffled)
        for shuffled in (False, True)
        for run_bytes in RUN_BYTES
        for crc in (False, True)
        for direction in (GATHER, SCATTER)
    ]


def figures(case: Case, measured: Measured, memcpy_best_gib_s: float) -> dict:
    result = {
        "gib_s": round(measured.gib_s, 3),
        "ratio": round(measured.gib_s / memcpy_best_gib_s, 3),
        "ratio_paired": round(measured.gib_s / measured.memcpy_gib_s, 3),
        "ratio_cpu": round(measured.ratio_cpu, 3),
        "memcpy_cpu_share": round(measured.memcpy_cpu_share, 3),
    }
    if case.run_bytes in RUN_BYTES_WITH_TARGET:
        result["target"] = TARGET[case.crc]
    return result


def run(quick: bool, threads: int | None = None) -> dict:
    """JSON-able: GiB/s and ratios per case. `threads`: default one per CPU we may use.

    `quick` uses 256 MiB and two rounds: a smoke test, not a measurement.
    """
    count = threads or len(os.sched_getaffinity(0))
    total_bytes = GIB // 4 if quick else GIB
    bench = Bench(Memory(shared(total_bytes), shared(total_bytes), total_bytes), count)
    measured = {case: bench.measure(case, 2 if quick else ROUNDS) for case in cases()}
    bench.engine.close()
    best = max(result.memcpy_gib_s for result in measured.values())
    return {
        "threads": count,
        "working_set_bytes": 2 * total_bytes,
        "quick": quick,
        "memcpy_gib_s": round(best, 3),
        "memcpy_anonymous_gib_s": round(memcpy_anonymous_gib_s(total_bytes, count), 3),
        "cases": {case.name: figures(case, result, best) for case, result in measured.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short: a smoke test")
    parser.add_argument("--threads", type=int, help="copy threads and memcpy threads")
    options = parser.parse_args()
    print(json.dumps(run(options.quick, options.threads), indent=2))


if __name__ == "__main__":
    main()

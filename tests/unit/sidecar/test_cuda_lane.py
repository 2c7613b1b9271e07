"""Slices on their way: one is summed while the next are copied, and no job ends before its last.

The fake driver's stream does nothing before somebody waits for it: who reads too early reads what
was there before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import structlog
from kvferry_native import Checksums, crc32c
from kvferry_sidecar.engines import cuda, cuda_lane, cuda_memory, pages
from kvferry_sidecar.engines.base import CopyResult, CopyStatus, Direction, PoolSpan
from kvferry_sidecar.engines.cuda import CudaCopyEngine, GpuOptions
from kvferry_sidecar.engines.cuda_driver import Driver
from kvferry_sidecar.engines.cuda_modes import MODES
from kvferry_sidecar.engines.host import HostCopyEngine
from numpy.typing import NDArray
from support.copying import SHAPES, EngineMemory, Pool, Shape, extents_of, layer_outermost
from support.fake_cuda import FakeGpu, GpuEngineMemory, driver_with_kernels
from support.waiting import wait_until

LOG = structlog.get_logger()
SHAPE = layer_outermost(2, 4096, 4096, 9)
SLAB_BYTES = 1 << 16
GATHER, SCATTER = Direction.GATHER, Direction.SCATTER


@dataclass
class Sums:
    """The checksums of a lane: when they began, and held back when a test wants it."""

    gpu: FakeGpu
    begun: list[tuple[int, int]] = field(default_factory=list)  # slices put on the stream, waited
    addresses: list[int] = field(default_factory=list)
    hold_at: int = -1  # the number of the slice whose end is held
    held: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def __call__(self, threads: int) -> Sums:
        self._real = Checksums(threads)
        return self

    def begin(self, addresses: NDArray[np.uint64], *rest: NDArray[np.uint64]) -> None:
        calls = [len(self.gpu.calls(f"cuEvent{name}")) for name in ("Record", "Synchronize")]
        self.begun.append((calls[0], calls[1]))
        self.addresses += addresses.tolist()
        self._real.begin(addresses, *rest)

    def end(self) -> list[int]:
        if len(self.begun) - 1 == self.hold_at:
            self.held.set()
            assert self.go.wait(90)
        return self._real.end()


@dataclass
class Bed:
    """An engine that copies SHAPE chunk by chunk."""

    gpu: FakeGpu
    sums: Sums
    pool: Pool
    engine: CudaCopyEngine
    memory: GpuEngineMemory

    def submit(
        self, ticket: int, direction: Direction, blocks: list[int], *, bad: int = -1, at: int = 0
    ) -> None:
        """Copy blocks to, or from, where their payloads lie one after the other from ``at`` on."""
        offsets = [at + number * SHAPE.payload_bytes for number in range(len(blocks))]
        expected = None
        if direction is SCATTER:
            step = SHAPE.payload_bytes
            crcs = [crc32c(self.pool.view[one : one + step].tobytes(), 7) for one in offsets]
            expected = np.array(crcs, np.uint32)
            expected[bad if bad >= 0 else slice(0)] ^= 1
        extents = extents_of(
            SHAPE.layout(self.memory), blocks, offsets, seeds=np.full(len(blocks), 7, np.uint32),
            expected=expected,
        )  # fmt: skip
        self.engine.submit(ticket, direction, extents)

    def result(self) -> CopyResult:
        (result,) = wait_until(self.engine.collect, "the copy ends")
        assert self.gpu.waiting() == 0, "and nothing of it runs any more"
        return result


@pytest.fixture
def sums(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Sums:
    made = Sums(gpu)
    monkeypatch.setattr(cuda_lane, "Checksums", made)
    return made


@pytest.fixture
def driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return driver_with_kernels(gpu, monkeypatch)


def make_engine(driver: Driver, pool: Pool, mode: str) -> CudaCopyEngine:
    span = PoolSpan(pool.address, pool.total_bytes, pool.total_bytes, SLAB_BYTES, pool)
    engine = CudaCopyEngine(span, LOG, driver, GpuOptions(mode, threads=2))
    engine.pin(driver, 0)
    return engine


@pytest.fixture
def bed(gpu: FakeGpu, driver: Driver, sums: Sums, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setattr(cuda_lane, "slice_bytes_max", SHAPE.payload_bytes)
    gpu.lazily(True)
    pool = Pool(4 * SLAB_BYTES)
    engine = make_engine(driver, pool, "rect")
    yield Bed(gpu, sums, pool, engine, GpuEngineMemory(SHAPE.total_bytes))
    sums.go.set()
    engine.close()


@pytest.mark.parametrize("direction", list(Direction), ids=lambda one: one.name)
def test_a_slice_is_summed_while_the_next_is_copied(bed: Bed, direction: Direction) -> None:
    bed.submit(1, direction, [1, 2, 3, 4, 5])
    result = bed.result()
    assert (result.status, result.moved_bytes) == (CopyStatus.DONE, 5 * SHAPE.payload_bytes)
    if direction is GATHER:  # number 0 is summed after it has arrived, while number 1 moves
        assert bed.sums.begun == [(2, 1), (3, 2), (4, 3), (5, 4), (5, 5)]
    else:  # number 2 is summed while number 0 moves, and number 1 is put behind it
        assert bed.sums.begun == [(0, 0), (0, 0), (1, 0), (2, 0), (3, 1)]
    starts = [bed.pool.address + number * SHAPE.payload_bytes for number in range(5)]
    assert bed.sums.addresses == starts, "each once, in the order of the job"


def test_a_job_is_summed_while_the_next_is_copied(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, find_ways = threading.Event(), cuda.find_ways

    def later(*what: object, **how: object) -> object:
        assert both.wait(90)
        return find_ways(*what, **how)

    monkeypatch.setattr(cuda, "find_ways", later)
    bed.submit(1, GATHER, [1])
    bed.submit(2, GATHER, [2], at=SLAB_BYTES)
    both.set()
    found: list[CopyResult] = []
    wait_until(lambda: found.extend(bed.engine.collect()) or len(found) == 2, "both end")
    assert [result.ticket for result in found] == [1, 2]
    assert bed.sums.begun == [(2, 1), (2, 2)]


@pytest.mark.parametrize("direction", list(Direction), ids=lambda one: one.name)
@pytest.mark.parametrize("hold_at", [0, 2])
def test_no_job_ends_before_its_last_checksum(bed: Bed, direction: Direction, hold_at: int) -> None:
    bed.sums.hold_at = hold_at
    bed.submit(1, direction, [1, 2, 3], bad=2)
    assert bed.sums.held.wait(90)
    assert bed.engine.collect() == []
    bed.sums.go.set()
    result = bed.result()
    want = (CopyStatus.DONE, -1) if direction is GATHER else (CopyStatus.CHECKSUM, 2)
    assert (result.status, result.bad_index) == want


@pytest.mark.parametrize("direction", list(Direction), ids=lambda one: one.name)
def test_a_cancel_stops_the_slices_that_were_not_started(bed: Bed, direction: Direction) -> None:
    bed.sums.hold_at = 0
    bed.submit(1, direction, [1, 2, 3, 4, 5, 6])
    assert bed.sums.held.wait(90)
    bed.engine.cancel(1)
    bed.sums.go.set()
    result = bed.result()
    assert result.status is CopyStatus.CANCELLED
    assert result.moved_bytes == (3 if direction is GATHER else 0) * SHAPE.payload_bytes
    assert len(bed.sums.begun) == (3 if direction is GATHER else 2)


@pytest.mark.parametrize("direction", list(Direction), ids=lambda one: one.name)
@pytest.mark.parametrize("call", ["cuMemcpy2DAsync_v2", "cuEventRecord", "cuEventSynchronize"])
def test_an_error_in_the_middle_drains(bed: Bed, direction: Direction, call: str) -> None:
    bed.gpu.fail(call, 1, after=2)
    bed.submit(1, direction, [1, 2, 3, 4, 5, 6])
    result = bed.result()
    assert (result.status, result.bad_index) == (CopyStatus.FAILED, -1)
    assert result.moved_bytes == 2 * SHAPE.payload_bytes
    bed.gpu.fail("", 0)
    bed.submit(2, direction, [1, 2, 3, 4, 5, 6])
    assert bed.result().status is CopyStatus.DONE


@dataclass
class Pinning:
    """The driver's registrations, held back behind the pool's first slab."""

    pool_address: int = 0
    go: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def pinning(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Pinning:
    monkeypatch.setattr(cuda_memory, "pin_bytes_max", SLAB_BYTES)
    made, pin = Pinning(), driver.pin

    def held(address: int, total_bytes: int) -> None:
        if address != made.pool_address:
            assert made.go.wait(90)
        pin(address, total_bytes)

    monkeypatch.setattr(driver, "pin", held)
    return made


@pytest.fixture
def pinned_bed(gpu: FakeGpu, driver: Driver, pinning: Pinning) -> Iterator[Bed]:
    pool = Pool(4 * SLAB_BYTES)
    pinning.pool_address = pool.address
    engine = make_engine(driver, pool, "rect")
    yield Bed(gpu, Sums(gpu), pool, engine, GpuEngineMemory(SHAPE.total_bytes))
    pinning.go.set()
    engine.close()


@pytest.mark.parametrize("direction", list(Direction), ids=lambda one: one.name)
def test_what_is_pinned_is_copied_while_the_rest_is_being_pinned(
    pinned_bed: Bed, pinning: Pinning, direction: Direction
) -> None:
    """Whoever came first; and what need not wait any more does not."""
    bed, far = pinned_bed, 3 * SLAB_BYTES
    bed.submit(1, direction, [1], at=far)
    bed.submit(2, direction, [2], at=far + SHAPE.payload_bytes)
    bed.submit(3, direction, [3, 4])
    result = bed.result()
    assert (result.ticket, result.status) == (3, CopyStatus.DONE)
    bed.engine.cancel(2)
    result = bed.result()
    assert (result.ticket, result.status, result.moved_bytes) == (2, CopyStatus.CANCELLED, 0)
    pinning.go.set()
    result = bed.result()
    assert (result.ticket, result.status) == (1, CopyStatus.DONE)
    payload = bed.pool.view[far : far + SHAPE.payload_bytes].tobytes()
    assert payload == SHAPE.read(bed.memory.view, 1)


def test_a_job_that_waits_for_its_pages_ends_with_the_engine(
    pinned_bed: Bed, pinning: Pinning
) -> None:
    bed = pinned_bed
    bed.submit(1, GATHER, [1], at=3 * SLAB_BYTES)
    bed.submit(2, GATHER, [2])
    assert bed.result().ticket == 2, "and the first is set aside"
    with ThreadPoolExecutor(1) as closing:
        closed = closing.submit(bed.engine.close)
        assert bed.result().status is CopyStatus.CANCELLED, "before the driver has returned"
        pinning.go.set()
        closed.result(90)


@pytest.mark.parametrize("chunk", range(4))
@pytest.mark.parametrize("kind", ["of the driver", "another"])
def test_what_cannot_be_pinned_fails_its_copies_only(
    gpu: FakeGpu, driver: Driver, monkeypatch: pytest.MonkeyPatch, chunk: int, kind: str
) -> None:
    monkeypatch.setattr(cuda_memory, "pin_bytes_max", SLAB_BYTES)
    memory = GpuEngineMemory(SHAPE.total_bytes)
    pool, populate = Pool(4 * SLAB_BYTES), pages.populate

    def touch(address: int, total_bytes: int, threads: int) -> bool:
        if address == pool.address + chunk * SLAB_BYTES:
            raise RuntimeError("can't start new thread")
        return populate(address, total_bytes, threads)

    if kind == "another":
        monkeypatch.setattr(pages, "populate", touch)
    else:
        gpu.fail("cuMemHostRegister_v2", 2, after=chunk)
    bed = Bed(gpu, Sums(gpu), pool, make_engine(driver, pool, "rect"), memory)
    for number in range(4):
        bed.submit(number, GATHER, [1 + number], at=number * SLAB_BYTES)
        good = number < chunk
        assert bed.result().status is (CopyStatus.DONE if good else CopyStatus.FAILED)
        assert gpu.pinned(pool.address + number * SLAB_BYTES) == good
    assert bed.engine.pinning() == (chunk * SLAB_BYTES, chunk * SLAB_BYTES)
    bed.engine.close()
    assert len(gpu.calls("cuMemHostUnregister")) == chunk
    assert not gpu.pinned(pool.address)


@pytest.mark.parametrize("mode", MODES)
def test_each_gpu_is_copied_from_and_to_in_its_own_context(
    gpu: FakeGpu, driver: Driver, mode: str
) -> None:
    """Whatever the thread that submits uses: the driver refuses memory of another GPU."""
    pool = Pool(4 * SLAB_BYTES)
    engine = make_engine(driver, pool, mode)
    memories = [GpuEngineMemory(SHAPE.total_bytes, 1 + device, device) for device in (0, 1)]
    driver.use(1)
    for device, memory in enumerate(memories):
        want = SHAPE.read(memory.view, 3)
        for direction, block in ((GATHER, 3), (SCATTER, 4)):
            extents = extents_of(SHAPE.layout(memory), [block], [device * SLAB_BYTES], crc=False)
            engine.submit(1, direction, extents)
            (result,) = wait_until(engine.collect, "the copy ends")
            assert result.status is CopyStatus.DONE
        assert SHAPE.read(memory.view, 4) == want
    assert driver.used == [0, 1]
    engine.close()


def copied(
    gpu: FakeGpu, driver: Driver, shape: Shape, mode: str, seed: int
) -> tuple[list[tuple[object, ...]], bytes, bytes]:
    """Save and load random chunks, some damaged; return all that can be seen of it.

    But what became of a damaged chunk's block: a GPU's stays as it was.
    """
    rng = np.random.default_rng(seed)
    pool = Pool(1 << 20)
    step = (shape.payload_bytes + 63) // 64 * 64
    chunks = int(rng.integers(1, min(shape.blocks - 1, pool.total_bytes // step) + 1))
    if mode == "host":
        engine = HostCopyEngine(
            threads=2, pool_address=pool.address, pool_bytes=pool.total_bytes, pool_owner=pool
        )
        memory: EngineMemory | GpuEngineMemory = EngineMemory(shape.total_bytes, seed)
    else:
        engine, memory = make_engine(driver, pool, mode), GpuEngineMemory(shape.total_bytes, seed)
    layout = shape.layout(memory)
    blocks = rng.permutation(np.arange(1, shape.blocks, dtype=np.int32))[:chunks]
    offsets = (rng.permutation(pool.total_bytes // step)[:chunks] * step).tolist()
    seeds = rng.integers(0, 2**32, chunks, dtype=np.uint32)
    seen: list[tuple[object, ...]] = []

    def do(ticket: int, direction: Direction, blocks: NDArray[np.int32], **how: object) -> None:
        engine.submit(ticket, direction, extents_of(layout, blocks, offsets, seeds=seeds, **how))
        (result,) = wait_until(engine.collect, "the copy ends")
        assert result.crcs is None or len(result.crcs) == chunks
        crcs = None if result.crcs is None else result.crcs.tolist()
        seen.append((result.status, result.moved_bytes, result.bad_index, crcs))

    do(1, GATHER, blocks)
    expected = np.array(seen[0][3], np.uint32)
    do(2, SCATTER, blocks[::-1].copy(), expected=expected)
    damaged = rng.permutation(chunks)[: int(rng.integers(1, 3))]
    for chunk in damaged.tolist():
        pool.view[offsets[chunk] + int(rng.integers(shape.payload_bytes))] ^= 1
    wrong = [int(blocks[chunk]) for chunk in damaged]
    before = [shape.read(memory.view, block) for block in wrong]
    do(3, SCATTER, blocks, expected=expected)
    if mode != "host":
        assert before == [shape.read(memory.view, block) for block in wrong]
    for run in [run for block in wrong for run in shape.runs(block)]:
        memory.view[run] = 0
    do(4, GATHER, blocks, crc=False)
    engine.close()
    return seen, pool.view.tobytes(), memory.view.tobytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_results_are_those_of_copies_on_a_cpu(
    gpu: FakeGpu, driver: Driver, monkeypatch: pytest.MonkeyPatch, shape: Shape, mode: str
) -> None:
    gpu.lazily(True)
    for seed in range(2):
        monkeypatch.setattr(cuda_lane, "slice_bytes_max", (1 + seed) * shape.payload_bytes)
        want = copied(gpu, driver, shape, "host", seed)
        found = copied(gpu, driver, shape, mode, seed)
        assert want[0][0][0] is CopyStatus.DONE
        assert want[0][2][0] is CopyStatus.CHECKSUM
        assert found == want

"""What every copy engine must do, run over each implementation in FACTORIES."""

from __future__ import annotations

import gc
import os
import select
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import structlog
from kvferry_native import crc32c
from kvferry_sidecar.engines.base import (
    CopyEngine,
    CopyStatus,
    Direction,
    Extents,
    PoolSpan,
)
from kvferry_sidecar.engines.cuda import CudaCopyEngine, GpuOptions
from kvferry_sidecar.engines.cuda_driver import Driver
from kvferry_sidecar.engines.host import HostCopyEngine
from numpy.typing import NDArray
from support.copying import (
    GUARD,
    SHAPES,
    EngineMemory,
    Owner,
    Pool,
    Rig,
    Shape,
    extents_of,
    layer_outermost,
)
from support.fake_cuda import FakeGpu, GpuEngineMemory, RealGpuMemory, fake_image, library

ON_GPU = "TEST_ON_GPU" in os.environ


def host(pool: Pool, owner: object) -> CopyEngine:
    return HostCopyEngine(
        threads=3, pool_address=pool.address, pool_bytes=pool.total_bytes, pool_owner=owner
    )


def cuda(pool: Pool, owner: object, mode: str = "rect") -> CopyEngine:
    """Over a driver made of host memory: what moves is checked here, how fast is not.

    ``make gpu`` runs the same on a GPU.
    """
    span = PoolSpan(pool.address, pool.total_bytes, pool.total_bytes, 1 << 20, owner)
    driver = Driver() if ON_GPU else Driver(str(library()))
    engine = CudaCopyEngine(span, structlog.get_logger(), driver, GpuOptions(mode))
    engine.pin(driver, 0)
    return engine


def cuda_batch(pool: Pool, owner: object) -> CopyEngine:
    return cuda(pool, owner, "batch")


def cuda_kernel(pool: Pool, owner: object) -> CopyEngine:
    return cuda(pool, owner, "kernel")


FACTORIES: list[Callable[[Pool, object], CopyEngine]] = [host, cuda, cuda_batch, cuda_kernel]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake driver has the kernel itself."""
    if not ON_GPU:
        FakeGpu().with_kernels(True)
        FakeGpu().lazily(True)  # or what is read too early would be there
        monkeypatch.setattr("kvferry_sidecar.engines.cuda_kernel.compile_image", fake_image)


def memory_of(factory: Callable[[Pool, object], CopyEngine]) -> Any:
    if factory is host:
        return EngineMemory
    return RealGpuMemory if ON_GPU else GpuEngineMemory


def make_rig(
    factory: Callable[[Pool, object], CopyEngine], pool_bytes: int, owner: object = None
) -> Rig:
    pool = Pool(pool_bytes)
    return Rig(pool, factory(pool, owner), iter(range(1, 1 << 30)), memory_of(factory))


@pytest.fixture(params=FACTORIES, ids=lambda factory: factory.__name__)
def factory(request: pytest.FixtureRequest) -> Callable[[Pool, object], CopyEngine]:
    return request.param


@pytest.fixture
def rig(factory: Callable[[Pool, object], CopyEngine]) -> Iterator[Rig]:
    made = make_rig(factory, 32 << 20)
    yield made
    made.engine.close()
    if not ON_GPU:
        FakeGpu().free_all()


def spread(rng: np.random.Generator, count: int, payload_bytes: int, unaligned: bool) -> list[int]:
    """Offsets of `count` payloads in random order with a gap between any two."""
    stride = (payload_bytes + 64 + 63) // 64 * 64
    return [
        int(i) * stride + (int(rng.integers(1, 60)) if unaligned else 0)
        for i in rng.permutation(count)
    ]


@pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_gather_then_scatter_elsewhere(rig: Rig, shape: Shape, unaligned: bool) -> None:
    rng = np.random.default_rng(len(shape.name) + unaligned)
    memory = rig.memory(shape.total_bytes)
    layout = shape.layout(memory)
    assert layout.payload_bytes == shape.payload_bytes
    order = rng.permutation(np.arange(1, shape.blocks, dtype=np.int32))
    half = (shape.blocks - 1) // 2
    sources, targets = order[:half], order[half : 2 * half]
    offsets = spread(rng, half, shape.payload_bytes, unaligned)
    seeds = rng.integers(0, 2**32, half, dtype=np.uint32)

    saved = rig.do(Direction.GATHER, extents_of(layout, sources, offsets, seeds=seeds))
    assert saved.status is CopyStatus.DONE
    assert saved.moved_bytes == half * shape.payload_bytes
    assert saved.bad_index == -1
    expected_pool = np.full(rig.pool.total_bytes, GUARD, np.uint8)
    for block, offset in zip(sources, offsets, strict=True):
        payload = shape.read(memory.view, int(block))
        expected_pool[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)
    assert np.array_equal(rig.pool.view, expected_pool)
    payloads = [shape.read(memory.view, int(block)) for block in sources]
    wanted = [crc32c(p, int(s)) for p, s in zip(payloads, seeds, strict=True)]
    assert saved.crcs is not None
    assert saved.crcs.tolist() == wanted

    after = memory.view.copy()
    for block, payload in zip(targets, payloads, strict=True):
        at = 0
        for run in shape.runs(int(block)):
            after[run] = np.frombuffer(payload[at : at + run.stop - run.start], np.uint8)
            at += run.stop - run.start
    load = extents_of(layout, targets, offsets, seeds=seeds, expected=saved.crcs)
    assert rig.do(Direction.SCATTER, load).status is CopyStatus.DONE
    assert np.array_equal(memory.view, after)


def saved_chunks(rig: Rig, count: int) -> tuple[EngineMemory, Shape, Extents, NDArray[np.uint32]]:
    shape = layer_outermost(4, 4096, 4096, count + 1)
    memory = rig.memory(shape.total_bytes)
    offsets = [i * shape.payload_bytes for i in range(count)]
    seeds = np.arange(100, 100 + count, dtype=np.uint32)
    blocks = np.random.default_rng(11).permutation(np.arange(1, count + 1))
    extents = extents_of(shape.layout(memory), blocks, offsets, seeds=seeds)
    result = rig.do(Direction.GATHER, extents)
    assert result.crcs is not None
    return memory, shape, extents, result.crcs


@pytest.mark.parametrize("bad", [0, 1, 57, 199])
def test_a_flipped_bit_is_found_at_its_chunk(rig: Rig, bad: int) -> None:
    _, shape, extents, crcs = saved_chunks(rig, 200)
    for index in {bad, 199}:  # the later one must not hide the first
        rig.pool.view[int(extents.pool_offsets[index]) + shape.payload_bytes - 1] ^= 0x10
    load = extents_of(
        extents.layout, extents.blocks, extents.pool_offsets, seeds=extents.seeds, expected=crcs
    )
    result = rig.do(Direction.SCATTER, load)
    assert result.status is CopyStatus.CHECKSUM
    assert result.bad_index == bad
    assert result.moved_bytes < 200 * shape.payload_bytes


def test_a_wrong_seed_never_verifies(rig: Rig) -> None:
    _, _, extents, crcs = saved_chunks(rig, 40)
    for index in range(40):
        seeds = extents.seeds.copy()
        seeds[index] ^= np.uint32(1 << (index % 32))
        load = extents_of(
            extents.layout, extents.blocks, extents.pool_offsets, seeds=seeds, expected=crcs
        )
        result = rig.do(Direction.SCATTER, load)
        assert (result.status, result.bad_index) == (CopyStatus.CHECKSUM, index)


def test_without_crc_nothing_is_summed(rig: Rig) -> None:
    shape = layer_outermost(2, 4096, 4096, 8)
    memory = rig.memory(shape.total_bytes)
    result = rig.do(Direction.GATHER, extents_of(shape.layout(memory), [3], [0], crc=False))
    assert result.crcs is None
    assert rig.pool.view[: shape.payload_bytes].tobytes() == shape.read(memory.view, 3)


@pytest.mark.parametrize("block", [0, -1, 8, 2**31 - 1])
@pytest.mark.parametrize("direction", list(Direction))
def test_block_out_of_range_is_refused(rig: Rig, block: int, direction: Direction) -> None:
    shape = layer_outermost(2, 4096, 4096, 8)
    memory = rig.memory(shape.total_bytes)
    before = memory.view.copy()
    with pytest.raises(ValueError, match=rf"block {block} at index 1"):
        rig.submit(direction, extents_of(shape.layout(memory), [1, block], [0, 65536]))
    assert np.array_equal(memory.view, before)
    assert (rig.pool.view == GUARD).all()


@pytest.mark.parametrize("past", [1, 4096, 2**40, 2**63, 2**64 - 1])
def test_pool_offset_out_of_range_is_refused(rig: Rig, past: int) -> None:
    shape = layer_outermost(2, 4096, 4096, 8)
    memory = rig.memory(shape.total_bytes)
    last = rig.pool.total_bytes - shape.payload_bytes
    offset = min(last + past, 2**64 - 1)
    with pytest.raises(ValueError, match="leaves the pool"):
        rig.submit(Direction.GATHER, extents_of(shape.layout(memory), [1], [offset]))
    fits = extents_of(shape.layout(memory), [1], [last])
    assert rig.do(Direction.GATHER, fits).status is CopyStatus.DONE


def test_unequal_lengths_are_refused(rig: Rig) -> None:
    shape = layer_outermost(2, 4096, 4096, 8)
    memory = rig.memory(shape.total_bytes)
    layout = shape.layout(memory)
    with pytest.raises(ValueError, match="2 blocks but 1 pool offsets"):
        rig.submit(Direction.GATHER, extents_of(layout, [1, 2], [0]))
    with pytest.raises(ValueError, match="seeds"):
        rig.submit(Direction.GATHER, extents_of(layout, [1], [0], seeds=np.zeros(3, np.uint32)))


def test_an_empty_job_completes(rig: Rig) -> None:
    shape = layer_outermost(1, 64, 64, 2)
    memory = rig.memory(shape.total_bytes)
    result = rig.do(Direction.GATHER, extents_of(shape.layout(memory), [], []))
    assert (result.status, result.moved_bytes) == (CopyStatus.DONE, 0)


def test_a_pending_ticket_is_not_taken_twice(rig: Rig) -> None:
    shape = layer_outermost(1, 64, 64, 2)
    memory = rig.memory(shape.total_bytes)
    extents = extents_of(shape.layout(memory), [1], [0])
    rig.engine.submit(7, Direction.GATHER, extents)
    with pytest.raises(ValueError, match="ticket 7 is still pending"):
        rig.engine.submit(7, Direction.GATHER, extents)
    rig.collect(1)
    rig.engine.submit(7, Direction.GATHER, extents)
    assert set(rig.collect(1)) == {7}


def big_job(rig: Rig) -> tuple[EngineMemory, Shape, Extents]:
    """24 MiB in pieces: long enough to be cancelled while it runs."""
    shape = layer_outermost(4, 65536, 65536, 97)
    memory = rig.memory(shape.total_bytes)
    offsets = [i * shape.payload_bytes for i in range(96)]
    return memory, shape, extents_of(shape.layout(memory), range(1, 97), offsets)


def test_cancel_leaves_no_writes_after_its_result(rig: Rig) -> None:
    memory, shape, _ = big_job(rig)
    layout, half = shape.layout(memory), range(1, 49)
    offsets = [i * shape.payload_bytes for i in range(96)]
    extents = extents_of(layout, half, offsets[:48])
    # Work ahead of it: with few cores the copy threads run first, and alone it would be done.
    ahead = extents_of(layout, half, offsets[48:])
    seen = set()
    for attempt in count():
        if attempt >= 40 and CopyStatus.CANCELLED in seen:
            break  # else none came early enough yet
        rig.pool.view[:] = GUARD
        before = [rig.submit(Direction.GATHER, ahead) for _ in range(attempt % 8)]
        ticket = rig.submit(Direction.GATHER, extents)
        deadline = time.perf_counter() + attempt % 40 * 1e-4  # from before its start to mid-run
        while time.perf_counter() < deadline:
            pass
        rig.engine.cancel(ticket)
        result = rig.collect(len(before) + 1)[ticket]
        seen.add(result.status)
        frozen = rig.pool.view.copy()
        written = sum(
            rig.pool.view[int(offset)] != GUARD or rig.pool.view[int(offset) + 1] != GUARD
            for offset in extents.pool_offsets
        )
        assert result.moved_bytes == written * extents.layout.payload_bytes
        # Whoever owns the memory now writes it; a straggler would show through.
        memory.view[:] ^= 0xFF
        assert np.array_equal(rig.pool.view, frozen)
        assert (result.status is CopyStatus.DONE) == (written == len(extents.blocks))


def test_cancel_of_queued_jobs_does_not_wait_for_the_running_one(rig: Rig) -> None:
    _, _, extents = big_job(rig)
    tickets = [rig.submit(Direction.GATHER, extents) for _ in range(8)]
    for ticket in tickets[1:]:
        rig.engine.cancel(ticket)
        rig.engine.cancel(ticket)
    results = rig.collect(8)
    assert results[tickets[0]].status is CopyStatus.DONE
    assert any(results[ticket].status is CopyStatus.CANCELLED for ticket in tickets[1:])


def test_cancel_of_unknown_and_finished_tickets_is_ignored(rig: Rig) -> None:
    rig.engine.cancel(12345)
    _, _, extents = big_job(rig)
    ticket = rig.submit(Direction.GATHER, extents)
    rig.collect(1)
    rig.engine.cancel(ticket)
    assert rig.engine.collect() == []


def test_many_jobs_at_once_each_end_once(rig: Rig) -> None:
    shape = layer_outermost(3, 2048, 4096, 65)
    memory = rig.memory(shape.total_bytes)
    layout = shape.layout(memory)
    jobs: dict[int, tuple[int, int]] = {}
    for slot in range(600):
        block = 1 + slot % 64
        offset = slot * shape.payload_bytes
        jobs[rig.submit(Direction.GATHER, extents_of(layout, [block], [offset]))] = (block, offset)
    results = rig.collect(len(jobs))
    assert set(results) == set(jobs)
    for block, offset in jobs.values():
        payload = rig.pool.view[offset : offset + shape.payload_bytes].tobytes()
        assert payload == shape.read(memory.view, block)
    assert rig.engine.collect() == []
    assert not select.select([rig.engine.wake_fd()], [], [], 0)[0]


def test_saves_and_loads_overlap(rig: Rig) -> None:
    shape = layer_outermost(4, 4096, 4096, 129)
    memory = rig.memory(shape.total_bytes)
    layout = shape.layout(memory)
    payload = shape.payload_bytes
    rig.pool.view[: 64 * payload] = np.random.default_rng(5).integers(
        0, 256, 64 * payload, np.uint8
    )
    want_saved = [shape.read(memory.view, block) for block in range(1, 65)]
    saves = {
        rig.submit(Direction.GATHER, extents_of(layout, [1 + i], [(64 + i) * payload])): i
        for i in range(64)
    }
    loads = {
        rig.submit(Direction.SCATTER, extents_of(layout, [65 + i], [i * payload], crc=False)): i
        for i in range(64)
    }
    results = rig.collect(128)
    assert all(result.status is CopyStatus.DONE for result in results.values())
    for i in saves.values():
        at = (64 + i) * payload
        assert rig.pool.view[at : at + payload].tobytes() == want_saved[i]
    for i in loads.values():
        at = i * payload
        assert rig.pool.view[at : at + payload].tobytes() == shape.read(memory.view, 65 + i)


def test_close_drains_what_runs(rig: Rig) -> None:
    _, _, extents = big_job(rig)
    tickets = [rig.submit(Direction.GATHER, extents) for _ in range(6)]
    rig.engine.close()
    frozen = rig.pool.view.copy()
    results = rig.collect(6)
    assert set(results) == set(tickets)
    assert {r.status for r in results.values()} <= {CopyStatus.DONE, CopyStatus.CANCELLED}
    assert np.array_equal(rig.pool.view, frozen)
    with pytest.raises(ValueError, match="closed"):
        rig.submit(Direction.GATHER, extents)
    rig.engine.close()


def test_memory_outlives_its_caller(factory: Callable[[Pool, object], CopyEngine]) -> None:
    owner = Owner()
    rig = make_rig(factory, 32 << 20, owner)
    pool = rig.pool
    memory, shape, extents = big_job(rig)
    want = [shape.read(memory.view, block) for block in (1, 96)]
    alive = weakref.ref(owner)
    ticket = rig.submit(Direction.GATHER, extents)
    # The mapping, the layout and the arrays have no other owner from here on.
    extents.blocks[:] = 0
    extents.pool_offsets[:] = 2**63
    del memory, extents, owner
    gc.collect()
    assert alive() is not None
    assert rig.collect(1)[ticket].status is CopyStatus.DONE
    for payload, at in zip(want, (0, 95 * shape.payload_bytes), strict=True):
        assert pool.view[at : at + shape.payload_bytes].tobytes() == payload
    rig.engine.close()

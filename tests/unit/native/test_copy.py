"""What only the native copy engine, its mappings and its layouts promise."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import select
import weakref
from pathlib import Path

import numpy as np
import pytest
from kvferry_native import GATHER, CopyEngine, Layout, Mapping
from kvferry_sidecar.engines.base import CopyStatus
from support.copying import (
    EngineMemory,
    Owner,
    Pool,
    Shape,
    block_outermost,
    layer_outermost,
)
from support.waiting import wait_until


def test_owner_is_dropped_once_collected() -> None:
    """Of the native engine alone: the host engine holds the pool's owner for its own life."""
    shape = layer_outermost(1, 4096, 4096, 4)
    memory, pool, engine, owner = (
        EngineMemory(shape.total_bytes),
        Pool(1 << 16),
        CopyEngine(1),
        Owner(),
    )
    alive = weakref.ref(owner)
    engine.submit(
        1,
        GATHER,
        shape.layout(memory),
        np.array([1], np.int32),
        pool.address,
        np.array([0], np.uint64),
        False,
        owner=owner,
    )
    del owner
    wait_until(lambda: select.select([engine.eventfd], [], [], 0)[0], "the copy ends")
    gc.collect()
    assert alive() is not None, "dropped before its completion was collected"
    assert len(engine.poll()) == 1
    assert alive() is None
    engine.close()


class _Poll(ctypes.Structure):
    """struct pollfd."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def test_a_copy_ends_while_no_python_can_run() -> None:
    """PyDLL calls without giving the GIL away: a copy thread that wanted it would never end."""
    shape = layer_outermost(4, 1 << 18, 1 << 18, 17)
    memory, pool, engine = EngineMemory(shape.total_bytes), Pool(16 << 20), CopyEngine(2)
    blocks = np.arange(1, 17, dtype=np.int32)
    offsets = (blocks.astype(np.uint64) - np.uint64(1)) * np.uint64(shape.payload_bytes)
    waits = _Poll(engine.eventfd, select.POLLIN, 0)
    engine.submit(1, GATHER, shape.layout(memory), blocks, pool.address, offsets, True)
    assert ctypes.PyDLL(None).poll(ctypes.byref(waits), 1, 90_000) == 1
    (done,) = engine.poll()
    assert done.status == CopyStatus.DONE
    assert done.crcs is not None
    engine.close()


def test_jobs_are_bounded() -> None:
    shape = layer_outermost(1, 4096, 4096, 4)
    memory, pool, engine = (
        EngineMemory(shape.total_bytes),
        Pool(1 << 16),
        CopyEngine(1, jobs_max=2),
    )

    def submit(ticket: int) -> None:
        engine.submit(
            ticket,
            GATHER,
            shape.layout(memory),
            np.array([1], np.int32),
            pool.address,
            np.array([0], np.uint64),
            False,
        )

    submit(1)
    submit(2)
    with pytest.raises(ValueError, match="2 jobs are pending"):
        submit(3)
    assert engine.pending == 2
    wait_until(lambda: select.select([engine.eventfd], [], [], 0)[0], "a copy ends")
    wait_until(lambda: engine.poll() or engine.pending == 0, "completions were polled")
    submit(3)
    engine.close()


def test_an_injected_failure_ends_as_failed() -> None:
    shape = layer_outermost(1, 4096, 4096, 4)
    memory, pool, engine = EngineMemory(shape.total_bytes), Pool(1 << 16), CopyEngine(1)
    engine.inject_failures(1)
    for ticket in (1, 2):
        engine.submit(
            ticket,
            GATHER,
            shape.layout(memory),
            np.array([1], np.int32),
            pool.address,
            np.array([0], np.uint64),
            False,
        )
    statuses: dict[int, int] = {}

    def both() -> bool:
        statuses.update((done.ticket, done.status) for done in engine.poll())
        return len(statuses) == 2

    wait_until(both, "two completions")
    assert statuses == {1: CopyStatus.FAILED, 2: CopyStatus.DONE}
    engine.close()


def test_mapping_refuses_what_could_raise_sigbus() -> None:
    fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    with pytest.raises(ValueError, match="lacks F_SEAL_SHRINK"):
        Mapping(fd, 8192)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError, match="8193 bytes of a file of 8192 bytes"):
        Mapping(fd, 8193)
    mapping = Mapping(fd, 8192)
    assert mapping.sealed
    os.close(fd)
    ctypes.memset(mapping.address, 0, 8192)  # usable without the descriptor
    unsealable = os.memfd_create("kv", 0)
    os.ftruncate(unsealable, 8192)
    with pytest.raises(ValueError, match="lacks F_SEAL_SHRINK"):
        Mapping(unsealable, 8192)
    os.close(unsealable)
    reader, writer = os.pipe()
    with pytest.raises(ValueError, match="not a memfd or a file"):
        Mapping(reader, 8192)
    os.close(reader)
    os.close(writer)


def test_mapping_takes_a_tmpfs_file_and_says_it_is_not_sealed() -> None:
    path = f"/dev/shm/kvferry-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    Path(path).unlink()
    os.ftruncate(fd, 4096)
    mapping = Mapping(fd, 4096)
    assert not mapping.sealed
    os.pwrite(fd, (2**64 - 2).to_bytes(8, "little"), 4088)
    assert mapping.load_u64(4088) == 2**64 - 2
    for offset in (4, 4089, 4096, 2**63):
        with pytest.raises(ValueError, match="no aligned 8-byte word"):
            mapping.load_u64(offset)
    os.close(fd)


def _resident_bytes(mapping: Mapping) -> int:
    """Return how much of a mapping this process has pages of, by the kernel's account."""
    at = f"{mapping.address:x}-"
    _, _, own = Path("/proc/self/smaps").read_text().partition(f"\n{at}")
    return int(own.partition("\nRss:")[2].split()[0]) * 1024


def _threads_ahead() -> bool:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return "kvferry-ahead" in names


def _sealed_memfd(total_bytes: int) -> int:
    fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, total_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def test_pages_are_mapped_ahead_of_the_first_copy() -> None:
    total_bytes = (8 << 20) + 4096
    fd = _sealed_memfd(total_bytes)
    os.posix_fallocate(fd, 0, total_bytes)
    touched, untouched = Mapping(fd, total_bytes, ahead=True), Mapping(fd, total_bytes)
    wait_until(lambda: _resident_bytes(touched) == total_bytes, "all pages are mapped")
    assert _resident_bytes(untouched) == 0
    Mapping(fd, total_bytes, ahead=True)  # and gone again, while its thread runs or before
    os.close(fd)


def test_mapping_ahead_leaves_the_holes_of_a_file() -> None:
    fd = _sealed_memfd(8 << 20)
    os.posix_fallocate(fd, 0, 4 << 20)
    before = os.fstat(fd).st_blocks
    mapping = Mapping(fd, 8 << 20, ahead=True)
    wait_until(lambda: not _threads_ahead(), "nothing maps pages ahead")
    assert _resident_bytes(mapping) == 0
    assert os.fstat(fd).st_blocks == before
    os.close(fd)


@pytest.mark.parametrize("total_bytes", [1 << 20, 65 << 20])
def test_memory_is_unmapped_once_nothing_uses_it(total_bytes: int) -> None:
    fd = _sealed_memfd(total_bytes)
    mapping = Mapping(fd, total_bytes)
    os.close(fd)
    start, one = f"{mapping.address:x}-", np.array([4096])
    layout = Layout(mapping, np.array([0]), one, one, 2)
    assert not mapping.let_go()
    ctypes.memset(mapping.address, 7, total_bytes)  # still there
    del layout
    wait_until(mapping.let_go, "it is unmapped")
    assert f"\n{start}" not in Path("/proc/self/maps").read_text()
    assert mapping.let_go()
    with pytest.raises(ValueError, match="let go"):
        mapping.load_u64(0)


@pytest.mark.parametrize("total_bytes", [4096, (65 << 20) + 4096], ids=["small", "large"])
def test_a_mapping_goes_with_its_last_user(total_bytes: int) -> None:
    """Refused memory, or memory that is replaced: nobody asks whether it is unmapped."""
    fd = _sealed_memfd(total_bytes)
    inode = f" {os.fstat(fd).st_ino} "
    mapping = Mapping(fd, total_bytes, ahead=True)
    assert inode in Path("/proc/self/maps").read_text()
    del mapping
    wait_until(lambda: inode not in Path("/proc/self/maps").read_text(), "all of it is unmapped")
    os.close(fd)


def test_mapping_needs_a_writable_descriptor() -> None:
    fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    with pytest.raises(PermissionError, match="read-write"):
        Mapping(read_only, 4096)
    os.close(read_only)
    os.close(fd)


@pytest.mark.parametrize(
    ("offset", "stride", "length", "blocks"),
    [
        (0, 4096, 4097, 4),
        (-1, 4096, 16, 4),
        (0, 2**62, 16, 4),
        (0, -4096, 16, 4),
        (2**63 - 1, 1, 2**63 - 1, 4),
        (0, 4096, 0, 4),
        (0, 4096, 4096, 0),
        (0, 0, 16, 2**31),
    ],
)
def test_layout_refuses_runs_that_leave_the_mapping(
    offset: int, stride: int, length: int, blocks: int
) -> None:
    memory = EngineMemory(4 * 4096)
    arrays = [np.array([x], np.int64) for x in (offset, stride, length)]
    with pytest.raises(ValueError, match="layout refused"):
        Layout(memory.mapping, *arrays, blocks)


def test_layout_merges_runs_that_always_touch() -> None:
    memory = EngineMemory(1 << 20)
    touching = block_outermost(5, 512, 0, 24)
    assert touching.layout(memory).num_runs == 1
    apart = Shape("stride", [0, 512], [1024, 2048], [512, 512], 8)  # touch in block 0 only
    assert apart.layout(memory).num_runs == 2

"""KV memory and fence page as another process sees them: through the descriptor."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvferry_connector import export, worker_half
from kvferry_connector.config import FerryConfig
from kvferry_connector.export import ExportError, FencePage, KvMemory
from kvferry_connector.wire.attach import Memory
from kvferry_connector.wire.names import BOUND_STEP_OFFSET, DONE_STEP_OFFSET
from support.parallel import parallel_config

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[KvMemory]:
    memory = KvMemory()
    yield memory
    memory.close()


def test_large_int8_zeros_are_ours_without_a_copy(memory: KvMemory) -> None:
    with memory.context():
        tensor = torch.zeros(MIB + 5, dtype=torch.int8, device="cpu")
    ((handle),) = memory.handles()
    assert handle.memory == Memory(0, MIB + mmap.PAGESIZE)
    assert os.fstat(handle.fd).st_size == handle.memory.total_bytes
    assert tensor.data_ptr() % mmap.PAGESIZE == 0
    assert not tensor.any()
    with mmap.mmap(handle.fd, handle.memory.total_bytes) as other:
        tensor[3] = 42
        assert other[3] == 42
        other[MIB + 4] = 17
    assert tensor[MIB + 4] == 17


@pytest.mark.parametrize("size", [(2 * MIB,), ((2, MIB),), (2, MIB), ([2, MIB],)])
def test_all_spellings_of_a_size(memory: KvMemory, size: tuple[Any, ...]) -> None:
    expected = torch.zeros(*size, dtype=torch.int8).shape
    with memory.context():
        assert torch.zeros(*size, dtype=torch.int8).shape == expected
        assert torch.zeros(size=(2, MIB), dtype=torch.int8).shape == (2, MIB)
    assert len(memory.handles()) == 2


def test_everything_else_is_torchs(memory: KvMemory) -> None:
    with memory.context():
        torch.zeros(MIB - 1, dtype=torch.int8)
        torch.zeros(MIB, dtype=torch.float32)
        torch.zeros(MIB, dtype=torch.int8, device="meta")
        torch.zeros(MIB, dtype=torch.int8, requires_grad=False)
        torch.ones(MIB, dtype=torch.int8)
        torch.zeros((), dtype=torch.int8)
    torch.zeros(MIB, dtype=torch.int8)
    assert memory.handles() == ()


def test_a_buffer_is_found_by_any_view_of_its_storage(memory: KvMemory) -> None:
    with memory.context():
        tensors = [torch.zeros(2 * MIB, dtype=torch.int8) for _ in range(2)]
    for number, tensor in enumerate(tensors):
        view = tensor[MIB:].view(torch.float32).view(-1, 4).t()
        assert memory.find(view).buffer == number
    with pytest.raises(ExportError, match="not allocated through get_mem_pool_context"):
        memory.find(torch.zeros(2 * MIB, dtype=torch.int8))


def test_the_size_is_sealed(memory: KvMemory) -> None:
    with memory.context():
        torch.zeros(MIB, dtype=torch.int8)
    ((handle),) = memory.handles()
    assert fcntl.fcntl(handle.fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    with pytest.raises(PermissionError):
        os.truncate(handle.fd, 0)
    assert fcntl.fcntl(handle.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_tensors_outlive_the_descriptors() -> None:
    memory = KvMemory()
    with memory.context():
        tensor = torch.zeros(MIB, dtype=torch.int8)
    memory.close()
    del memory
    tensor.fill_(1)
    assert int(tensor.sum(dtype=torch.int64)) == MIB


def is_told(memory: KvMemory, log: pytest.LogCaptureFixture, words: str, count: int) -> None:
    """Ask for so much: the engine has its zeros, and the log the reason why they are not shared."""
    log.clear()
    shared = len(memory.handles())
    with memory.context():
        assert torch.zeros(count, dtype=torch.int8).sum() == 0
    assert re.search(f"no cache: .*{words}", log.text)
    assert len(memory.handles()) == shared


def test_want_of_descriptors_is_told_with_a_remedy(memory: KvMemory, ferry_log) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        is_told(memory, ferry_log, "ulimit -n", MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_than_there_is_is_not_shared_and_nothing_of_it_is_taken(
    memory: KvMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ferry_log
) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{2 * MIB}\n")
    monkeypatch.setattr(export, "_CGROUP_LIMIT", limit)
    with memory.context():
        torch.zeros(2 * MIB, dtype=torch.int8)
    is_told(memory, ferry_log, "2101248 bytes .* 2097152 are available; lower", 2 * MIB + 1)
    limit.write_text("max\n")
    with memory.context():
        torch.zeros(2 * MIB + 1, dtype=torch.int8)
    assert len(memory.handles()) == 2


def test_a_refused_size_is_told_with_a_remedy(memory: KvMemory, ferry_log) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        is_told(memory, ferry_log, "lower kv_cache_memory_bytes", 2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_fence_page_is_two_words_of_their_own_cache_lines() -> None:
    page = FencePage()
    with mmap.mmap(page.fd, os.fstat(page.fd).st_size) as other:
        words = [
            ctypes.c_uint64.from_buffer(other, at) for at in (BOUND_STEP_OFFSET, DONE_STEP_OFFSET)
        ]
        page.bound(2**63 + 1)
        page.done(7)
        assert [word.value for word in words] == [2**63 + 1, 7]
        del words
    page.close()


def test_an_engine_that_cannot_share_a_page_starts_and_registers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_args: object) -> None:
        raise ExportError("no memory is to be had")

    monkeypatch.setattr(export, "_shared_memory", refuse)
    monkeypatch.setattr(worker_half, "describe_rank", lambda *_, **__: None)
    vllm_config = SimpleNamespace(parallel_config=parallel_config(0))
    half = worker_half.WorkerHalf(vllm_config, None, FerryConfig())
    with pytest.raises(ExportError, match="no memory"):  # entry.py guards it
        half.register({})
    assert half.handshake() is None
    half.shutdown()

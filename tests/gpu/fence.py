"""The stream's word: what was queued before it is in memory when the host reads it."""

from __future__ import annotations

import mmap
import statistics
import time
from pathlib import Path
from typing import Any

import structlog
from gpu import device
from gpu.ipc import memory_of
from gpu.peer import Peer, peer
from gpu.runner import Sizes
from kvferry_connector.wire.names import DONE_STEP_OFFSET, FENCE_PAGE_BYTES
from kvferry_sidecar.engines.cuda_memory import CudaMemories
from support.waiting import wait_until

BEFORE = 40  # fills of other bytes ahead of the right one: a millisecond or two of 64 MiB each
WRONG = 0xFF


def order(sizes: Sizes) -> dict[str, Any]:
    """Rounds of fill and word: no byte may be of another round; without waiting some are."""
    with peer() as engine:
        cuda = engine.export(sizes.fill_bytes)
        opened = CudaMemories(device.driver(), structlog.get_logger()).open(memory_of(cuda), 1)
        with Path(engine.do("fence")["path"]).open("r+b") as file:
            page = mmap.mmap(file.fileno(), FENCE_PAGE_BYTES, access=mmap.ACCESS_READ)
        start_us, stale = [], 0
        for number in range(1, sizes.rounds + 1):
            value = 1 + number % 200
            start_us.append(one_round(engine, page, opened.address, opened.total_bytes, value))
        for number in range(1, sizes.rounds // 5 + 1):
            value = 201 + number % 40
            stale += not waits_not(engine, opened.address, opened.total_bytes, value)
    return {
        "rounds": sizes.rounds, "visible to copied us, p50": statistics.median(start_us),
        "stale without waiting": stale,
    }  # fmt: skip


def recorded_again(sizes: Sizes) -> dict[str, Any]:
    """Why fences are words and not events: what an event says after it was recorded again."""
    buffer, event = device.DeviceBuffer(sizes.fill_bytes), device.Event()
    figures: dict[str, Any] = {"never recorded": event.query()}
    busy, idle = device.driver().stream(), device.driver().stream()
    for name, streams in (
        ("once", [busy]),
        ("again, same", [busy, busy]),
        ("elsewhere", [busy, idle]),
    ):
        for stream in streams:
            if stream is busy:
                for _ in range(BEFORE):
                    device.fill(buffer.address, WRONG, buffer.total_bytes, busy.value or 0)
            event.record(stream)
        figures[name] = event.query()
        device.settle()
        figures[f"{name}, after"] = event.query()
    event.close()
    buffer.free()
    assert not any(code for name, code in figures.items() if "after" in name), "it never ends"
    return figures


def one_round(engine: Peer, page: mmap.mmap, address: int, count: int, value: int) -> float:
    """Wait for the word, then copy; returns microseconds from its sight to the first bytes."""
    engine.do("late", value=value, wrong=WRONG, times=BEFORE)
    wait_until(lambda: word(page) == value, f"word {value}", every_s=0.0)
    seen_s = time.perf_counter()
    device.read(address, 4096)
    first_us = (time.perf_counter() - seen_s) * 1e6
    found = device.read(address, count)
    assert found == bytes([value]) * count, f"round {value}: other bytes than before the word"
    return round(first_us, 1)


def waits_not(engine: Peer, address: int, count: int, value: int) -> bool:
    """The negative control: whether a copy that waits for nothing happens to be right."""
    engine.do("late", value=value, wrong=WRONG, times=BEFORE)
    return device.read(address, count) == bytes([value]) * count


def word(page: mmap.mmap) -> int:
    """Return the word."""
    return int.from_bytes(page[DONE_STEP_OFFSET : DONE_STEP_OFFSET + 8], "little")

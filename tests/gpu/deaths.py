"""SIGKILL of either side of a mapping."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import structlog
from gpu import device
from gpu.ipc import memory_of, ms_since
from gpu.peer import peer
from gpu.runner import Sizes
from kvferry_sidecar.engines.cuda_driver import CudaError
from kvferry_sidecar.engines.cuda_memory import CudaMemories
from support.waiting import wait_until

VALUE = 0x3C


def exporter(sizes: Sizes) -> dict[str, Any]:
    """The exporter is killed while we read: reads go on being right, closing gives all back."""
    total_bytes = sizes.fill_bytes * 4
    with peer() as engine:
        cuda = engine.export(total_bytes, VALUE)
        opened = CudaMemories(device.driver(), structlog.get_logger()).open(memory_of(cuda), 1)
        free_mapped = device.free_bytes()
        engine.kill()
    for _ in range(100):
        assert device.read(opened.address, 4096) == bytes([VALUE]) * 4096
    whole = device.read(opened.address, opened.total_bytes)
    assert whole == bytes([VALUE]) * opened.total_bytes, "the dead engine's bytes changed"
    held = device.free_bytes() - free_mapped
    started_s = time.monotonic()
    del opened
    figures = {"freed by the death": held, "close ms": ms_since(started_s)}
    if not sizes.small:
        wait_until(lambda: device.free_bytes() >= free_mapped + total_bytes, "its memory is free")
        figures["free after ms"] = ms_since(started_s)
    return figures


def goodbyes(sizes: Sizes) -> dict[str, Any]:
    """Memory is freed after we have closed it; freeing it before is only noted."""
    figures: dict[str, Any] = {}
    with peer() as engine:
        memories = CudaMemories(device.driver(), structlog.get_logger())
        opened = memories.open(memory_of(engine.export(sizes.fill_bytes, VALUE)), 1)
        assert device.read(opened.address, 4096) == bytes([VALUE]) * 4096
        del opened
        engine.do("free")
        opened = memories.open(memory_of(engine.export(sizes.fill_bytes, VALUE)), 2)
        for name, work in (
            ("freed while open", lambda: engine.do("free")),
            ("read after that", lambda: device.read(opened.address, 4096)),
        ):
            try:
                work()
                figures[name] = 0
            except CudaError as error:
                figures[name] = error.code
    return figures


def importer(sizes: Sizes) -> dict[str, Any]:
    """The importer is killed ten times: the exporter's bytes stay, and the next one opens them."""
    times_ms = []
    with peer() as engine:
        cuda = engine.export(sizes.fill_bytes, VALUE)
        for _ in range(2 if sizes.small else 10):
            started_s = time.monotonic()
            with peer() as reader:
                reader.do("hold", memory=msgspec.to_builtins(cuda))
                times_ms.append(ms_since(started_s))
                reader.kill()
        opened = CudaMemories(device.driver(), structlog.get_logger()).open(memory_of(cuda), 1)
        assert device.read(opened.address, 4096) == bytes([VALUE]) * 4096
    return {"start to open ms": times_ms}

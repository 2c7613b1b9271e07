"""The host pool as a GPU reaches it, and what this process takes of the GPU."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import structlog
from gpu import device
from gpu.peer import peer
from gpu.runner import Sizes
from kvferry_sidecar.engines.base import PoolSpan
from kvferry_sidecar.engines.cuda_memory import PinnedPool

from bench.common import plain


@contextmanager
def shared_pool(total_bytes: int) -> Iterator[tuple[PoolSpan, mmap.mmap]]:
    """Yield POSIX shared memory as the pool has it."""
    fd = os.memfd_create("pool")
    os.posix_fallocate(fd, 0, total_bytes)
    memory = mmap.mmap(fd, total_bytes)
    os.close(fd)
    view = np.frombuffer(memory, dtype=np.uint8)
    yield PoolSpan(view.ctypes.data, total_bytes, total_bytes, 16 << 20, memory), memory
    del view
    memory.close()


def pin(sizes: Sizes) -> dict[str, Any]:
    """Seconds per GiB to pin and give back, and what the GPU's tables take for it."""
    free_before = device.free_bytes()
    with shared_pool(sizes.pool_bytes) as (span, _):
        pinned = PinnedPool(device.driver(), span, structlog.get_logger())
        started_s = time.monotonic()
        pinned.start(0)
        pinned.wait(span.total_bytes)
        pinned_s = time.monotonic()
        taken = free_before - device.free_bytes()
        pinned.close()
        given_s = time.monotonic() - pinned_s
    gib = sizes.pool_bytes / (1 << 30)
    return {"s per GiB": (pinned_s - started_s) / gib, "back s per GiB": given_s / gib,
            "GPU bytes": taken}  # fmt: skip


def footprint(sizes: Sizes) -> dict[str, Any]:
    """MiB of the GPU that a sidecar takes: its context alone, and ready to copy.

    By the free memory that another process sees, with modules loaded lazily and at the start.
    """
    free_before = device.free_bytes()
    figures: dict[str, Any] = {}
    for loading in ("LAZY", "EAGER"):
        with peer(environment={"CUDA_MODULE_LOADING": loading}) as sidecar:
            for verb in ("context", "copies"):
                host_mib = sidecar.do(verb)["rss_mib"]
                taken_mib = (free_before - device.free_bytes()) / (1 << 20)
                figures[f"{verb}, {loading.lower()}"] = {"MiB": taken_mib, "host MiB": host_mib}
    taken_mib = figures["copies, lazy"]["MiB"]
    return figures | {"goals": [plain("GPU memory of a sidecar, per GPU", taken_mib, "MiB")]}

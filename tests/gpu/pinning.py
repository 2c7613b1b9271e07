"""The host pool as a GPU reaches it, and what this process takes of the GPU."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import structlog
from gpu import device
from gpu.runner import Env, Sizes
from kvferry_sidecar.engines.base import PoolSpan
from kvferry_sidecar.engines.cuda_memory import PinnedPool


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
    """Bytes of the GPU that a context of this process takes."""
    if sizes.small:
        raise Env("a GPU made of host memory has no contexts")
    import torch  # only on the machine that has it: its own view of the free memory

    free_before, _ = torch.cuda.mem_get_info()
    code = (
        "from gpu import device; device.driver(); print(device.free_bytes(), flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    free_after, _ = torch.cuda.mem_get_info()
    child.communicate("\n")
    return {"context MiB": (free_before - free_after) >> 20}

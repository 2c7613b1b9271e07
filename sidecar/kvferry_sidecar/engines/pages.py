"""Pages of the pool before a GPU's driver takes them, and threads near a GPU."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvferry_sidecar.placement import processors

_POPULATE_WRITE = 23  # MADV_, Linux 5.14
_piece_bytes = 256 << 20
SYSTEM = Path("/")


def populate(address: int, total_bytes: int, threads: int) -> bool:
    """Map pages that may be there already, in several threads; contents stay.

    Registering touches page by page in one thread, which takes many times as long. Returns False
    where the kernel has no such call, or no thread is to be had: registering then does it.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def one(start: int) -> bool:
        count = min(_piece_bytes, total_bytes - start)
        return not madvise(address + start, count, _POPULATE_WRITE)

    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="kvferry-touch") as pool:
            return all(pool.map(one, range(0, total_bytes, _piece_bytes)))
    except RuntimeError:  # can't start new thread; copies would wait for these pages for ever
        return False


def bind_near(bus_id: str, root: Path = SYSTEM) -> int | None:
    """Keep the calling thread on the processors of a PCI device's NUMA node; returns the node.

    None, and nothing is changed, where there is one node or none of its processors is ours.
    """
    try:
        text = (root / "sys/bus/pci/devices" / bus_id.lower() / "numa_node").read_text()
        node = int(text)
        cpus = (root / f"sys/devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return None
    near = processors(cpus) & os.sched_getaffinity(0)
    if node < 0 or not near:
        return None
    os.sched_setaffinity(0, near)
    return node

"""Resident memory of a process by what it is for, from /proc/PID/smaps."""

from __future__ import annotations

import re
from pathlib import Path

MIB = 1 << 20
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+\s*(.*)$")
# The pool of kvferry, and the engines' KV memory that either server maps.
_POOL, _ENGINE = ("/dev/shm/kvferry-",), ("/memfd:", "/dev/shm/lmcache_kv_")


def resident(pid: int) -> float:
    """Return all resident MiB of a process, shared ones included; 0 is the caller."""
    for line in Path(f"/proc/{pid or 'self'}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Rss")


def beyond_pool(pid: int, pool_bytes: int) -> float:
    """Return a server's resident MiB without its pool and the engines' KV memory.

    A pool that is anonymous memory is the mapping that is at least as large; what such a mapping
    holds beyond the pool's size counts.
    """
    sums = {"pool": 0, "engine": 0, "beyond": 0}
    kind, spare_kib = "beyond", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := _MAPPING.match(line):
            size, path = int(found[2], 16) - int(found[1], 16), found[3]
            kind = "beyond"
            if path.startswith(_POOL) or (not path and size >= pool_bytes):
                kind = "pool"
            elif path.startswith(_ENGINE):
                kind = "engine"
        elif line.startswith("Rss:"):
            kib = int(line.split()[1])
            if kind == "pool":
                spare_kib += max(0, kib - pool_bytes // 1024)
            sums[kind] += kib
    return (sums["beyond"] + spare_kib) / 1024

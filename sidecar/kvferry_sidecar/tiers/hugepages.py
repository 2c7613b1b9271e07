"""A pool on huge pages that the operator reserved: its segment is a file in a hugetlbfs mount.

Shared memory gets huge pages by itself only where the kernel is told to
(``transparent_hugepage/shmem_enabled``). Reserved ones need no such thing, are never swapped, and
are charged to the hugetlb controller of a cgroup, not to its memory.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvferry_sidecar.errors import PoolSegmentError

_MOUNTS = Path("/proc/self/mounts")
_SIZES = Path("/sys/kernel/mm/hugepages")


def page_bytes(folder: Path) -> int:
    """Return the page size of a hugetlbfs mount. Raises PoolSegmentError when it is none."""
    mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    kind = next((mount[2] for mount in reversed(mounts) if mount[1] == str(folder)), "")
    if kind != "hugetlbfs":
        raise PoolSegmentError(
            f"tiers.host.hugepages_dir = {str(folder)!r} is {kind or 'no mount'}, not hugetlbfs",
            f"mount -t hugetlbfs none {folder} (in a pod: a volume of medium HugePages), or leave "
            "it empty",
        )
    return os.statvfs(folder).f_bsize


def free_bytes(folder: Path, page: int) -> int:
    """Return what may still be taken: reserved pages that nobody has, within the mount's bound."""
    counts = _SIZES / f"hugepages-{page >> 10}kB"
    free = int((counts / "free_hugepages").read_text())
    promised = int((counts / "resv_hugepages").read_text())
    space = os.statvfs(folder)
    bound = space.f_bavail if space.f_blocks else free
    return page * max(0, min(free - promised, bound))


def remedy(segment_bytes: int, page: int) -> str:
    """Say how to get the pages."""
    pages = -(-segment_bytes // page)
    return (
        f"reserve {pages} more (echo N > {_SIZES}/hugepages-{page >> 10}kB/nr_hugepages, best at "
        "boot, or resources.limits.hugepages-* of a pod), lower tiers.host.bytes, or leave "
        "tiers.host.hugepages_dir empty"
    )

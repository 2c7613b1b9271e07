"""How the C library's heap deals with freed memory."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
kept_bytes_max = 8 << 20  # free at a heap's end, before it is given back
mapped_bytes_min = 1 << 20  # larger arrays get pages of their own, given back at once


def keep_freed_pages() -> None:
    """Keep some freed pages instead of giving each back to the kernel and faulting it in again.

    A lookup of 8,192 hashes frees about 160 pages, which cost it as much time as finding the hit.
    Does nothing where the C library has no such settings (musl).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, mapped_bytes_min)
        mallopt(_M_TRIM_THRESHOLD, kept_bytes_max)

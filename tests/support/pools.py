"""Segments, keys and payload patterns for the tests of the pool."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from kvferry_native import Pool
from numpy.typing import NDArray

Keys = NDArray[np.uint8]


def key_of(number: int) -> bytes:
    """16 bytes spread like a real key."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def keys_of(*numbers: int) -> Keys:
    """Keys as the pool takes them, (n, 16)."""
    flat = b"".join(key_of(n) for n in numbers)
    return np.frombuffer(flat, np.uint8).reshape(len(numbers), 16)


def pattern_of(number: int, nbytes: int) -> bytes:
    """The payload that belongs to a key: no two keys share a stretch of it."""
    return hashlib.shake_128(b"payload" + number.to_bytes(8, "little")).digest(nbytes)


@contextmanager
def segment(arena_bytes: int, slab_bytes: int, keys_max: int) -> Iterator[tuple[int, int]]:
    """A memfd of the right size: (fd, segment_bytes)."""
    nbytes = Pool.segment_bytes_for(arena_bytes, slab_bytes, keys_max)
    fd = os.memfd_create("kvferry-test-pool")
    try:
        os.ftruncate(fd, nbytes)
        yield fd, nbytes
    finally:
        os.close(fd)

"""The one interface of copy engines; tests/conformance/test_copy_engine.py runs over each."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray


class Direction(enum.IntEnum):
    """GATHER: engine blocks -> pool (save). SCATTER: pool -> engine blocks (load)."""

    GATHER = 0
    SCATTER = 1


class CopyStatus(enum.IntEnum):
    """How a copy ended; in every case nothing of it runs any more."""

    DONE = 0
    CANCELLED = 1
    CHECKSUM = 2
    FAILED = 3


class Extents(msgspec.Struct, frozen=True):
    """What one rank's copy touches: block ids of the engine against payloads in the pool.

    blocks: int32 (n,), pool_offsets: uint64 (n,) bytes from the pool's start, of this rank's
    shard. seeds: uint32 (n,) CRC seeds; expected: uint32 (n,) for a verified SCATTER, else None.
    """

    layout: object
    blocks: NDArray[np.int32]
    pool_offsets: NDArray[np.uint64]
    seeds: NDArray[np.uint32]
    expected: NDArray[np.uint32] | None
    crc: bool


class CopyResult(msgspec.Struct, frozen=True):
    """One finished copy. ``bad_index``: first chunk whose checksum differed, -1 if none."""

    ticket: int
    status: CopyStatus
    moved_bytes: int
    seconds: float
    bad_index: int
    crcs: NDArray[np.uint32] | None


@dataclass(frozen=True, slots=True)
class PoolSpan:
    """The pool's segment in this process; its arena of whole slabs lies at the end.

    ``owner`` is kept alive by every copy.
    """

    address: int
    total_bytes: int
    arena_bytes: int
    slab_bytes: int
    owner: object = None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A GPU that is copied from and to. ``device``: its UUID in hexadecimal.

    ``free_bytes`` and ``total_bytes`` are the driver's; ``staging_bytes`` is what copies allocated,
    ``mapped_bytes`` the engines' memory that is open here. The driver's own context is in neither.
    """

    device: str
    total_bytes: int
    free_bytes: int
    staging_bytes: int
    mapped_bytes: int


class CopyEngine(Protocol):
    """Moves bytes between engine memory and the pool, asynchronously."""

    def wake_fd(self) -> int:
        """Descriptor that becomes readable when results wait."""

    def submit(self, ticket: int, direction: Direction, extents: Extents) -> None:
        """Start a copy; its memory belongs to it until its result was collected."""

    def cancel(self, ticket: int) -> None:
        """Stop early; the result still comes, after the last piece stopped."""

    def collect(self) -> list[CopyResult]:
        """Results since the last call; clears wake_fd."""

    def close(self) -> None:
        """Drain and stop."""

"""A slice of a copy, as every way of moving it takes it: chunks, their places here and there."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.engines.base import Direction, Extents
from kvferry_sidecar.geometry.device import CudaLayout


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks to move. ``blocks``: int64 (n,); ``hosts``: int64 (n,), where each payload lies.

    ``pins``: int64 (n,), the registration of each payload's host memory.
    """

    layout: CudaLayout
    direction: Direction
    blocks: NDArray[np.int64]
    hosts: NDArray[np.int64]
    pins: NDArray[np.int64]

    @property
    def moved_bytes(self) -> int:
        """All bytes of it."""
        return len(self.blocks) * self.layout.payload_bytes


@dataclass(frozen=True, slots=True)
class Segments:
    """Contiguous pieces: addresses on the GPU and on the host, and lengths, all int64 (n,)."""

    device: NDArray[np.int64]
    host: NDArray[np.int64]
    lengths: NDArray[np.int64]


def segments_of(part: Part) -> Segments:
    """Return every run of every chunk."""
    base, at = part.layout.memory.address, 0
    device, host, lengths = [], [], []
    for rect in part.layout.rects:
        rows = np.arange(rect.count, dtype=np.int64)
        starts = base + rect.offset + part.blocks * rect.stride
        device.append((starts[:, None] + rows * rect.pitch).ravel())
        host.append((part.hosts[:, None] + at + rows * rect.length).ravel())
        lengths.append(np.full(len(part.blocks) * rect.count, rect.length, np.int64))
        at += rect.length * rect.count
    return Segments(np.concatenate(device), np.concatenate(host), np.concatenate(lengths))


def joined(part: Part) -> list[tuple[int, int, int]]:
    """Return (first chunk, chunks, bytes) of payloads that follow each other in the pool.

    A copy over two registrations is none that the driver knows.
    """
    payload_bytes = part.layout.payload_bytes
    apart = (np.diff(part.hosts) != payload_bytes) | (np.diff(part.pins) != 0)
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(part.hosts)]
    return [(a, b - a, (b - a) * payload_bytes) for a, b in pairwise(edges)]


def check_extents(extents: Extents, layout: CudaLayout, pool_bytes: int) -> None:
    """Raise ValueError with the first wrong number."""
    chunks = len(extents.blocks)
    lengths: dict[str, Sized] = {"pool offsets": extents.pool_offsets, "seeds": extents.seeds}
    if extents.expected is not None:
        lengths["expected checksums"] = extents.expected
    for name, array in lengths.items():
        if len(array) != chunks:
            raise ValueError(f"copy refused: {chunks} blocks but {len(array)} {name}")
    # Block 0 is the engine's null block: many requests share it, none owns it.
    wrong = np.flatnonzero((extents.blocks < 1) | (extents.blocks >= layout.num_blocks))
    if len(wrong):
        index = int(wrong[0])
        raise ValueError(
            f"copy refused: block {extents.blocks[index]} at index {index} is not in 1 .. "
            f"{layout.num_blocks - 1}"
        )
    reach = pool_bytes - layout.payload_bytes
    far = np.flatnonzero(extents.pool_offsets > np.uint64(max(0, reach)))
    if chunks and (reach < 0 or len(far)):
        index = int(far[0]) if len(far) else 0
        raise ValueError(
            f"copy refused: pool offset {extents.pool_offsets[index]} at index {index} with a "
            f"payload of {layout.payload_bytes} bytes leaves the pool of {pool_bytes} bytes"
        )

"""A copy engine over symbolic memory: one value per engine block and per pool payload.

Copies run when the test says so, in the order it says. A layout is a FakeLayout; the pool's
memory is a dict from payload offset to value, so it works over the fake and the native pool.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field

import numpy as np
from kvferry_sidecar.engines.base import CopyResult, CopyStatus, Direction, Extents


@dataclass(eq=False)
class FakeLayout:
    """Values of a rank's blocks of one group."""

    num_blocks: int
    block_bytes: int = 1024
    values: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Running:
    ticket: int
    direction: Direction
    extents: Extents
    cancelled: bool = False


def checksum(value: int, seed: int) -> int:
    return zlib.crc32(value.to_bytes(16, "little", signed=True), seed)


class FakeCopies:
    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.running: dict[int, Running] = {}
        self.finished: list[CopyResult] = []
        self.fail_next = False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake_fd(self) -> int:
        return self._fd

    def submit(self, ticket: int, direction: Direction, extents: Extents) -> None:
        assert ticket not in self.running
        layout = extents.layout
        assert isinstance(layout, FakeLayout)
        assert len(extents.blocks) == len(extents.pool_offsets) == len(extents.seeds) > 0
        for numbers in (extents.blocks, extents.pool_offsets, extents.seeds):
            assert numbers.flags.c_contiguous, "as the native engine wants them"
        assert extents.blocks.dtype == np.int32
        assert extents.pool_offsets.dtype == np.uint64
        assert extents.blocks.min() >= 1, "the null block is never the end of a copy"
        assert extents.blocks.max() < layout.num_blocks
        self.running[ticket] = Running(ticket, direction, extents)

    def cancel(self, ticket: int) -> None:
        assert ticket in self.running or any(r.ticket == ticket for r in self.finished)
        if ticket in self.running:
            self.running[ticket].cancelled = True

    def collect(self) -> list[CopyResult]:
        done, self.finished = self.finished, []
        return done

    def close(self) -> None:
        os.close(self._fd)

    # --- what the test drives -------------------------------------------------------------

    def finish(self, ticket: int, status: CopyStatus | None = None) -> CopyResult:
        """Run one copy to its end; a cancelled one moves nothing unless told to be late."""
        copy = self.running.pop(ticket)
        if status is None:
            status = CopyStatus.CANCELLED if copy.cancelled else CopyStatus.DONE
        bad_index, crcs = -1, None
        if status is CopyStatus.DONE and copy.direction is Direction.GATHER:
            crcs = self._gather(copy.extents)
        elif status is CopyStatus.DONE:
            bad_index = self._scatter(copy.extents)
            status = CopyStatus.DONE if bad_index < 0 else CopyStatus.CHECKSUM
        moved = len(copy.extents.blocks) * copy.extents.layout.block_bytes
        result = CopyResult(
            ticket,
            status,
            moved if status is CopyStatus.DONE else 0,
            0.001,
            bad_index,
            crcs,
        )
        self.finished.append(result)
        return result

    def tear(self, ticket: int, share: float) -> None:
        """The process dies: a share of one copy has happened, and nobody will tell of it."""
        copy = self.running.pop(ticket)
        extents = copy.extents
        ends = zip(extents.blocks.tolist(), extents.pool_offsets.tolist(), strict=True)
        for block, offset in list(ends)[: int(share * len(extents.blocks))]:
            if copy.direction is Direction.GATHER:
                self.memory[offset] = extents.layout.values.get(block, 0)
            else:
                extents.layout.values[block] = self.memory[offset]

    def finish_all(self) -> None:
        for ticket in list(self.running):
            self.finish(ticket)

    def _gather(self, extents: Extents) -> np.ndarray:
        crcs = []
        triples = zip(extents.blocks, extents.pool_offsets, extents.seeds, strict=True)
        for block, offset, seed in triples:
            value = extents.layout.values.get(int(block), 0)
            self.memory[int(offset)] = value
            crcs.append(checksum(value, int(seed)))
        return np.array(crcs, dtype=np.uint32)

    def _scatter(self, extents: Extents) -> int:
        for index, block in enumerate(extents.blocks):
            value = self.memory[int(extents.pool_offsets[index])]
            extents.layout.values[int(block)] = value
            crc = checksum(value, int(extents.seeds[index]))
            if extents.expected is not None and crc != int(extents.expected[index]):
                return index
        return -1

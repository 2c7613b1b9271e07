"""Memory, layouts and a rig for tests of copy engines."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from kvferry_native import Layout, Mapping
from kvferry_sidecar.engines.base import CopyEngine, CopyResult, Direction, Extents
from numpy.typing import NDArray

GUARD = 0xA5
PAGE = 4096


class Owner:
    """Stands for the pool's segment: engines must keep it alive while they copy."""


@dataclass(frozen=True)
class Pool:
    """Private memory that stands for the pool; `view` shares its bytes."""

    total_bytes: int
    memory: mmap.mmap = field(init=False)
    view: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", mmap.mmap(-1, self.total_bytes))
        object.__setattr__(self, "view", np.frombuffer(self.memory, dtype=np.uint8))
        self.view[:] = GUARD

    @property
    def address(self) -> int:
        return self.view.ctypes.data


class EngineMemory:
    """A sealed memfd as an engine passes it: our own view, and the mapping the copies use."""

    def __init__(self, total_bytes: int, seed: int = 1) -> None:
        fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.mapping = Mapping(fd, total_bytes)
        self.view = np.frombuffer(mmap.mmap(fd, total_bytes), dtype=np.uint8)
        os.close(fd)
        self.view[:] = np.random.default_rng(seed).integers(0, 256, total_bytes, dtype=np.uint8)

    def layout(self, *arrays: NDArray[np.int64], blocks: int) -> Layout:
        """Return a layout over this memory."""
        return Layout(self.mapping, *arrays, blocks)


@dataclass(frozen=True)
class Shape:
    """Run r of block b at offsets[r] + b * strides[r], as Layout has it."""

    name: str
    offsets: list[int]
    strides: list[int]
    lengths: list[int]
    blocks: int

    @property
    def payload_bytes(self) -> int:
        return sum(self.lengths)

    @property
    def total_bytes(self) -> int:
        last = self.blocks - 1
        runs = zip(self.offsets, self.strides, self.lengths, strict=True)
        return max(o + max(last * s, 0) + n for o, s, n in runs) + PAGE

    def layout(self, memory: EngineMemory) -> Layout:
        arrays = [np.array(x, np.int64) for x in (self.offsets, self.strides, self.lengths)]
        return memory.layout(*arrays, blocks=self.blocks)

    def runs(self, block: int) -> list[slice]:
        return [
            slice(o + block * s, o + block * s + n)
            for o, s, n in zip(self.offsets, self.strides, self.lengths, strict=True)
        ]

    def read(self, view: NDArray[np.uint8], block: int) -> bytes:
        return b"".join(view[run].tobytes() for run in self.runs(block))


def layer_outermost(layers: int, run: int, page: int, blocks: int, start: int = 64) -> Shape:
    offsets = [start + layer * blocks * page for layer in range(layers)]
    return Shape(f"layers{layers}x{run}/{page}", offsets, [page] * layers, [run] * layers, blocks)


def block_outermost(layers: int, run: int, gap: int, blocks: int) -> Shape:
    offsets = [layer * (run + gap) for layer in range(layers)]
    stride = layers * (run + gap) + 128
    return Shape(f"blocks{layers}x{run}+{gap}", offsets, [stride] * layers, [run] * layers, blocks)


def per_head(heads: int, run: int, blocks: int) -> Shape:
    """K and V of each head lie in regions of their own."""
    offsets = [
        half * heads * blocks * run + h * blocks * run for h in range(heads) for half in (0, 1)
    ]
    return Shape(f"heads{heads}x{run}", offsets, [run] * len(offsets), [run] * len(offsets), blocks)


SHAPES = [
    layer_outermost(4, 4096, 4096, 32),
    layer_outermost(3, 10112, 65536, 9),  # padded pages, as of a Mamba group
    layer_outermost(2, 3 * PAGE + 40, 4 * PAGE, 12, start=0),
    block_outermost(5, 512, 0, 24),  # runs merge into one
    block_outermost(4, 777, 13, 24),  # no alignment at all
    per_head(8, 256, 40),
    per_head(2, 1, 16),
    Shape("descending", [PAGE * 30, PAGE * 70], [-PAGE, PAGE], [1000, 3000], 24),
    Shape("mixed", [0, 1 << 20, 3 << 20], [640, 8192, 40000], [600, 8191, 33333], 20),
]


@dataclass
class Rig:
    """One engine with its pool; collects results and checks that each came once, by the fd."""

    pool: Pool
    engine: CopyEngine
    tickets: Iterator[int]
    memory: Callable[[int], EngineMemory] = EngineMemory

    def submit(self, direction: Direction, extents: Extents) -> int:
        ticket = next(self.tickets)
        self.engine.submit(ticket, direction, extents)
        return ticket

    def collect(self, count: int) -> dict[int, CopyResult]:
        results: dict[int, CopyResult] = {}
        poller = select.poll()
        poller.register(self.engine.wake_fd(), select.POLLIN)
        end = time.monotonic() + 90
        while len(results) < count:
            assert time.monotonic() < end, f"{len(results)} of {count} results after 90 s"
            if poller.poll(1000):
                found = self.engine.collect()
                assert found, "the descriptor was readable but nothing waited"
                for result in found:
                    assert result.ticket not in results, "a result came twice"
                    results[result.ticket] = result
        return results

    def do(self, direction: Direction, extents: Extents) -> CopyResult:
        ticket = self.submit(direction, extents)
        return self.collect(1)[ticket]


def extents_of(
    layout: Layout,
    blocks: list[int] | NDArray[np.int32],
    offsets: list[int] | NDArray[np.uint64],
    *,
    crc: bool = True,
    seeds: NDArray[np.uint32] | None = None,
    expected: NDArray[np.uint32] | None = None,
) -> Extents:
    ids = np.asarray(blocks, dtype=np.int32)
    return Extents(
        layout=layout,
        blocks=ids,
        pool_offsets=np.asarray(offsets, dtype=np.uint64),
        seeds=np.zeros(len(ids), np.uint32) if seeds is None else seeds,
        expected=expected,
        crc=crc,
    )

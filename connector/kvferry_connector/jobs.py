"""Jobs: how they travel to the ranks, which are open, and the engine's blocks they pin.

A pinned block stays allocated whatever becomes of
its request (finish, abort, preemption), because a copy may still read it: only the reports of
all ranks free it, once per job.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvferry_connector import vllm_compat
from kvferry_connector.wire import hot

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

NO_EPOCH = 0  # of a load that must fail: no sidecar ever has this epoch


class JobOrder(NamedTuple):
    """One job for every rank: encoded once, forwarded byte for byte with its raw ``frames``.

    ``epoch`` is the sidecar's that gave the lease or announced the save rules; another one
    refuses. ``request`` is the id a load is reported under. ``further``: the epochs of the
    sidecars beside the ranks of further nodes.
    """

    job: int
    request: str
    epoch: int
    body: bytes
    frames: tuple[bytes, ...]
    further: Mapping[int, int] = {}

    def epoch_for(self, rank: int) -> int:
        """Return the epoch of the sidecar that this rank must submit to."""
        return self.further.get(rank, self.epoch)


class Report(NamedTuple):
    """The end of a job on one rank; ``status`` as in wire.hot.Outcome."""

    rank: int
    status: str
    reason: str
    shorter_tokens: int = 0


class CompactTableError(ValueError):
    """A table does not say which chunks its blocks are."""


def cut_tables(
    table: Sequence[Sequence[KVCacheBlock]],
    block_tokens: Sequence[int],
    groups: Iterable[int],
    start_tokens: int,
    end_tokens: int,
    *,
    whole: Container[int] = (),
    compact: bool = False,
) -> tuple[list[hot.TableSlice], list[int]]:
    """Return the slices of ``groups`` over ``[start_tokens, end_tokens)`` and their block ids.

    ``table`` is the manager's full table of every group, ``block_tokens`` the effective block
    size B_g of every group; those in ``whole`` are not cut. Another table that ends before
    ``end_tokens`` has no slot per chunk (null blocks are stripped): with ``compact`` it is not cut
    either, as the sidecar knows what is left of a load's; else it raises CompactTableError.
    """
    slices: list[hot.TableSlice] = []
    ids: list[int] = []
    for group in groups:
        size = block_tokens[group]
        first, last = start_tokens // size, -(-end_tokens // size)
        if group in whole or (compact and len(table[group]) < last):
            first, last = 0, len(table[group])
        if len(table[group]) < last:
            raise CompactTableError(f"the table of group {group} ends before token {end_tokens}")
        part = table[group][first:last]
        slices.append(hot.TableSlice(group, first, last - first))
        ids += [block.block_id for block in part]
    return slices, ids


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return block ids as a table frame (int32, little endian)."""
    return struct.pack(f"<{len(ids)}i", *ids)


@dataclass(slots=True)
class Job:
    """An open job: which ranks have reported, and what it pins (nothing for a load).

    ``load_of``: the request of a load, else empty; ``shorter_tokens``: what every rank that failed
    still found whole.
    """

    load_of: str = ""
    block_ids: list[int] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    done: bool = True
    shorter_tokens: int | None = None


class Jobs:
    """The open jobs of one engine. Job numbers grow over its life and are never used again."""

    def __init__(self, world_size: int, pinned_blocks_max: int) -> None:
        self._world_size = world_size
        self.pinned_blocks_max = pinned_blocks_max
        self.pinned_blocks = 0
        self.pool: BlockPool | None = None
        self._open: dict[int, Job] = {}
        self.last = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, job: int) -> bool:
        return job in self._open

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return max(0, self.pinned_blocks_max - self.pinned_blocks)

    def open_load(self, request: str) -> int:
        """Return the number of a new load job."""
        self.last += 1
        self._open[self.last] = Job(load_of=request)
        return self.last

    def open_save(self, block_ids: Iterable[int]) -> int:
        """Pin each block once and return the number of the job that holds them.

        Raises ValueError for the null block, which has no owner, and when no pool is bound.
        """
        if self.pool is None:
            raise ValueError("bind_kv_cache_manager was not called: no block can be pinned")
        ids = list(dict.fromkeys(block_ids))
        vllm_compat.touch(self.pool, ids)
        self.pinned_blocks += len(ids)
        self.last += 1
        self._open[self.last] = Job(block_ids=ids)
        return self.last

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let go of every pinned block inside; nothing may be allocated meanwhile."""
        pool, pins = self.pool, [job.block_ids for job in self._open.values() if job.block_ids]
        if pool is not None:
            for ids in pins:
                vllm_compat.free(pool, ids)
        try:
            yield
        finally:
            if pool is not None:
                for ids in pins:
                    vllm_compat.touch(pool, ids)

    def report(self, number: int, report: Report) -> Job | None:
        """Note one rank's end of a job; returns the job when it was the last one, now closed."""
        job = self._open.get(number)
        if job is None or report.rank in job.ranks:
            return None
        job.ranks.add(report.rank)
        if report.status != "done":
            job.done = False
            whole = (job.shorter_tokens, report.shorter_tokens)
            job.shorter_tokens = min(tokens for tokens in whole if tokens is not None)
        if len(job.ranks) < self._world_size:
            return None
        self.close(number)
        return job

    def close(self, number: int) -> None:
        """Free what a job pins: all ranks have reported, or none was ever told of it."""
        job = self._open.pop(number, None)
        if job is not None and job.block_ids and self.pool is not None:
            self.pinned_blocks -= len(job.block_ids)
            # Tail first: a prefix is worth most at its start.
            vllm_compat.free(self.pool, reversed(job.block_ids))

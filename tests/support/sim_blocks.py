"""Blocks, requests and step outputs of a simulated engine: vLLM's, as far as they are used."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from support.pipeline_bed import BLOCK, HASH_BYTES, chain

CHUNKS_MAX = 8  # of any request
PROMPTS = 2  # that requests are made of


@functools.cache
def hashes_of(prompt: int) -> tuple[bytes, ...]:
    """Return the prefix hashes of an endless prompt's first chunks."""
    frame = chain(prompt, CHUNKS_MAX)
    return tuple(frame[at : at + HASH_BYTES] for at in range(0, len(frame), HASH_BYTES))


@functools.cache
def content(model: int, version: bytes, prompt: int, chunk: int, rank: int, group: int) -> int:
    """Return what a block holds once this chunk was computed with these weights."""
    facts = repr((model, version, prompt, chunk, rank, group)).encode()
    return int.from_bytes(hashlib.blake2b(facts, digest_size=8).digest(), "little")


@dataclass(eq=False)
class SimBlock:
    """``uses`` counts its allocations: a copy must see the same number from start to end."""

    block_id: int
    ref_cnt: int = 0
    uses: int = 0

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


class SimBlockPool:
    """vLLM's BlockPool: ``on_free`` hears of each block that nobody holds any more."""

    def __init__(self, count: int, rng: random.Random, on_free: Callable[[int], None]) -> None:
        self.blocks = [SimBlock(number) for number in range(count)]
        self._rng, self._on_free = rng, on_free
        self._free = self.blocks[1:]

    def room(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[SimBlock]:
        self._rng.shuffle(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        for block in taken:
            block.ref_cnt, block.uses = 1, block.uses + 1
        return taken

    def touch(self, blocks: list[SimBlock]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, f"free block {block.block_id} is pinned"
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[SimBlock]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"block {block.block_id} is freed twice"
            if block.ref_cnt == 0:
                self._free.append(block)
                self._on_free(block.block_id)


@dataclass(eq=False)
class SimRequest:
    """A request of vLLM; ``state``: waiting, loading, loaded, running, gone."""

    request_id: str
    prompt: int
    num_tokens: int
    decode_tokens: int
    local_tokens: int
    groups: int
    state: str = "waiting"
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0
    trace_headers: None = None
    blocks: list[list[SimBlock]] = field(default_factory=list)
    load: tuple[int, int, bytes] = (0, 0, b"")  # local, total, version
    in_flight: int = 0  # steps that run and name it
    failures: int = 0

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        return hashes_of(self.prompt)[: self.num_tokens // BLOCK]

    def all_blocks(self) -> list[SimBlock]:
        return [block for group in self.blocks for block in group]


def output_of(scheduled: dict[str, int]) -> SimpleNamespace:
    """Return a SchedulerOutput."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        kv_connector_block_state=None,
        has_sync_kv_loads=False,
    )

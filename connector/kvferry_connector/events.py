"""KV events of the store, for routers: what this engine's saves put there, and what left it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvferry_connector.wire import hot

if TYPE_CHECKING:
    from vllm.v1.request import Request

saves_max = 4096  # whose end is not known yet; then the oldest is forgotten
events_max = 65_536  # that the engine did not take yet; then the oldest is dropped


class KvEvents:
    """Turns what the sidecar says of its pool into vLLM's events.

    A save is an event only when the sidecar says which of its objects it committed. ``specs`` and
    ``block_tokens`` by group; ``count(name, number=1)`` takes what was dropped.
    """

    def __init__(
        self,
        specs: Sequence[Any],
        block_tokens: Sequence[int],
        hash_tokens: int,
        count: Callable[..., None],
    ) -> None:
        self._specs, self._block_tokens, self._hash_tokens = specs, block_tokens, hash_tokens
        self._count = count
        self._saves: dict[int, Request] = {}
        self._events: deque[KVCacheEvent] = deque()

    def saving(self, job: int, request: Request) -> None:
        """A save was ordered."""
        self._saves[job] = request
        if len(self._saves) > saves_max:
            del self._saves[next(iter(self._saves))]
            self._count("events_dropped")

    def failed(self, job: int) -> None:
        """A save stored nothing."""
        self._saves.pop(job, None)

    def hear(self, message: hot.Stored | hot.Removed) -> None:
        """Take what the sidecar says."""
        if isinstance(message, hot.Removed):
            for group, hashes in message.hashes.items():
                names = [maybe_convert_block_hash(name) for name in hashes]
                self._add(BlockRemoved(names, MEDIUM_CPU, group, "LOCAL"))
            return
        request = self._saves.pop(message.job, None)
        for group, ends in message.ends.items() if request is not None else ():
            for start, run in self._runs(group, ends):
                self._add(self._stored(request, group, start, run))

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        taken, self._events = list(self._events), deque()
        return taken

    def _add(self, event: KVCacheEvent) -> None:
        if len(self._events) >= events_max:
            self._events.popleft()
            self._count("events_dropped")
        self._events.append(event)

    def _runs(self, group: int, ends: list[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield (start, ends) of objects that follow one another; of a partial one alone."""
        size = self._block_tokens[group]
        ends = sorted(ends)
        keys = [end - size * number if end % size == 0 else -end for number, end in enumerate(ends)]
        for _, places in itertools.groupby(range(len(ends)), keys.__getitem__):
            run = [ends[place] for place in places]
            yield (run[0] - 1) // size * size, run

    def _stored(self, request: Request, group: int, start: int, ends: list[int]) -> BlockStored:
        hashes = [
            maybe_convert_block_hash(request.block_hashes[end // self._hash_tokens - 1])
            for end in (start, *ends)
            if end
        ]
        # What the hashes cover beside the tokens: adapter, images, salt. The first image may lie
        # anywhere before the first object; from there on each search goes on where the last ended.
        extra_keys, image = [], 0
        for first, end in itertools.pairwise((start, *ends)):
            keys, image = generate_block_hash_extra_keys(request, first, end, image)
            extra_keys.append(keys)
        lora = request.lora_request
        return BlockStored(
            block_hashes=hashes[-len(ends) :],
            parent_block_hash=hashes[0] if start else None,
            token_ids=list(request.all_token_ids[start : ends[-1]]),
            block_size=ends[0] - start,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra_keys),
            group_idx=group,
            kv_cache_spec_kind=get_kv_cache_spec_kind(self._specs[group]).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(self._specs[group]),
            locality="LOCAL",
            session_id=request.session_id,
        )

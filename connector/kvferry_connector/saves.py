"""Which chunks a step completes, and the save jobs made of them.

Cost: a request is looked at only when its next chunk can be complete. ``elapsed`` counts, in
tokens, how far any request can have come; ``due_at`` is a lower bound in that count.
A step on which nothing is due costs one addition and one comparison, whatever is running.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvferry_connector.jobs import JobOrder, Jobs, cut_tables, pack_ids
from kvferry_connector.requests import Tracked
from kvferry_connector.wire import hot
from kvferry_connector.wire.codec import encode_job

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvferry_connector.link import Link
    from kvferry_connector.wire.attach import RegisterEngine


class Saver:
    """Orders saves of whole scheduler blocks (S tokens in all stored groups) as they complete.

    ``link`` returns the sidecar's link when it may be given work; ``unsettled_tokens`` at the end
    of what is computed are still rewritten (multi-module MTP); ``count(name)`` takes events.
    """

    def __init__(
        self,
        jobs: Jobs,
        link: Callable[[], Link | None],
        engine: RegisterEngine,
        *,
        block_tokens: Sequence[int],
        unsettled_tokens: int,
        count: Callable[..., None],
    ) -> None:
        self._jobs, self._link, self._count = jobs, link, count
        self._block_tokens = block_tokens
        self._unit_tokens = engine.scheduler_block_tokens
        self._hash_tokens = engine.hash_block_tokens
        self._life = engine.life
        self._unsettled_tokens = unsettled_tokens
        self.manager: KVCacheManager | None = None  # its tables name the blocks of a request
        self._elapsed = self._serial = 0
        # Heap of (due_at, serial, request); void unless the request's ``due`` is the serial.
        self._due: list[tuple[int, int, Tracked]] = []
        self.orders: list[JobOrder] = []  # of the step being built

    def admit(self, tracked: Tracked) -> None:
        """The request holds KV from now on. What the store has of it is not saved again."""
        stored = tracked.admission.stored_tokens // self._unit_tokens * self._unit_tokens
        tracked.saved_tokens = max(tracked.saved_tokens, stored)
        self._plan(tracked, self._elapsed)

    def drop(self, tracked: Tracked) -> None:
        """The request holds no KV any more (saves under way keep their own pins)."""
        tracked.due = 0

    def _plan(self, tracked: Tracked, due_at: int) -> None:
        self._serial = tracked.due = self._serial + 1
        heapq.heappush(self._due, (due_at, tracked.due, tracked))

    def advance(self, output: SchedulerOutput, step: int, version: bytes) -> None:
        """Add to ``orders`` what is complete once step number ``step`` has run."""
        scheduled = output.num_scheduled_tokens
        decode = output.total_num_scheduled_tokens == len(scheduled)
        self._elapsed = elapsed = self._elapsed + (1 if decode else max(scheduled.values()))
        due = self._due
        while due and due[0][0] <= elapsed:
            _, serial, tracked = heapq.heappop(due)
            if tracked.due != serial:
                continue
            tracked.due = 0  # should this raise, the request saves nothing more
            tokens = scheduled.get(tracked.request.request_id)
            if tokens is None:
                self._plan(tracked, elapsed + 1)
            elif tracked.admission.version == version:  # else its KV is of an older version
                self._plan(tracked, elapsed + self._save(tracked, tokens, step))

    def _save(self, tracked: Tracked, tokens: int, step: int) -> int:
        """Order what can be saved of one request; returns the tokens until there may be more."""
        request, unit = tracked.request, self._unit_tokens
        # Positions of drafts and of tokens not sampled yet lie at or above ``num_tokens``; below
        # it every position has been computed by this step or an earlier one.
        known = min(request.num_computed_tokens + tokens, request.num_tokens)
        known -= self._unsettled_tokens
        hashed = len(request.block_hashes) * self._hash_tokens
        start, end = tracked.saved_tokens, min(known, hashed) // unit * unit
        if end > start:
            link = self._link()
            if link is None or not link.stored_groups:
                return unit  # what is missed now is saved then: the request keeps its blocks
            blocks_per_unit = sum([unit // self._block_tokens[g] for g in link.stored_groups])
            fits = start + self._jobs.room // blocks_per_unit * unit
            if fits < end:
                self._count("pinned_blocks_max")
                end = fits
                if end <= start:
                    return unit
            self._order(tracked, end, link, step)
        return max(1, tracked.saved_tokens + unit - known)

    def _order(self, tracked: Tracked, end: int, link: Link, step: int) -> None:
        request, start = tracked.request, tracked.saved_tokens
        tracked.saved_tokens = end
        # The manager's own table: block state's get_block_ids would copy all of it for one chunk.
        table = self.manager.get_blocks(request.request_id).blocks if self.manager else ()
        slices, ids = cut_tables(table, self._block_tokens, link.stored_groups, start, end)
        if 0 in ids:
            self._count("saves_of_null")  # nobody's block: never the end of a copy
            return
        first, last = start // self._hash_tokens, end // self._hash_tokens
        hashes = request.block_hashes[first:last]
        job = self._jobs.open_save(ids)
        # In the list at once, so that abandon() finds its pins whatever happens below.
        self.orders.append(JobOrder(job, request.request_id, link.epoch, b"", ()))
        message = hot.SaveJob(
            job=job,
            life=self._life,
            version=tracked.admission.version,
            request=request.request_id,
            admission=tracked.admission.number,
            step=step,
            start_tokens=start,
            end_tokens=end,
            first_hash=first,
            hash_bytes=len(hashes[0]),
            tables=slices,
        )
        frames = (pack_ids(ids), b"".join(hashes))
        self.orders[-1] = self.orders[-1]._replace(body=encode_job(message), frames=frames)
        self._count("saves")
        self._count("saved_tokens", end - start)

    def abandon(self) -> None:
        """Give up the saves of the step being built: no rank is told of them."""
        for order in self.orders:
            self._jobs.close(order.job)
        self.orders = []

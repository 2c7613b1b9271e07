"""Which chunks a step completes, which states it hands over, and the save jobs made of them.

Cost: a request is looked at only when its next chunk can be complete. ``elapsed`` counts, in
tokens, how far any request can have come; ``due_at`` is a lower bound in that count.
A step on which nothing is due costs one addition and one comparison, whatever is running.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry_connector.doubts import Doubts
from kvferry_connector.jobs import CompactTableError, JobOrder, Jobs, cut_tables, pack_ids
from kvferry_connector.log import logger
from kvferry_connector.requests import Tracked
from kvferry_connector.wire import hot
from kvferry_connector.wire.codec import encode_job

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvferry_connector.events import KvEvents
    from kvferry_connector.link import Link
    from kvferry_connector.wire.attach import RegisterEngine


class Saver:
    """Orders saves of whole scheduler blocks (S tokens in all stored groups) as they complete.

    What a request generates is gathered: a save of every ``gather_tokens``, and one when it ends.
    ``link`` returns the sidecar's link when it may be given work; ``count(name)`` takes events.
    A sliding window's blocks are saved in the step that fills them: one step later they are null.
    A state's block is never looked up in a table, where scratch moves about: the engine names it.
    """

    def __init__(
        self, jobs: Jobs, link: Callable[[], Link | None], engine: RegisterEngine, *,
        block_tokens: Sequence[int], gather_tokens: int, count: Callable[..., None],
    ) -> None:  # fmt: skip
        self._jobs, self._ask_link, self._count = jobs, link, count
        self.doubts = Doubts(count)
        self._block_tokens = block_tokens
        self._unit_tokens = unit = engine.scheduler_block_tokens
        self._gather_tokens = max(1, -(-gather_tokens // unit)) * unit
        self._hash_tokens = engine.hash_block_tokens
        self._align_tokens = engine.alignment_tokens
        self._life = engine.life
        self._unsettled_tokens = engine.reprefill_tokens
        self._drafted = engine.use_eagle
        self.manager: KVCacheManager | None = None  # its tables name the blocks of a request
        self._elapsed = self._serial = 0
        # Heap of (due_at, serial); void unless a request waits under the serial, its ``due``. What
        # is void may stay for long, and keeps no request alive.
        self._due: list[tuple[int, int]] = []
        self._waiting: dict[int, Tracked] = {}
        self._due_at = 0  # at or below the first of them: nothing is due before
        self.orders: list[JobOrder] = []  # of the step being built
        self.events: KvEvents | None = None  # of an engine that publishes them

    def _link(self) -> Link | None:
        return None if self.doubts.spoiled else self._ask_link()

    def admit(self, tracked: Tracked) -> None:
        """The request holds KV from now on. What the store has of it is not saved again."""
        stored = tracked.admission.stored_tokens // self._unit_tokens * self._unit_tokens
        tracked.saved_tokens = max(tracked.saved_tokens, stored)
        tracked.prefill_tokens = tracked.request.num_tokens
        self._plan(tracked, self._elapsed)

    def drop(self, tracked: Tracked) -> None:
        """The request holds no KV any more (saves under way keep their own pins)."""
        self._waiting.pop(tracked.due, None)
        tracked.due = tracked.prefill_tokens = tracked.tail_tokens = 0
        tracked.ran = False

    def end(self, tracked: Tracked, step: int, version: bytes) -> None:
        """The request ends with its blocks still in its tables: order what was gathered.

        Nothing it holds is written after step number ``step``, which is not built yet. Of one that
        did not run nothing is known: vLLM counts as computed what another connector still loads.
        """
        try:
            if tracked.due and tracked.ran and tracked.admission.version == version:
                self._save(tracked, 0, step, ended=True)
        except CompactTableError as error:
            self._refuse(tracked, error)
        finally:
            self.drop(tracked)

    def _plan(self, tracked: Tracked, due_at: int) -> None:
        self._waiting.pop(tracked.due, None)
        self._serial = tracked.due = self._serial + 1
        self._waiting[tracked.due] = tracked
        heapq.heappush(self._due, (due_at, tracked.due))
        self._due_at = min(self._due_at, due_at)

    def pass_on(self, tokens: int, scheduled: Mapping[str, int]) -> bool:
        """A step computes ``tokens`` in all; whether ``advance`` has something to look at."""
        self._elapsed += 1 if tokens == len(scheduled) else max(scheduled.values())
        return self._elapsed >= self._due_at

    def advance(self, scheduled: Mapping[str, int], step: int, version: bytes) -> None:
        """Add to ``orders`` what is complete once step number ``step`` has run."""
        due, elapsed = self._due, self._elapsed
        while due and due[0][0] <= elapsed:
            tracked = self._waiting.pop(heapq.heappop(due)[1], None)
            if tracked is None:
                continue
            tracked.due = 0  # should this raise, the request saves nothing more
            tokens = scheduled.get(tracked.request.request_id)
            if tokens is None:
                self._plan(tracked, elapsed + 1)
            elif tracked.admission.version == version:  # else its KV is of an older version
                tracked.ran = True
                try:
                    soon = self._save_tail(tracked, tokens, step)
                    self._plan(tracked, elapsed + min(soon, self._save(tracked, tokens, step)))
                except CompactTableError as error:
                    self._refuse(tracked, error)
        self._due_at = due[0][0] if due else sys.maxsize

    def hand_over(
        self, tracked: Tracked, states: Iterable[tuple[int, int, int]], tokens: int, step: int,
        version: bytes,
    ) -> None:  # fmt: skip
        """Order saves of states: (group, block, tokens it is the state after) once ``step`` ran.

        ``tokens`` are scheduled in the step. A state past the prefill is not final: drafts may be
        rejected. Where hits may end inside a block, attention is saved up to the state with it.
        """
        link, admission = self._link(), tracked.admission
        if link is None or admission.version != version:
            return
        hashed = len(tracked.request.block_hashes) * self._hash_tokens
        last = min(hashed, tracked.prefill_tokens)  # 0 for what is not to be saved at all
        hand_offs = [
            hot.HandOff(group, block, end)
            for group, block, end in states
            if group in link.state_groups and 0 < end <= last and end != admission.stored_tokens
        ]
        if not hand_offs:
            return
        ends = [state.end_tokens for state in hand_offs]
        start = end = boundary = max(ends)
        slices: list[hot.TableSlice] = []
        ids: list[int] = []
        if self._align_tokens < self._unit_tokens:
            final = min(self._known(tracked, tokens), hashed)
            try:
                (start, end), slices, ids = self._tail(tracked, boundary, final, link)
            except CompactTableError as error:
                self._refuse(tracked, error)
        blocks = [*filter(None, ids), *(state.block for state in hand_offs)]
        if len(blocks) > self._jobs.room:
            self._count("pinned_blocks_max")
            return
        span = (start, end, min(*ends, start + self._hash_tokens) // self._hash_tokens - 1)
        self._order(
            tracked, span, blocks, link, step, slices=slices, ids=ids, hand_offs=hand_offs,
            tail_tokens=boundary if slices else 0,
        )  # fmt: skip
        if slices and self._drafted and end < boundary + self._hash_tokens:
            tracked.tail_tokens = boundary
            self._plan(tracked, self._elapsed)

    def _tail(
        self, tracked: Tracked, boundary: int, final: int, link: Link
    ) -> tuple[tuple[int, int], list[hot.TableSlice], list[int]]:
        """Return the span, slices and block ids of the attention around a state's boundary.

        From where whole units end (they are saved by themselves) to ``final``, at most a unit on.
        """
        start = boundary // self._unit_tokens * self._unit_tokens
        reach = min(final, boundary + self._unit_tokens) // self._hash_tokens * self._hash_tokens
        end = max(boundary, reach)
        table, groups = self._table(tracked), link.stored_groups
        return (start, end), *cut_tables(table, self._block_tokens, groups, start, end)

    def _save_tail(self, tracked: Tracked, tokens: int, step: int) -> int:
        """Order the attention above a state, once it is computed; returns the tokens until then.

        A drafter's lookup matches the hash above the boundary and drops it. A state at the end of a
        block is handed over before that hash's tokens are computed.
        """
        boundary, unit = tracked.tail_tokens, self._unit_tokens
        if not boundary:
            return unit
        hashed = len(tracked.request.block_hashes) * self._hash_tokens
        final = min(self._known(tracked, tokens), hashed)
        missing, link = boundary + self._hash_tokens - final, self._link()
        if missing > 0 or link is None:
            return max(1, missing)
        span, slices, ids = self._tail(tracked, boundary, final, link)
        blocks = [*filter(None, ids)]
        if len(blocks) > self._jobs.room:
            self._count("pinned_blocks_max")
            return 1
        tracked.tail_tokens = 0
        start, end = span
        self._order(
            tracked, (start, end, start // self._hash_tokens), blocks, link, step,
            slices=slices, ids=ids, tail_tokens=boundary,
        )  # fmt: skip
        return unit

    def _refuse(self, tracked: Tracked, error: CompactTableError) -> None:
        """Attention of this request is saved no more: nobody can say which chunk a block is."""
        self._count("saves_compact")
        logger.warning("request %s is not saved: %s", tracked.request.request_id, error)

    def _known(self, tracked: Tracked, tokens: int) -> int:
        """Return how far the KV is final once ``tokens`` more are computed.

        Positions of drafts and of tokens not sampled yet lie at or above ``num_tokens``; below it
        every position has been computed by this step or an earlier one.
        """
        request = tracked.request
        known = min(request.num_computed_tokens + tokens, request.num_tokens)
        return known - self._unsettled_tokens

    def _table(self, tracked: Tracked) -> Sequence[Sequence[KVCacheBlock]]:
        # The manager's own table: block state's get_block_ids would copy all of it for one chunk.
        name = tracked.request.request_id
        return self.manager.get_blocks(name).blocks if self.manager else ()

    def _save(self, tracked: Tracked, tokens: int, step: int, *, ended: bool = False) -> int:
        """Order what can be saved of one request; returns the tokens until there may be more."""
        request, unit = tracked.request, self._unit_tokens
        known = self._known(tracked, tokens)
        hashed = len(request.block_hashes) * self._hash_tokens
        start, end = tracked.saved_tokens, min(known, hashed) // unit * unit
        link = self._link()
        if end - start >= (unit if ended else self._least(tracked, link)):
            if link is None or not link.stored_groups:
                return unit  # what is missed now is saved then: the request keeps its blocks
            fits = self._fitting(tracked, start, end, link)
            if fits < end:
                self._count("pinned_blocks_max")
                end = fits
                if end <= start:
                    return 1  # pins are freed step by step, and the request may end soon
            self._save_span(tracked, end, link, step)
        return max(1, tracked.saved_tokens + self._least(tracked, link) - known)

    def _least(self, tracked: Tracked, link: Link | None) -> int:
        """Return how many tokens are worth a save, from what is saved on.

        Not gathered is what a lookup waits for (the prefill, with its boundaries) and what a table
        may hold no more a step later.
        """
        decodes = tracked.saved_tokens + self._align_tokens > tracked.prefill_tokens
        whole = link is not None and "held" not in link.save_rules
        return self._gather_tokens if decodes and whole else self._unit_tokens

    def _fitting(self, tracked: Tracked, start: int, end: int, link: Link) -> int:
        """Return how far the span's blocks may be pinned, in whole units."""
        room, unit = self._jobs.room, self._unit_tokens
        blocks_per_unit = 0
        for group in link.stored_groups:
            tail = link.tails.get(group)
            if tail is None:
                blocks_per_unit += unit // self._block_tokens[group]
            else:
                room -= sum(map(len, self._kept(tracked, group, tail, start, end)))
        if room < 0:
            return start
        return start + room // blocks_per_unit * unit if blocks_per_unit else end

    def _kept(self, tracked: Tracked, group: int, tail: int, start: int, end: int) -> list[range]:
        """Return the chunks in (start, end] within ``tail`` of where a request can resume."""
        size, align = self._block_tokens[group], self._align_tokens
        boundaries = (tracked.prefill_tokens - 1, tracked.request.shared_prefix_boundary)
        last_chunks = [tokens // align * align // size for tokens in boundaries]
        first, last = start // size, end // size
        return [range(max(first, chunk - tail), min(last, chunk)) for chunk in last_chunks]

    def _tables(
        self, tracked: Tracked, start: int, end: int, link: Link
    ) -> tuple[list[hot.TableSlice], list[int]]:
        """Return slices and block ids of the span; 0 for what is not kept, or is no more."""
        table = self._table(tracked)
        whole = [group for group in link.stored_groups if group not in link.tails]
        slices, ids = cut_tables(table, self._block_tokens, whole, start, end)
        for group, tail in link.tails.items():
            size = self._block_tokens[group]
            first, count = start // size, end // size - start // size
            if len(table[group]) < first + count:
                raise CompactTableError(f"the table of group {group} ends before token {end}")
            kept = [0] * count
            for chunks in self._kept(tracked, group, tail, start, end):
                for chunk in chunks:
                    kept[chunk - first] = table[group][chunk].block_id
            slices.append(hot.TableSlice(group, first, count))
            ids += kept
        return slices, ids

    def _save_span(self, tracked: Tracked, end: int, link: Link, step: int) -> None:
        start, tracked.saved_tokens = tracked.saved_tokens, end
        slices, ids = self._tables(tracked, start, end, link)
        blocks = [block for block in ids if block]  # never null: nobody's block
        if blocks:
            span = (start, end, start // self._hash_tokens)
            self._order(tracked, span, blocks, link, step, slices=slices, ids=ids)
            self._count("saved_tokens", end - start)

    def _order(
        self, tracked: Tracked, span: tuple[int, int, int], blocks: list[int], link: Link,
        step: int, *, slices: Sequence[hot.TableSlice] = (), ids: Sequence[int] = (),
        hand_offs: Sequence[hot.HandOff] = (), tail_tokens: int = 0,
    ) -> None:  # fmt: skip
        """Pin ``blocks`` for a job over ``span``: its start, its end, and its first hash."""
        request, (start, end, first) = tracked.request, span
        hashes = request.block_hashes[first : end // self._hash_tokens]
        message = hot.SaveJob(
            job=self._jobs.last + 1, life=self._life, version=tracked.admission.version,
            request=request.request_id, admission=tracked.admission.number, step=step,
            start_tokens=start, end_tokens=end, first_hash=first, hash_bytes=len(hashes[0]),
            tables=list(slices), hand_offs=list(hand_offs), tail_tokens=tail_tokens,
            prefill_tokens=tracked.prefill_tokens, junction_tokens=request.shared_prefix_boundary,
        )  # fmt: skip
        body, frames = encode_job(message), (pack_ids(ids), b"".join(hashes))
        job = self._jobs.open_save(blocks)
        # In the list at once, so that abandon() finds its pins whatever happens below.
        self.orders.append(JobOrder(job, request.request_id, link.epoch, body, frames))
        if self.events is not None:
            self.events.saving(job, request)
        self._count("saves")

    def take(self, step: int) -> Sequence[JobOrder]:
        """Return the orders that go out with step number ``step``, which is built now."""
        orders, self.orders = self.orders, []
        return self.doubts.hold(step, orders) if self.doubts.active else orders

    def abandon(self) -> None:
        """Give up the saves that no rank was told of."""
        orders, self.orders = self.orders + self.doubts.give_up(), []
        for order in orders:
            self._count("saves_given_up")
            self._jobs.close(order.job)
            if self.events is not None:
                self.events.failed(order.job)

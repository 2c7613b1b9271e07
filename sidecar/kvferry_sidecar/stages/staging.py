"""Staging: what a request needs and slower tiers have is brought into the pool while it waits.

A probe starts a look: each tier in turn is asked which of the missing objects it has. The first
ask says what is needed; from then on objects are fetched into reserved slots, head of the prefix
first, and stay leased for the ask until it is answered: when all is there, or after
``stage_ms_max`` with the longest prefix that is complete in the pool by then. What is fetched
later serves the next ask, or another request.

Ownership: a slot belongs to its fetch until the call has returned, however late; then it is
committed or given back. An ask's deadline ends the waiting and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from kvferry_connector.wire.hot import Ask
from numpy.typing import NDArray

from kvferry_sidecar.outcomes.histogram import SECONDS, Histogram, HistogramReading
from kvferry_sidecar.sessions.admissions import Admission, Keys
from kvferry_sidecar.sessions.leases import LeaseKey
from kvferry_sidecar.sessions.model import Peer
from kvferry_sidecar.stages import looks
from kvferry_sidecar.stages.behind import items_of, split
from kvferry_sidecar.stages.core import Core
from kvferry_sidecar.stages.looks import Chunk, Look
from kvferry_sidecar.stages.shape import SessionShape, form_of
from kvferry_sidecar.stages.stores import StoreDesk, Tier, publish
from kvferry_sidecar.tiers.host import NOBODY
from kvferry_sidecar.tiers.runner import CallResult, Find, Get
from kvferry_sidecar.tiers.store import Form, Item, Whose


@dataclass(frozen=True, slots=True)
class _Part:
    """Reserved slots of one group in one fetch."""

    form: Form
    whose: Whose
    keys: Keys
    entries: NDArray[np.uint32]


class Staging:
    """All looks by (life, admission). Owned by the control loop.

    ``answer(peer, ask, now_s)`` is the probes' own.
    """

    def __init__(
        self,
        core: Core,
        desk: StoreDesk,
        answer: Callable[[Peer, Ask, float], None],
    ) -> None:
        self._core = core
        self._desk = desk
        self._answer = answer
        self._looks: dict[LeaseKey, Look] = {}
        self._asked: dict[LeaseKey, Look] = {}  # in the order of their deadlines
        self._fetching: dict[bytes, list[tuple[Look, Chunk]]] = {}
        self._bytes_max = min(core.limits.stage_bytes_max, core.pool.stats().total_bytes // 2)
        self._bytes = 0  # reserved by fetches or leased for asks
        self.counts: Counter[str] = Counter()
        self._seconds = Histogram(SECONDS)

    # --- what the probes say ----------------------------------------------------------------

    def begin(
        self,
        peer: Peer,
        shape: SessionShape,
        admission: Admission,
        hint: Callable[[int, float], None],
        now_s: float,
    ) -> bool:
        """Look for what the pool lacks; True when tiers were asked.

        Then ``hint(hit_tokens, now_s)`` is called when they have answered.
        """
        key = LeaseKey(peer.session.life, admission.number)
        self.forget(*key)
        if not self._desk.tiers:
            return False
        look = looks.new_look(key, peer, shape, admission, hint)
        if not self._find(look, now_s):
            return False
        self._looks[key] = look
        return True

    def look(self, key: LeaseKey) -> Look | None:
        """Return the look of an admission."""
        return self._looks.get(key)

    def hold(self, look: Look, peer: Peer, ask: Ask, now_s: float) -> bool:
        """Take an ask over; False when waiting would bring nothing more."""
        span = (ask.local_tokens, ask.max_tokens)
        look.stale = look.stale or span != look.span
        look.span = span
        looks.plan(look, self._core.pool)
        if look.settled():
            self._let_go(look)
            return False
        if look.ask is None:
            look.held_s = now_s
            look.until_s = now_s + self._core.limits.stage_ms_max / 1e3
            self._asked[look.key] = look
            self.counts["asks_held"] += 1
        look.peer, look.ask = peer, ask
        self._advance(look, now_s)
        return True

    def forget(self, life: bytes, number: int) -> None:
        """An admission was dropped: nobody waits for it any more. Its fetches end by themselves."""
        look = self._looks.pop(LeaseKey(life, number), None)
        if look is not None:
            look.gone = True
            look.queue.clear()
            self._let_go(look)

    # --- time and results -------------------------------------------------------------------

    def tick(self, now_s: float) -> float | None:
        """Answer asks whose time is over; returns seconds until the next one's, None: none."""
        for look in list(self._asked.values()):
            if look.until_s > now_s and not self._core.draining:
                return look.until_s - now_s
            self.counts["asks_out_of_time"] += 1
            self._resolve(look, now_s)
        return None

    def held(self) -> int:
        """Asks that wait."""
        return len(self._asked)

    def seconds(self) -> HistogramReading:
        """How long asks waited."""
        return self._seconds.reading()

    def check(self) -> list[str]:
        """Violations; empty when sound."""
        held = sum(look.held_bytes for look in self._asked.values())
        if not self._fetching and held != self._bytes:
            return [f"{self._bytes} bytes are staged, {held} are held and nothing is fetched"]
        return []

    def _find(self, look: Look, now_s: float) -> bool:
        """Ask the next tier for what is missing; False when there is nothing left to ask."""
        tiers = self._desk.tiers
        while look.next_tier < len(tiers):
            number, look.next_tier = look.next_tier, look.next_tier + 1
            chunks = looks.missing(look, self._core.pool)
            if not tiers[number].on or not any(map(len, chunks)):
                continue
            keys = look.admission.keys
            lists = tuple(tuple(split(k[c])) for k, c in zip(keys, chunks, strict=True))
            call = Find(lists, stop=self._dense(look) and number == len(tiers) - 1)
            look.finding = True

            def done(
                result: CallResult,
                later_s: float,
                number: int = number,
                chunks: list[NDArray[np.int64]] = chunks,
            ) -> None:
                self._found(look, number, chunks, result, later_s)

            self._desk.send(tiers[number], call, now_s, done)
            return True
        return False

    def _found(
        self,
        look: Look,
        number: int,
        chunks: list[NDArray[np.int64]],
        result: CallResult,
        now_s: float,
    ) -> None:
        look.finding = False
        if look.gone:
            return
        for where, at, found in zip(look.where, chunks, result.found, strict=False):
            where[at[np.array(found, np.bool_)]] = number
            look.stale = True
        if not self._find(look, now_s) and not look.hinted:
            look.hinted = True
            look.hint(looks.reach(look, self._core.pool, look.admission.num_tokens), now_s)
        looks.plan(look, self._core.pool)
        self._advance(look, now_s)

    def _dense(self, look: Look) -> bool:
        return all(group.save_rule == "all" and group.kind == "full" for group in look.groups)

    # --- fetching ---------------------------------------------------------------------------

    def _advance(self, look: Look, now_s: float) -> None:
        """Start what there is room for; answer when nothing more is to come."""
        while look.queue and look.calls < self._core.limits.stage_calls_max:
            if not self._fetch(look, now_s):
                break
        if look.ask is not None and self._at_end(look):
            self._resolve(look, now_s)

    def _at_end(self, look: Look) -> bool:
        alone = bool(look.queue) and not self._fetching and look.held_bytes == self._bytes
        return look.settled() or (alone and not look.finding)

    def _fetch(self, look: Look, now_s: float) -> bool:
        """Start one call for the head of the queue; False when there is no room for it."""
        tier, batch, batch_bytes = self._batch(look)
        if not batch:
            return bool(look.queue)
        if self._bytes + batch_bytes > self._bytes_max:
            self.counts["stage_bytes_max"] += 1
            look.queue.extendleft(reversed(batch))
            return False
        parts, items = self._reserve(look, batch)
        self._core.note_evictions()
        if not items:
            return True

        def done(result: CallResult, later_s: float) -> None:
            self._fetched(look, tier, parts, result, later_s)

        look.calls += 1
        self._bytes += _bytes_of(parts)
        self._desk.send(tier, Get(tuple(items)), now_s, done)
        return True

    def _batch(self, look: Look) -> tuple[Tier, list[Chunk], int]:
        """Take chunks of one tier from the queue's head, as many as one call should carry."""
        tier = self._desk.tiers[max(0, look.tier_of(look.queue[0]))]
        batch: list[Chunk] = []
        left: list[Chunk] = []
        total = 0
        while look.queue and tier.runner is not None and len(batch) < tier.runner.batch_max:
            at = look.queue.popleft()
            number = look.tier_of(at)
            size = look.groups[at.group].stripe.payload_bytes
            if number < 0 or not self._desk.tiers[number].on:
                looks.mark(look, at, None)
            elif self._desk.tiers[number] is not tier:
                left.append(at)
            elif size > tier.runner.value_bytes_max:
                looks.mark(look, at, None)
            elif batch and total + size > self._core.limits.store_call_bytes_max:
                left.append(at)
                break
            else:
                batch.append(at)
                total += size
        look.queue.extendleft(reversed(left))
        return tier, batch, total

    def _reserve(self, look: Look, batch: list[Chunk]) -> tuple[list[_Part], list[Item]]:
        """Reserve slots, group by group. What another fetch brings is waited for; what a save
        writes will be there by itself."""
        parts: list[_Part] = []
        items: list[Item] = []
        namespace = self._core.namespace_of(look.peer.session, look.admission.version)
        owner = NOBODY if namespace is None else self._core.owner_of(namespace)
        for index, group in enumerate(look.groups):
            chunks = [at.chunk for at in batch if at.group == index]
            if not chunks:
                continue
            form = form_of(group.stripe)
            keys = np.ascontiguousarray(look.admission.keys[index][chunks])
            try:
                stripe = group.stripe
                taken = self._core.pool.reserve(
                    keys, stripe.payload_bytes, stripe.shard_count, owner, group.group
                )
                won = taken.index.tolist()
            except ValueError:  # larger than a slab: as good as absent
                won = []
            for at in (Chunk(index, chunks[i]) for i in set(range(len(chunks))) - set(won)):
                self._wait_for_other(look, at)
            if won:
                whose = Whose(owner.namespace, group.group)
                part = _Part(form, whose, keys[won], taken.entries)
                for i, name in zip(won, split(part.keys), strict=True):
                    look.open.add(name)
                    self._fetching[name] = [(look, Chunk(index, chunks[i]))]
                parts.append(part)
                items += items_of(self._core.pool, part.keys, part.entries, form)
        return parts, items

    def _wait_for_other(self, look: Look, at: Chunk) -> None:
        name = look.key_of(at)
        waiting = self._fetching.get(name)
        if waiting is not None:
            waiting.append((look, at))
            look.open.add(name)
        else:
            looks.mark(look, at, None)

    def _fetched(
        self, look: Look, tier: Tier, parts: list[_Part], result: CallResult, now_s: float
    ) -> None:
        """The call has returned: publish what verified, give the other slots back."""
        look.calls -= 1
        self._bytes -= _bytes_of(parts)
        crcs = result.crcs or (None,) * sum(len(part.entries) for part in parts)
        woken: dict[LeaseKey, Look] = {look.key: look}
        at = 0
        for part in parts:
            of_part = crcs[at : at + len(part.entries)]
            at += len(of_part)
            good = publish(self._core.pool, part.entries, of_part)
            tier.counts["get_objects"] += int(good.sum())
            tier.counts["get_bytes"] += int(good.sum()) * part.form.payload_bytes
            tier.counts["get_missed"] += int((~good).sum()) if result.started else 0
            self._wake(part, good, tier, woken)
            if tier.source == "external":
                self._core.behind.entered(part.keys[good], part.form, part.whose, tier)
        for one in woken.values():
            # Without an ask nothing is kept: planning anew could fetch the same for ever.
            if one.ask is not None:
                looks.plan(one, self._core.pool)
        for one in [*woken.values(), *self._asked.values()]:
            if not one.gone:
                self._advance(one, now_s)

    def _wake(
        self,
        part: _Part,
        good: NDArray[np.bool_],
        tier: Tier,
        woken: dict[LeaseKey, Look],
    ) -> None:
        """Tell the looks that waited for these chunks, and keep them for asks that wait."""
        kept: dict[LeaseKey, list[bytes]] = {}
        for name, is_good in zip(split(part.keys), good.tolist(), strict=True):
            for look, at in self._fetching.pop(name):
                look.open.discard(name)
                if look.gone:
                    continue
                woken[look.key] = look
                looks.mark(look, at, tier.source if is_good else None)
                if is_good and look.ask is not None:
                    kept.setdefault(look.key, []).append(name)
        for key, names in kept.items():
            keys = np.frombuffer(b"".join(names), np.uint8).reshape(-1, 16)
            entries = self._core.pool.lease(keys, use=False)
            self._looks[key].held.append(entries)
            self._looks[key].held_bytes += len(entries) * part.form.payload_bytes
            self._bytes += len(entries) * part.form.payload_bytes

    # --- the end of waiting -----------------------------------------------------------------

    def _resolve(self, look: Look, now_s: float) -> None:
        """Answer the ask; its own lease is taken before what was kept for it is let go."""
        ask = look.ask
        assert ask is not None, "only asks that wait are resolved"
        del self._asked[look.key]
        look.ask = None
        self._seconds.observe(now_s - look.held_s)
        self._answer(look.peer, ask, now_s)
        self._let_go(look)

    def _let_go(self, look: Look) -> None:
        look.ask = None
        self._asked.pop(look.key, None)
        for entries in look.held:
            self._core.pool.release(entries)
        look.held.clear()
        self._bytes -= look.held_bytes
        look.held_bytes = 0


def _bytes_of(parts: list[_Part]) -> int:
    return sum(len(part.entries) * part.form.payload_bytes for part in parts)

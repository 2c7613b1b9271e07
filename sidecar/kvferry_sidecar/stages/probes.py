"""Lookups: hashes become keys, keys a hint, an ask a lease.

A lookup never fails: whatever cannot be answered with a hit is answered with 0 and a reason, or
with NeedFull when the half must send its hashes again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kvferry_connector.wire.attach import Heartbeat
from kvferry_connector.wire.hot import Answer, Ask, Hint, NeedFull, Probe, Release
from numpy.typing import NDArray

from kvferry_sidecar.masks.presence import Presence
from kvferry_sidecar.masks.search import find_hit
from kvferry_sidecar.outcomes.reasons import Decline, Reason
from kvferry_sidecar.plan.chunk_keys import new_keys
from kvferry_sidecar.sessions.admissions import Admission, Keys
from kvferry_sidecar.sessions.leases import Lease, LeasedGroup, LeaseKey
from kvferry_sidecar.sessions.model import Peer, Session
from kvferry_sidecar.stages import looks
from kvferry_sidecar.stages.core import Core
from kvferry_sidecar.stages.frames import frame_fault
from kvferry_sidecar.stages.hits import keys_of, needed_of_all, presence, refresh, stored_hit
from kvferry_sidecar.stages.shape import SessionShape
from kvferry_sidecar.stages.staging import Staging
from kvferry_sidecar.stages.stores import StoreDesk


@dataclass(slots=True)
class LookupCounters:
    """Of first answers: one per admission, so that asking again counts nothing.

    ``local_requests`` never asked, though the hint was no miss: the engine had as much itself.
    """

    probes: int = 0
    asks: int = 0
    need_full: int = 0
    hit_requests: int = 0
    missed_requests: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0
    local_requests: int = 0


class Probes:
    """Admissions and leases of scheduler halves."""

    def __init__(self, core: Core, desk: StoreDesk) -> None:
        self._core = core
        self.staging = Staging(core, desk, self._answer_late)
        core.admissions.on_drop = self.staging.forget
        self.counters = LookupCounters()

    def on_probe(self, peer: Peer, probe: Probe, raw: list[bytes], now_s: float) -> None:
        """Learn the keys of a request, those of new hashes only, then push the unleased hint."""
        self.counters.probes += 1
        fault = frame_fault(probe, raw)
        if fault is not None:
            decline = Decline(Reason.FRAMES, fault)
            self._core.refuse_frame(peer, decline, admission=probe.admission)
            return
        found = self._learn(peer, probe, raw[0])
        if isinstance(found, NeedFull):
            self.counters.need_full += 1
            self._core.send(peer, found)
            return
        if isinstance(found, Reason):
            self._core.journal.declined(peer, probe, now_s, found)
            self._core.declines[found] += 1
            self._core.send(peer, Hint(probe.admission, 0, probe.total))
            return
        shape, admission = found
        admission.record = self._core.journal.probed(peer, probe, now_s)

        def hint(hit_tokens: int, at_s: float) -> None:
            admission.hint_tokens = hit_tokens
            self._core.send(peer, Hint(probe.admission, hit_tokens, probe.total))
            self._core.journal.hinted(peer, probe, raw[0], found, at_s)

        if not self.staging.begin(peer, shape, admission, hint, now_s):
            hint(self._hit(shape, admission, admission.num_tokens), now_s)

    def on_ask(self, peer: Peer, ask: Ask, now_s: float) -> None:
        """Take or confirm the lease of an admission and answer how far it goes."""
        self.counters.asks += 1
        if ask.local_tokens < 0:
            decline = Decline(Reason.FRAMES, f"local_tokens is {ask.local_tokens}")
            self._core.refuse_frame(peer, decline, admission=ask.admission)
            return
        answer = self._answer(peer, ask, now_s)
        if isinstance(answer, NeedFull):
            self.counters.need_full += 1
        if answer is not None:
            self._core.send(peer, answer)

    def on_release(self, peer: Peer, release: Release, now_s: float) -> None:
        """Forget admissions; a lease that a job owns stays with the job."""
        life = peer.session.life
        shape = self._core.shape(peer.session)
        for number in release.admissions:
            admission = self._core.admissions.get(life, number)
            if admission is not None and shape is not None:
                # Used until now. A save that is still to come finds its admission forgotten.
                refresh(self._core.pool, shape, admission.keys)
                if not admission.leased:
                    self._count_unasked(shape, admission, now_s)
            self._core.journal.released(peer.session, number, admission, now_s)
            self._core.admissions.drop(life, number)
            self._core.leases.drop_unowned(LeaseKey(life, number))

    def on_beat(self, peer: Peer, beat: Heartbeat, now_s: float) -> None:
        """Heal a lost release: what the half no longer counts on falls."""
        self._core.leases.reconcile(peer.generation, beat.as_of, beat.live, now_s)
        self._core.breaker.computes(peer.session.key, beat.token_ns)

    def on_gone(self, peer: Peer, now_s: float) -> None:
        """The scheduler half is gone: nothing it was promised is needed, except by jobs."""
        self._core.journal.gone(peer.session, now_s)
        self._core.admissions.drop_generation(peer.generation)
        self._core.leases.drop_generation(peer.generation)
        self._core.breaker.forget(peer.session.key)

    # --- probe ------------------------------------------------------------------------------

    def _learn(
        self, peer: Peer, probe: Probe, hashes: bytes
    ) -> tuple[SessionShape, Admission] | NeedFull | Reason:
        session = peer.session
        closed = self._core.closed(session)
        if closed is not None:
            return closed
        shape = self._core.shape(session)
        namespace = self._core.namespace_of(session, probe.version)
        if shape is None:
            return Reason.NOT_READY
        if probe.version != session.version or namespace is None:
            return Reason.VERSION
        if probe.total > self._core.limits.hashes_max:
            return Reason.HASHES_MAX
        former = self._core.admissions.get(session.life, probe.former)
        if not _continues(probe, former, shape):
            return NeedFull(probe.admission)
        keys = [
            new_keys(
                namespace,
                g.group,
                hashes,
                hashes_per_unit=g.hashes_per_unit,
                hash_bytes=probe.hash_bytes,
                start=probe.start,
            )
            for g in shape.stored_groups()
        ]
        if probe.start and former is not None:
            pairs = zip(former.keys, keys, strict=True)
            keys = [np.concatenate((old, new)) if len(new) else old for old, new in pairs]
        last_hash = hashes[-probe.hash_bytes :] if hashes else probe.predecessor
        longest_tokens = (probe.num_tokens - 1) // shape.hit_alignment * shape.hit_alignment
        kept = self._keep(peer, probe, keys, last_hash, longest_tokens)
        return kept if isinstance(kept, Reason) else (shape, kept)

    def _keep(
        self, peer: Peer, probe: Probe, keys: list[Keys], last_hash: bytes, longest_tokens: int
    ) -> Admission | Reason:
        session, admissions = peer.session, self._core.admissions
        known = admissions.get(session.life, probe.admission)
        book = admissions.book(session.life, session.key, peer.generation)
        bound = admissions.make_room(
            book,
            sum(k.nbytes for k in keys),
            probe.admission,
            lambda number: self._core.leases.get(LeaseKey(session.life, number)) is not None,
        )
        if bound is not None:
            return Reason.ADMISSIONS_MAX if bound == "admissions" else Reason.KEY_BYTES_MAX
        fresh = Admission(
            probe.admission, probe.version, probe.num_tokens, probe.total, last_hash, keys,
            longest_tokens,
        )  # fmt: skip
        if known is not None and not _same_prefix(known, fresh):
            self._core.leases.drop_unowned(LeaseKey(session.life, probe.admission))
        admissions.put(book, fresh)
        return fresh

    # --- ask --------------------------------------------------------------------------------

    def _answer_late(self, peer: Peer, ask: Ask, now_s: float) -> None:
        """Staging has waited long enough: answer with what is in the pool."""
        answer = self._answer(peer, ask, now_s, wait=False)
        if answer is not None:
            self._core.send(peer, answer)

    def _answer(
        self, peer: Peer, ask: Ask, now_s: float, *, wait: bool = True
    ) -> Answer | NeedFull | None:
        """Return the answer; None when it went out already, or staging will answer later."""
        session = peer.session
        key = LeaseKey(session.life, ask.admission)
        closed = self._core.closed(session)
        shape = self._core.shape(session)
        if closed is not None or shape is None:
            return self._nothing(peer, ask, closed or Reason.NOT_READY, now_s)
        admission = self._core.admissions.get(*key)
        if admission is None:
            return NeedFull(ask.admission)
        if admission.version != session.version:
            return self._nothing(peer, ask, Reason.VERSION, now_s)
        lease = self._core.leases.get(key)
        if lease is not None and lease.job is not None:
            return Answer(
                ask.admission,
                ask.seq,
                min(lease.total_tokens, ask.local_tokens),
                {},
                Reason.LEASE_BUSY,
            )
        if lease is not None:
            same = lease.local_tokens == ask.local_tokens and lease.total_tokens <= ask.max_tokens
            if same and not lease.spoiled:
                self._core.leases.confirm(lease, ask.seq, now_s)
                return self._leased(ask, lease)
            self._core.leases.drop(lease)
        look = self.staging.look(key)
        if look is not None and wait and self.staging.hold(look, peer, ask, now_s):
            self._core.journal.held(session, ask.admission, now_s)
            return None
        answer = self._fresh_answer(peer, shape, admission, ask, now_s)
        self._core.send(peer, answer)  # before it is counted: an engine waits for it
        self._count(shape, admission, ask, answer, now_s=now_s)
        return None

    def _fresh_answer(
        self, peer: Peer, shape: SessionShape, admission: Admission, ask: Ask, now_s: float
    ) -> Answer:
        taken: list[LeasedGroup] | Reason | None = None
        hit_tokens = ask.max_tokens + 1
        while taken is None:
            # Again what was counted but not leased: take what a shorter hit allows.
            present = presence(self._core.pool, shape, admission.keys)
            hit_tokens = find_hit(shape.rules, present, max_tokens=max(0, hit_tokens - 1)).tokens
            if hit_tokens <= ask.local_tokens:
                break
            span = (ask.local_tokens, hit_tokens)
            taken = self._take(peer.session, shape, admission, present, span)
        if isinstance(taken, list):
            lease = Lease(
                key=LeaseKey(peer.session.life, ask.admission),
                session=peer.session.key,
                generation=peer.generation,
                version=admission.version,
                local_tokens=ask.local_tokens,
                total_tokens=hit_tokens,
                groups=tuple(taken),
                seq=ask.seq,
                touched_s=now_s,
                sources=self._sources(peer.session, ask, hit_tokens),
            )
            self._core.leases.add(lease)
            admission.leased = True
            return self._leased(ask, lease)
        if taken is not None:
            self._core.declines[taken] += 1
            return Answer(ask.admission, ask.seq, ask.local_tokens, {}, taken)
        reason = self._shortfall(LeaseKey(peer.session.life, ask.admission), ask, hit_tokens)
        return Answer(ask.admission, ask.seq, hit_tokens, {}, reason)

    def _take(
        self,
        session: Session,
        shape: SessionShape,
        admission: Admission,
        present: Presence,
        span: tuple[int, int],
    ) -> list[LeasedGroup] | Reason | None:
        """Lease the objects of all groups for the tokens ``(local, total]``, or none of them.

        None when an entry that was counted could not be leased.
        """
        wanted = needed_of_all(shape, present, span)
        if wanted is None:
            return None
        if why := self._core.withheld(session, shape, admission, wanted, span):
            return why
        held = self._core.leases.entry_count(session.key)
        if held + sum(len(needed.ends) for needed in wanted) > self._core.limits.leases_max:
            return Reason.LEASES_MAX
        taken = []
        short = False
        for g, needed, keys in zip(shape.stored_groups(), wanted, admission.keys, strict=True):
            entries = self._core.pool.lease(keys_of(g, keys, needed))
            last_end = int(needed.ends[-1]) if len(needed.ends) else 0
            taken.append(LeasedGroup(g.group, needed.chunks, last_end, entries))
            short = short or len(entries) < len(needed.ends)
        if short:
            for group in taken:
                self._core.pool.release(group.entries)
            return None
        return taken

    def _leased(self, ask: Ask, lease: Lease) -> Answer:
        reason = self._shortfall(lease.key, ask, lease.total_tokens)
        return Answer(ask.admission, ask.seq, lease.total_tokens, lease.sources, reason)

    def _sources(self, session: Session, ask: Ask, total_tokens: int) -> dict[str, int]:
        look = self.staging.look(LeaseKey(session.life, ask.admission))
        if look is None:
            return {"host": total_tokens - ask.local_tokens}
        return looks.sources(look, ask.local_tokens, total_tokens)

    def _shortfall(self, key: LeaseKey, ask: Ask, hit_tokens: int) -> Reason:
        """Why the answer is no longer than it is."""
        if hit_tokens >= ask.max_tokens:
            return Reason.NONE
        look = self.staging.look(key)
        late = look is not None and not look.settled()
        return Reason.STAGING if late else Reason.ABSENT

    def _nothing(self, peer: Peer, ask: Ask, reason: Reason, now_s: float) -> Answer:
        """Answer 0: the half counts on nothing after it, so an unowned lease falls."""
        self._core.leases.drop_unowned(LeaseKey(peer.session.life, ask.admission))
        self._core.journal.refused(peer.session, ask.admission, reason, now_s)
        self._core.declines[reason] += 1
        return Answer(ask.admission, ask.seq, 0, {}, reason)

    # --- both -------------------------------------------------------------------------------

    def _hit(self, shape: SessionShape, admission: Admission, max_tokens: int) -> int:
        return stored_hit(self._core.pool, shape, admission.keys, max_tokens=max_tokens).tokens

    def _count_unasked(self, shape: SessionShape, admission: Admission, now_s: float) -> None:
        """Count a request that ended at its hint: a miss, or what the engine had itself."""
        if admission.answered:
            return
        if admission.hint_tokens:
            self.counters.local_requests += 1
            self._core.journal.used_locally(shape, admission, now_s)
        else:
            self.counters.missed_requests += 1
            self.counters.missed_tokens += admission.longest_tokens
            self._core.journal.unasked(admission)

    def _count(
        self, shape: SessionShape, admission: Admission, ask: Ask, answer: Answer, *, now_s: float
    ) -> None:
        first = not admission.answered
        self._core.journal.answered(shape, admission, ask, answer, now_s=now_s, first=first)
        if not first:
            return
        admission.answered = True
        reached = max(ask.local_tokens, answer.hit_tokens)
        hit_tokens = reached - ask.local_tokens
        self.counters.hit_requests += 1 if hit_tokens else 0
        self.counters.missed_requests += 0 if hit_tokens else 1
        self.counters.hit_tokens += hit_tokens
        self.counters.missed_tokens += max(0, ask.max_tokens - reached)
        if answer.reason in (Reason.ABSENT, Reason.STAGING):
            self._core.declines[Reason(answer.reason)] += 1


def _continues(probe: Probe, former: Admission | None, shape: SessionShape) -> bool:
    """Whether the probe holds all hashes of a request, or all behind those of ``former``."""
    if probe.total * shape.hash_block_tokens > probe.num_tokens:
        return False
    if probe.start == 0:
        return True
    return (
        former is not None
        and former.version == probe.version
        and former.total == probe.start
        and former.last_hash == probe.predecessor
    )


def _same_prefix(known: Admission, fresh: Admission) -> bool:
    """Whether all known keys (and so a lease on them) are those of the fresh probe too."""
    return known.version == fresh.version and all(
        _starts_with(new, old) for old, new in zip(known.keys, fresh.keys, strict=True)
    )


def _starts_with(longer: NDArray[np.uint8], shorter: NDArray[np.uint8]) -> bool:
    return len(longer) >= len(shorter) and np.array_equal(longer[: len(shorter)], shorter)

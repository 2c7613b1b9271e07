"""What operators are told of requests: token counts by tier and reason, and the record of each.

The stages call one method per thing that happened. It counts and appends; it decides nothing, so
a stage reads the same without its calls.
"""

from __future__ import annotations

from collections import Counter

from kvferry_connector.wire.hot import Answer, Ask, JobStatusName, LoadJob, Probe

from kvferry_sidecar.limits import Limits
from kvferry_sidecar.outcomes.reasons import Reason
from kvferry_sidecar.outcomes.records import NO_WHY, JobEnd, Prefixes, Record, Records, Why
from kvferry_sidecar.sessions.admissions import Admission, Keys
from kvferry_sidecar.sessions.model import Peer, Session
from kvferry_sidecar.stages.curve import Curve
from kvferry_sidecar.stages.parts import JobRun
from kvferry_sidecar.stages.shape import SessionShape
from kvferry_sidecar.stages.snapshot import JournalReading
from kvferry_sidecar.stages.why import Namespaces, why_short
from kvferry_sidecar.tiers.host import HostTier

request_chars_max = 256
trace_chars_max = 64  # a W3C traceparent has 55

# To name a member of an enum costs Python 3.11 more than a call.
_NONE, _ABSENT, _DONE = Reason.NONE, Reason.ABSENT, JobStatusName.DONE


class Journal:
    """Owned by the control loop. Tokens and requests count first answers only."""

    def __init__(self, pool: HostTier, limits: Limits) -> None:
        self._pool = pool
        self.records = Records(limits.records_max)
        self._record = self.records.get
        self.prefixes = Prefixes()
        self.namespaces = Namespaces()
        self.hit_tokens: Counter[str] = Counter()  # by tier
        self.miss_tokens: Counter[Reason] = Counter()
        self.miss_requests: Counter[Reason] = Counter()
        self.load_tokens: Counter[str] = Counter()  # by how the load ended
        self.saved_objects = 0
        self.curve = Curve(pool.stats().total_bytes)

    def reading(self) -> JournalReading:
        """Return the counts so far."""
        return JournalReading(
            hit_tokens=dict(self.hit_tokens),
            miss_tokens={str(reason): count for reason, count in self.miss_tokens.items()},
            miss_requests={str(reason): count for reason, count in self.miss_requests.items()},
            load_tokens=dict(self.load_tokens),
            saved_objects=self.saved_objects,
            records=len(self.records),
            records_dropped=self.records.dropped,
            curve=self.curve.reading(),
        )

    # --- lookups ------------------------------------------------------------------------------

    def probed(self, peer: Peer, probe: Probe, now_s: float, declined: Reason | None) -> None:
        """Hashes of a request came; ``declined``: they were not taken."""
        session = peer.session
        key = (session.life, probe.admission)
        request = probe.request[:request_chars_max]
        record = Record(session.key, request, probe.admission, now_s, probe.num_tokens)
        record.trace = probe.trace[:trace_chars_max]
        self.records.open(key, record)
        if declined is not None:
            record.why = Why(declined)

    def hinted(
        self, peer: Peer, probe: Probe, raw: bytes, found: tuple[SessionShape, Admission],
        now_s: float,
    ) -> None:  # fmt: skip
        """The hint of a probe went out; one of nothing is explained now, while it is known."""
        record = self._record((peer.session.life, probe.admission))
        shape, admission = found
        wanted_tokens = 0
        if not admission.hint_tokens:  # nobody may ask, and its saves are stored when it ends
            wanted_tokens = longest_tokens(shape, admission)
            self._sample(shape, admission, (0, wanted_tokens), 0, now_s)
        if record is None:
            return
        record.hint_tokens, record.hint_s = admission.hint_tokens, now_s
        if admission.hint_tokens:
            return
        record.wanted_tokens = wanted_tokens
        if not wanted_tokens:
            return
        elsewhere = None
        if probe.start == 0:
            elsewhere = self.namespaces.holder(self._pool, peer.session, raw, probe.hash_bytes)
        record.why = elsewhere or why_short(
            self._pool, shape, admission.keys, hit_tokens=0, wanted_tokens=wanted_tokens
        )

    def held(self, session: Session, admission: int, now_s: float) -> None:
        """An ask waits for slower tiers."""
        record = self._record((session.life, admission))
        if record is not None and not record.held_s:
            record.held_s = now_s

    def answered(
        self, session: Session, shape: SessionShape, admission: Admission, ask: Ask, answer: Answer,
        *, now_s: float, first: bool,
    ) -> None:  # fmt: skip
        """An ask was answered by what is stored; ``first``: of this admission."""
        record = self._record((session.life, ask.admission))
        reached = max(ask.local_tokens, answer.hit_tokens)
        if record is not None:
            record.asks += 1
            record.local_tokens, record.wanted_tokens = ask.local_tokens, ask.max_tokens
            record.offered_tokens, record.sources = reached, answer.sources
            record.answer_s = now_s
        if not first:
            return
        span = (ask.local_tokens, ask.max_tokens)
        self._sample(shape, admission, span, answer.hit_tokens, now_s)
        if answer.sources:
            self._hit(session, admission, answer, reached, now_s)
        missed = ask.max_tokens - reached
        if missed <= 0:
            return
        why = Why(Reason(answer.reason)) if answer.reason != _ABSENT else NO_WHY
        if why is NO_WHY and record is not None and not answer.hit_tokens:
            why = record.why  # as it was at the hint of nothing
        if why.reason is _NONE:
            why = why_short(
                self._pool, shape, admission.keys,
                hit_tokens=answer.hit_tokens, wanted_tokens=ask.max_tokens,
            )  # fmt: skip
        self._missed(record, why, missed, whole=reached == ask.local_tokens)

    def refused(self, session: Session, admission: int, reason: Reason, now_s: float) -> None:
        """An ask was answered 0 for another reason than what is stored."""
        record = self._record((session.life, admission))
        if record is not None:
            record.asks += 1
            record.why, record.answer_s = Why(reason), now_s

    def unasked(self, session: Session, shape: SessionShape, admission: Admission) -> None:
        """A request ended at its hint of nothing."""
        record = self._record((session.life, admission.number))
        why = record.why if record is not None else NO_WHY
        self._missed(record, why, longest_tokens(shape, admission), whole=True)

    def used_locally(self, shape: SessionShape, admission: Admission, now_s: float) -> None:
        """A request ended that never asked: the engine had itself what there was."""
        self._sample(shape, admission, (0, 0), 0, now_s)

    def stored(self, shape: SessionShape, keys: list[Keys], total_bytes: int) -> None:
        """Objects of ``total_bytes`` were stored, with ``keys`` per stored group."""
        if shape.whole:
            self.curve.stored(keys[shape.whole[0]], total_bytes)

    def released(self, session: Session, admission: int, now_s: float) -> None:
        """The engine needs nothing more of this admission."""
        record = self._record((session.life, admission))
        if record is not None and not record.ended_s:
            record.ended_s = now_s

    def gone(self, session: Session, now_s: float) -> None:
        """The engine's scheduler half is gone: its last releases may never come."""
        for admission in self.records.admissions_of(session.life):
            self.released(session, admission, now_s)

    def _sample(
        self, shape: SessionShape, admission: Admission, span: tuple[int, int], hit_tokens: int,
        now_s: float,
    ) -> None:  # fmt: skip
        """Count an admission once; no group of single windows or states says what hits need."""
        if admission.sampled or not shape.whole:
            return
        admission.sampled = True
        keys = admission.keys[shape.whole[0]]
        self.curve.looked_up(keys, shape.whole_unit, span, hit_tokens, now_s)

    def _hit(
        self, session: Session, admission: Admission, answer: Answer, reached: int, now_s: float
    ) -> None:
        tokens = 0
        for tier, count in answer.sources.items():
            self.hit_tokens[tier] += count
            tokens += count
        first_chunk = admission.keys[0][:1].tobytes()
        self.prefixes.hit(first_chunk, session.key, tokens, reached, now_s)

    def _missed(self, record: Record | None, why: Why, tokens: int, *, whole: bool) -> None:
        reason = why.reason or _ABSENT
        self.miss_tokens[reason] += tokens
        self.miss_requests[reason] += whole
        if record is not None:
            record.why = why

    # --- jobs ---------------------------------------------------------------------------------

    def opened(self, run: JobRun, now_s: float) -> None:
        """A job was taken from its first rank."""
        if run.work.kind == "load":
            record = self._record((run.job.life, run.job.admission))
            if record is not None:
                record.load, record.load_s = "open", now_s

    def settled(self, run: JobRun) -> None:
        """Every local rank of a job is terminal."""
        job, work = run.job, run.work
        end = _end_of(run)
        done = end.status == _DONE
        record = self._record((job.life, job.admission))
        if isinstance(job, LoadJob):
            tokens = job.total_tokens - job.local_tokens
            self.load_tokens[end.status] += tokens
            if record is not None:
                record.load, record.load_reason = end.status, end.reason
                record.loaded_tokens += tokens if done else 0
        elif done:
            self.saved_objects += work.objects
        if record is not None:
            if work.kind == "save":
                record.saves += 1
                record.saved_objects += work.objects if done else 0
            record.settled(end)


def _end_of(run: JobRun) -> JobEnd:
    """Return how a job ended: its worst rank's status, its slowest rank's seconds."""
    status: str = _DONE
    reason = _NONE
    for absent in run.absent.values():
        status, reason = JobStatusName.FAILED, absent
    moved_bytes, ended_s, slowest = 0, run.opened_s, None
    for part in run.parts.values():
        moved_bytes += part.moved_bytes
        if slowest is None or part.ended_s >= ended_s:
            ended_s, slowest = part.ended_s, part
        if part.end is not None and part.end.status is not _DONE:
            status, reason = part.end.status, part.end.reason
    job = run.job
    end_tokens = job.total_tokens if isinstance(job, LoadJob) else job.end_tokens
    stages = slowest.stages if slowest is not None else (0.0, 0.0, 0.0)
    return JobEnd(
        run.work.kind, status, reason, end_tokens, moved_bytes, run.opened_s, ended_s, stages
    )


def longest_tokens(shape: SessionShape, admission: Admission) -> int:
    """Return the longest hit that a request of this length can have."""
    align = shape.hit_alignment
    return (admission.num_tokens - 1) // align * align

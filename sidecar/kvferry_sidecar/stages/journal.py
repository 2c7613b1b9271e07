"""What operators are told of requests: token counts by tier and reason, and the record of each.

The stages call one method per thing that happened. It counts and appends; it decides nothing, so
a stage reads the same without its calls.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from kvferry_connector.wire.hot import Answer, Ask, JobStatusName, LoadJob, Probe

from kvferry_sidecar.limits import Limits
from kvferry_sidecar.outcomes.reasons import Reason
from kvferry_sidecar.outcomes.records import NO_WHY, JobEnd, Record, Records, Why
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
_NO_TIME = (0.0, 0.0, 0.0)
# Status, reason, moved bytes, when, seconds by stage.
_Ended = tuple[JobStatusName, Reason, int, float, tuple[float, float, float]]


@dataclass(slots=True)
class _Misses:
    """Of one reason. ``requests``: those that missed as a whole."""

    tokens: int = 0
    requests: int = 0


class Journal:
    """Owned by the control loop. Tokens and requests count first answers only."""

    def __init__(self, pool: HostTier, limits: Limits) -> None:
        self._pool = pool
        self.records = Records(limits.records_max)
        self._record = self.records.get
        self.namespaces = Namespaces()
        self.hit_tokens: defaultdict[str, int] = defaultdict(int)  # by tier
        self._misses: defaultdict[Reason, _Misses] = defaultdict(_Misses)
        self.load_tokens: defaultdict[str, int] = defaultdict(int)  # by how the load ended
        self.saved_objects = 0
        self.curve = Curve(pool.stats().total_bytes)

    def reading(self) -> JournalReading:
        """Return the counts so far."""
        return JournalReading(
            hit_tokens=dict(self.hit_tokens),
            miss_tokens={str(reason): one.tokens for reason, one in self._misses.items()},
            miss_requests={str(reason): one.requests for reason, one in self._misses.items()},
            load_tokens=dict(self.load_tokens),
            saved_objects=self.saved_objects,
            records=len(self.records),
            records_dropped=self.records.dropped,
            curve=self.curve.reading(),
        )

    # --- lookups ------------------------------------------------------------------------------

    def probed(self, peer: Peer, probe: Probe, now_s: float) -> Record:
        """Hashes of a request came; returns its record, for its admission."""
        session, request = peer.session, probe.request
        if len(request) > request_chars_max:
            request = request[:request_chars_max]
        key = (session.life, probe.admission)
        record = Record(session.key, request, key, now_s, probe.num_tokens)
        if probe.trace:
            record.trace = probe.trace[:trace_chars_max]
        self.records.open(record)
        return record

    def declined(self, peer: Peer, probe: Probe, now_s: float, reason: Reason) -> None:
        """Hashes of a request came, and were not taken."""
        self.probed(peer, probe, now_s).why = Why(reason)

    def hinted(
        self, peer: Peer, probe: Probe, raw: bytes, found: tuple[SessionShape, Admission],
        now_s: float,
    ) -> None:  # fmt: skip
        """The hint of a probe went out; one of nothing is explained now, while it is known."""
        shape, admission = found
        record, hint_tokens = admission.record, admission.hint_tokens
        if record is not None:
            record.hint = (hint_tokens, now_s)
        if hint_tokens:
            return
        # Nobody may ask, and its saves are stored when it ends.
        wanted_tokens = admission.longest_tokens
        self._sample(shape, admission, (0, wanted_tokens), 0, now_s)
        if record is None or not wanted_tokens:
            return
        record.could_hit_tokens = wanted_tokens
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
        self, shape: SessionShape, admission: Admission, ask: Ask, answer: Answer,
        *, now_s: float, first: bool,
    ) -> None:  # fmt: skip
        """An ask was answered by what is stored; ``first``: of this admission."""
        record = admission.record
        local_tokens, wanted_tokens = ask.local_tokens, ask.max_tokens
        hit_tokens = answer.hit_tokens
        reached = hit_tokens if hit_tokens > local_tokens else local_tokens
        if record is not None:
            if record.answered is not None:
                record.asked_again += 1
            record.answered = (local_tokens, wanted_tokens, reached, answer.sources, now_s)
        if not first:
            return
        self._sample(shape, admission, (local_tokens, wanted_tokens), hit_tokens, now_s)
        if answer.sources:
            for tier, count in answer.sources.items():
                self.hit_tokens[tier] += count
            if record is not None:
                record.prefix = admission.keys[0][0].tobytes()
        missed = wanted_tokens - reached
        if missed <= 0:
            return
        why = Why(Reason(answer.reason)) if answer.reason != _ABSENT else NO_WHY
        if why is NO_WHY and record is not None and not hit_tokens:
            why = record.why  # as it was at the hint of nothing
        if why.reason is _NONE:
            why = why_short(
                self._pool, shape, admission.keys,
                hit_tokens=hit_tokens, wanted_tokens=wanted_tokens,
            )  # fmt: skip
        self._missed(record, why, missed, whole=reached == local_tokens)

    def refused(self, session: Session, admission: int, reason: Reason, now_s: float) -> None:
        """An ask was answered 0 for another reason than what is stored."""
        record = self._record((session.life, admission))
        if record is None:
            return
        former = record.answered
        if former is not None:
            record.asked_again += 1
        record.answered = (*former[:4], now_s) if former else (None, 0, 0, {}, now_s)
        record.why = Why(reason)

    def unasked(self, admission: Admission) -> None:
        """A request ended at its hint of nothing."""
        record = admission.record
        why = record.why if record is not None else NO_WHY
        self._missed(record, why, admission.longest_tokens, whole=True)

    def used_locally(self, shape: SessionShape, admission: Admission, now_s: float) -> None:
        """A request ended that never asked: the engine had itself what there was."""
        self._sample(shape, admission, (0, 0), 0, now_s)

    def stored(self, shape: SessionShape, keys: list[Keys], total_bytes: int) -> None:
        """Objects of ``total_bytes`` were stored, with ``keys`` per stored group."""
        if shape.whole:
            self.curve.stored(keys[shape.whole[0]], total_bytes)

    def released(
        self, session: Session, number: int, admission: Admission | None, now_s: float
    ) -> None:
        """The engine needs nothing more of this admission."""
        record = admission.record if admission is not None else None
        if record is None:  # its keys were dropped before
            record = self._record((session.life, number))
        if record is not None and not record.ended_s:
            record.ended_s = now_s

    def gone(self, session: Session, now_s: float) -> None:
        """The engine's scheduler half is gone: its last releases may never come."""
        for admission in self.records.admissions_of(session.life):
            self.released(session, admission, None, now_s)

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

    def _missed(self, record: Record | None, why: Why, tokens: int, *, whole: bool) -> None:
        misses = self._misses[why.reason or _ABSENT]
        misses.tokens += tokens
        misses.requests += whole
        if record is not None:
            record.why = why

    # --- jobs ---------------------------------------------------------------------------------

    def opened(self, run: JobRun, now_s: float) -> None:
        """A job was taken from its first rank."""
        record = run.record = self._record((run.job.life, run.job.admission))
        if record is not None and run.work.kind == "load":
            record.load_s = now_s

    def settled(self, run: JobRun) -> None:
        """Every local rank of a job is terminal."""
        job, work, parts = run.job, run.work, run.parts
        if len(parts) == 1 and not run.absent:  # as in most engines
            (part,) = parts.values()
            end = part.end
            assert end is not None, "a settled run is decided"
            status, reason = end.status, end.reason
            moved_bytes, ended_s, stages = part.moved_bytes, part.ended_s, part.stages
        else:
            status, reason, moved_bytes, ended_s, stages = _end_of(run)
        if isinstance(job, LoadJob):
            end_tokens, start_tokens, objects = job.total_tokens, job.local_tokens, 0
            self.load_tokens[status] += end_tokens - start_tokens
        else:
            end_tokens, start_tokens = job.end_tokens, 0
            objects = work.objects if status is _DONE else 0
            self.saved_objects += objects
        if run.record is not None:
            run.record.settled(JobEnd(
                work.kind, status, reason, end_tokens, moved_bytes, run.opened_s, ended_s, stages,
                start_tokens, objects,
            ))  # fmt: skip


def _end_of(run: JobRun) -> _Ended:
    """Return how a job ended: its worst rank's status, its slowest rank's seconds."""
    status, reason = _DONE, _NONE
    for absent in run.absent.values():
        status, reason = JobStatusName.FAILED, absent
    moved_bytes, ended_s, stages = 0, run.opened_s, _NO_TIME
    for part in run.parts.values():
        moved_bytes += part.moved_bytes
        if part.ended_s >= ended_s:
            ended_s, stages = part.ended_s, part.stages
        end = part.end
        if end is not None and end.status is not _DONE:
            status, reason = end.status, end.reason
    return status, reason, moved_bytes, ended_s, stages

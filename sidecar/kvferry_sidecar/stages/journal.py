"""What operators are told of requests: token counts by tier and reason, and the record of each.

The stages call one method per thing that happened. It counts and appends; it decides nothing, so
a stage reads the same without its calls.
"""

from __future__ import annotations

from collections import Counter

from kvferry_connector.wire.hot import Answer, Ask, JobStatusName, LoadJob, Probe

from kvferry_sidecar.limits import Limits
from kvferry_sidecar.outcomes.reasons import Reason
from kvferry_sidecar.outcomes.records import Event, Evicted, Prefixes, Record, Records, Why
from kvferry_sidecar.sessions.admissions import Admission, Keys
from kvferry_sidecar.sessions.model import Peer, Session
from kvferry_sidecar.stages.parts import JobRun
from kvferry_sidecar.stages.shape import SessionShape
from kvferry_sidecar.stages.snapshot import JournalReading
from kvferry_sidecar.stages.why import Namespaces, why_short
from kvferry_sidecar.tiers.host import HostTier


class Journal:
    """Owned by the control loop. Tokens and requests count first answers only."""

    def __init__(self, pool: HostTier, limits: Limits) -> None:
        self._pool = pool
        self.records = Records(limits.records_max)
        self.evicted = Evicted(limits.evicted_keys_max)
        self.prefixes = Prefixes()
        self.namespaces = Namespaces()
        self.hit_tokens: Counter[str] = Counter()  # by tier
        self.miss_tokens: Counter[Reason] = Counter()
        self.miss_requests: Counter[Reason] = Counter()
        self.load_tokens: Counter[str] = Counter()  # by how the load ended
        self.saved_objects = 0

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
            evicted_keys=len(self.evicted),
        )

    # --- lookups ------------------------------------------------------------------------------

    def probed(self, peer: Peer, probe: Probe, now_s: float, declined: Reason | None) -> None:
        """Hashes of a request came; ``declined``: they were not taken."""
        key = (peer.session.life, probe.admission)
        record = self.records.get(key) if probe.start else None
        if record is None:
            engine = "/".join(peer.session.key)
            record = self.records.open(
                key, Record(engine, probe.request[:256], probe.admission, now_s, probe.num_tokens)
            )
        record.prompt_tokens = probe.num_tokens
        record.note(Event(now_s, "hashes", probe.num_tokens))
        if declined is not None:
            record.why = Why(declined)

    def hinted(
        self, peer: Peer, probe: Probe, raw: bytes, found: tuple[SessionShape, Admission],
        now_s: float,
    ) -> None:  # fmt: skip
        """The hint of a probe went out; one of nothing is explained now, while it is known."""
        record = self.records.get((peer.session.life, probe.admission))
        if record is None:
            return
        shape, admission = found
        record.hint_tokens = admission.hint_tokens
        record.note(Event(now_s, "hint", admission.hint_tokens))
        wanted_tokens = longest_tokens(shape, admission)
        if admission.hint_tokens or not wanted_tokens:
            return
        record.wanted_tokens = wanted_tokens
        elsewhere = None
        if probe.start == 0:
            elsewhere = self.namespaces.holder(self._pool, peer.session, raw, probe.hash_bytes)
        record.why = elsewhere or self._short(shape, admission.keys, 0, wanted_tokens, now_s)

    def answered(
        self, session: Session, shape: SessionShape, admission: Admission, ask: Ask, answer: Answer,
        *, now_s: float, first: bool,
    ) -> None:  # fmt: skip
        """An ask was answered by what is stored; ``first``: of this admission."""
        record = self.records.get((session.life, ask.admission))
        reached = max(ask.local_tokens, answer.hit_tokens)
        if record is not None:
            record.asks += 1
            record.local_tokens, record.wanted_tokens = ask.local_tokens, ask.max_tokens
            record.offered_tokens, record.sources = reached, answer.sources
            record.note(Event(now_s, "answer", reached, detail=answer.reason))
        if not first:
            return
        self.hit_tokens.update(answer.sources)
        if answer.sources:
            name = admission.keys[0][:1].tobytes() if len(admission.keys[0]) else b""
            tokens = sum(answer.sources.values())
            self.prefixes.hit(name, "/".join(session.key), tokens, reached, now_s)
        missed = max(0, ask.max_tokens - reached)
        if not missed:
            return
        why = Why(Reason(answer.reason))
        if why.reason in (Reason.ABSENT, Reason.NONE):
            why = record.why if record is not None and not answer.hit_tokens else why
            if why.reason in (Reason.ABSENT, Reason.NONE):
                why = self._short(shape, admission.keys, reached, ask.max_tokens, now_s)
        self._missed(record, why, missed, whole=reached == ask.local_tokens)

    def refused(self, session: Session, admission: int, reason: Reason, now_s: float) -> None:
        """An ask was answered 0 for another reason than what is stored."""
        record = self.records.get((session.life, admission))
        if record is not None:
            record.asks += 1
            record.why = Why(reason)
            record.note(Event(now_s, "answer", 0, detail=str(reason)))

    def unasked(self, session: Session, shape: SessionShape, admission: Admission) -> None:
        """A request ended at its hint of nothing."""
        record = self.records.get((session.life, admission.number))
        why = record.why if record is not None else Why(Reason.ABSENT)
        self._missed(record, why, longest_tokens(shape, admission), whole=True)

    def released(self, session: Session, admission: int, now_s: float) -> None:
        """The engine needs nothing more of this admission."""
        record = self.records.get((session.life, admission))
        if record is not None and not record.ended_s:
            record.ended_s = now_s
            record.note(Event(now_s, "released"))

    def _missed(self, record: Record | None, why: Why, tokens: int, *, whole: bool) -> None:
        reason = why.reason or Reason.ABSENT
        self.miss_tokens[reason] += tokens
        self.miss_requests[reason] += whole
        if record is not None:
            record.why = why

    def _short(
        self, shape: SessionShape, keys: list[Keys], hit_tokens: int, wanted_tokens: int,
        now_s: float,
    ) -> Why:  # fmt: skip
        return why_short(
            self._pool, self.evicted, shape, keys,
            hit_tokens=hit_tokens, wanted_tokens=wanted_tokens, now_s=now_s,
        )  # fmt: skip

    # --- jobs ---------------------------------------------------------------------------------

    def opened(self, run: JobRun, now_s: float) -> None:
        """A job was taken from its first rank."""
        record = self.records.get((run.job.life, run.job.admission))
        if record is not None and isinstance(run.job, LoadJob):
            record.load = "open"
            record.note(Event(now_s, "load", run.job.total_tokens))

    def settled(self, run: JobRun) -> None:
        """Every local rank of a job is terminal."""
        status, reason = _worst(run)
        parts = run.parts.values()
        moved_bytes = sum(part.moved_bytes for part in parts)
        record = self.records.get((run.job.life, run.job.admission))
        if isinstance(run.job, LoadJob):
            tokens = run.job.total_tokens - run.job.local_tokens
            self.load_tokens[status] += tokens
            if record is not None:
                record.load, record.load_reason = status, reason
                record.loaded_tokens += tokens if status == JobStatusName.DONE else 0
        elif status == JobStatusName.DONE:
            self.saved_objects += run.work.objects
        if record is None:
            return
        if not isinstance(run.job, LoadJob):
            record.saves += 1
            record.saved_objects += run.work.objects if status == JobStatusName.DONE else 0
        ended_s = max((part.ended_s for part in parts), default=run.opened_s)
        slowest = max(parts, key=lambda part: part.ended_s - part.accepted_s, default=None)
        detail = "" if slowest is None else _stages(slowest.stages())
        detail = f"{reason}, {detail}" if reason else detail
        end_tokens = run.job.total_tokens if isinstance(run.job, LoadJob) else run.job.end_tokens
        what = f"{run.work.kind} {status}"
        seconds = ended_s - run.opened_s
        record.note(Event(ended_s, what, end_tokens, moved_bytes, seconds, detail))


def longest_tokens(shape: SessionShape, admission: Admission) -> int:
    """Return the longest hit that a request of this length can have."""
    align = shape.rules.hit_alignment
    return (admission.num_tokens - 1) // align * align


def _worst(run: JobRun) -> tuple[str, Reason]:
    for part in run.parts.values():
        if part.end is not None and part.end.status is not JobStatusName.DONE:
            return str(part.end.status), part.end.reason
    for reason in run.absent.values():
        return str(JobStatusName.FAILED), reason
    return str(JobStatusName.DONE), Reason.NONE


def _stages(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in seconds.items())

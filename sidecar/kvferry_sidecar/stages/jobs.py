"""Jobs from submit to outcome: every accepted part ends exactly once, every job is settled once.

A job is opened by the first rank that submits it; the others must bring the same bytes. It is
settled when every local rank is terminal: its part ended, or it can never start any more.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import msgspec
from kvferry_connector.wire.codec import WireError, id_chars_max, read_job
from kvferry_connector.wire.hot import (
    Cancel,
    Job,
    JobState,
    JobStatus,
    JobStatusName,
    LoadJob,
    OutcomeAck,
    SaveJob,
    Submit,
)
from kvferry_connector.wire.hot import Outcome as OutcomeMessage

from kvferry_sidecar.outcomes.ledger import PartKey
from kvferry_sidecar.outcomes.reasons import Decline, Reason
from kvferry_sidecar.sessions.model import Peer, Session, SessionKey
from kvferry_sidecar.stages.copying import CopyDesk
from kvferry_sidecar.stages.core import Core
from kvferry_sidecar.stages.loads import open_load
from kvferry_sidecar.stages.parts import End, JobRun, Part
from kvferry_sidecar.stages.saves import open_save
from kvferry_sidecar.stages.shape import SessionShape

_DIGEST_BYTES = 16
T = TypeVar("T")
JobKey = tuple[bytes, int]  # (life, job)


class Jobs:
    """Open jobs by (life, job), their parts by (generation, job)."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.desk = CopyDesk(
            core.copies,
            core.limits,
            core.log,
            self._on_stopped,
            serialized=core.modes.mode == "serialized",
        )
        self._runs: dict[JobKey, JobRun] = {}
        self._digests: dict[bytes, JobRun] = {}
        self._parts: dict[PartKey, Part] = {}
        self._runs_of: Counter[SessionKey] = Counter()
        self._parts_of: Counter[int] = Counter()  # by generation

    # --- messages ---------------------------------------------------------------------------

    def on_submit(self, peer: Peer, submit: Submit, raw: list[bytes], now_s: float) -> None:
        """Accept one rank's part of a job, or answer why not; a repeated submit does nothing."""
        if peer.role != "worker":
            self._core.refuse_frame(peer, Decline(Reason.ROLE, "only a rank submits jobs"))
            return
        digest = _digest(submit.job, raw)
        known = self._digests.get(digest)
        try:
            job = known.job if known is not None else _bounded(read_job(submit.job))
        except WireError as error:
            self._core.refuse_frame(peer, Decline(Reason.FRAMES, str(error)))
            return
        key = PartKey(peer.generation, job.job)
        open_part = self._parts.get(key)
        if open_part is not None:
            if open_part.run.digest != digest:
                what = f"job {job.job} is open with other bytes"
                self._core.refuse_frame(peer, Decline(Reason.DIGEST, what), job=job.job)
            return
        if self._core.outbox.repeat(key, now_s):
            return
        taken = self._admit(peer, job, digest, raw, now_s)
        if isinstance(taken, Decline):
            self._refuse(peer, job, taken, now_s)
            return
        self._accept(peer, key, taken, now_s)

    def on_cancel(self, peer: Peer, cancel: Cancel, now_s: float) -> None:
        """Stop a job on every rank; one that did not come yet is refused when it does."""
        end = End(JobStatusName.CANCELLED, Reason.CANCELLED)
        run = self._runs.get((peer.session.life, cancel.job))
        if run is None:
            for half in _ranks_of(peer):
                if (part := self._parts.get(PartKey(half.generation, cancel.job))) is not None:
                    self.desk.stop(part, end, now_s)
                else:
                    self._core.tombstones.add(half.generation, cancel.job)
            return
        for rank in run.missing():
            self._give_up(run, rank, Reason.CANCELLED)
        for part in list(run.parts.values()):
            self.desk.stop(part, end, now_s)
        self._settle_if_decided(run)

    def on_status(self, peer: Peer, status: JobStatus, now_s: float) -> None:
        """Say what became of a job on this rank; an unknown one may never start any more."""
        if peer.role != "worker":
            self._core.refuse_frame(peer, Decline(Reason.ROLE, "only a rank asks for jobs"))
            return
        key = PartKey(peer.generation, status.job)
        if key in self._parts:
            self._core.send(peer, JobState(status.job, "running"))
            return
        if self._core.outbox.repeat(key, now_s):
            return
        self._core.tombstones.add(peer.generation, status.job)
        run = self._runs.get((peer.session.life, status.job))
        if run is not None and peer.rank in run.missing():
            self._give_up(run, peer.rank, Reason.ASKED)
            self._settle_if_decided(run)
        self._core.send(peer, JobState(status.job, "unknown"))

    def on_acknowledged(self, peer: Peer, ack: OutcomeAck) -> None:
        """These outcomes arrived."""
        self._core.outbox.acknowledge(peer.generation, ack.jobs)

    # --- events -----------------------------------------------------------------------------

    def on_gone(self, peer: Peer, reason: Reason, now_s: float) -> None:
        """A rank is gone for good: its copies stop, and nobody is left to tell."""
        generation = peer.generation
        self._core.outbox.drop(generation)
        self._core.tombstones.drop(generation)
        for part in [p for key, p in self._parts.items() if key.generation == generation]:
            part.peer_gone = True
            self.desk.stop(part, End(JobStatusName.CANCELLED, reason), now_s)
        for run in [run for run in self._runs.values() if run.session is peer.session]:
            if peer.rank in run.missing():
                run.absent[peer.rank] = reason
                self._settle_if_decided(run)

    def sweep(self, now_s: float) -> None:
        """Ranks that did not submit their part in time never will."""
        oldest_s = now_s - self._core.limits.ranks_wait_ms_max / 1e3
        late = []
        for run in self._runs.values():
            if run.opened_s > oldest_s:
                break
            if run.missing():
                late.append(run)
        for run in late:
            for rank in run.missing():
                self._give_up(run, rank, Reason.LATE)
            self._settle_if_decided(run)

    def stop_all(self, end: End, now_s: float) -> None:
        """Shutdown: end what is still open; its copies drain first."""
        for run in list(self._runs.values()):
            for rank in run.missing():
                self._give_up(run, rank, end.reason)
            for part in list(run.parts.values()):
                self.desk.stop(part, end, now_s)
            self._settle_if_decided(run)

    # --- readings ---------------------------------------------------------------------------

    def open_parts(self) -> dict[PartKey, Part]:
        """Parts that did not end yet. Read only."""
        return self._parts

    def open_runs(self) -> int:
        """Jobs that are not settled yet."""
        return len(self._runs)

    def runs(self) -> Iterable[JobRun]:
        """Open jobs, oldest first. Read only."""
        return self._runs.values()

    def oldest_s(self, now_s: float) -> float:
        """Age of the oldest open job; 0 without one."""
        oldest = next(iter(self._runs.values()), None)
        return 0.0 if oldest is None else max(0.0, now_s - oldest.opened_s)

    def touches(self, session: Session) -> bool:
        """Whether a copy of this session's memory runs, or may still start."""
        return any(part.run.session is session for part in self._parts.values())

    # --- the life of one part ---------------------------------------------------------------

    def _admit(
        self, peer: Peer, job: Job, digest: bytes, raw: list[bytes], now_s: float
    ) -> JobRun | Decline:
        session, limits = peer.session, self._core.limits
        if job.life != session.life:
            return Decline(Reason.LIFE, "the job was made by another life of the scheduler half")
        if self._core.tombstones.refuses(peer.generation, job.job):
            return Decline(Reason.TOMBSTONE, f"job {job.job} must not start on this rank")
        shape = self._core.shape(session)
        if shape is None or peer.geometry is None or peer.rank not in shape.ranks:
            return Decline(Reason.NOT_READY, "not every local rank is registered")
        if peer.fence is None:
            return Decline(Reason.NO_FENCE, "the rank passed no fence page at attach")
        waiting = self._parts_of[peer.generation] + self._core.outbox.count(peer.generation)
        if waiting >= limits.outcomes_unacked_max:
            return Decline(Reason.OUTCOMES_MAX, f"{waiting} outcomes are open or unacknowledged")
        run = self._runs.get((job.life, job.job))
        if run is None:
            opened = self._open(session, shape, job, raw, now_s)
            if isinstance(opened, JobRun):
                self._enter(opened, digest)
                self._core.note_evictions()
                self._core.journal.opened(opened, now_s)
            return opened
        if run.digest != digest:
            return Decline(Reason.DIGEST, "the bytes differ from those of the first rank")
        if peer.rank not in run.missing():
            return Decline(Reason.DECIDED, "the job goes on without this rank")
        return run

    def _open(
        self, session: Session, shape: SessionShape, job: Job, raw: list[bytes], now_s: float
    ) -> JobRun | Decline:
        if self._runs_of[session.key] >= self._core.limits.jobs_max:
            return Decline(Reason.JOBS_MAX, f"{self._core.limits.jobs_max} jobs are in flight")
        absent = {
            rank: Reason.TOMBSTONE
            for rank in shape.ranks
            if (half := session.workers.get(rank)) is None
            or self._core.tombstones.refuses(half.generation, job.job)
        }
        if isinstance(job, SaveJob):
            if self._core.draining:
                return Decline(Reason.DRAINING, "no save is started while the sidecar drains")
            if self._core.saves_paused:
                return Decline(Reason.PAUSED, "an operator paused saves")
            if absent:
                return Decline(Reason.PARTNER, f"ranks {sorted(absent)} cannot take part")
        work = (
            open_load(self._core, session, shape, job, raw)
            if isinstance(job, LoadJob)
            else open_save(self._core, session, shape, job, raw)
        )
        if isinstance(work, Decline):
            return work
        return JobRun(session, job, shape.ranks, work, now_s, absent=absent)

    def _enter(self, run: JobRun, digest: bytes) -> None:
        run.digest = digest
        self._runs[run.job.life, run.job.job] = run
        self._digests[digest] = run
        self._runs_of[run.session.key] += 1

    def _accept(self, peer: Peer, key: PartKey, run: JobRun, now_s: float) -> None:
        rank_index = run.ranks.index(peer.rank)
        copies = run.work.copies(peer, rank_index)
        part = Part(run, peer, key, rank_index, now_s, now_s, copies)
        run.parts[peer.rank] = part
        self._parts[key] = part
        self._parts_of[peer.generation] += 1
        self._core.ledger.accept(run.session.key, key, run.work.kind)
        self.desk.admit(part, now_s)

    def _on_stopped(self, part: Part, now_s: float) -> None:
        """Nothing of the part runs any more: settle the job if it was the last, then report."""
        end = self._conclude(part)
        part.ended(end, now_s)
        del self._parts[part.key]
        _uncount(self._parts_of, part.key.generation)
        if not part.peer_gone:
            self._core.tombstones.add(part.key.generation, part.run.job.job)
        self._settle_if_decided(part.run)
        seconds = now_s - part.accepted_s
        self._core.ledger.end(
            part.key, end.status, end.reason, part.moved_bytes, seconds, stages=part.stages
        )
        if not part.peer_gone:
            message = OutcomeMessage(
                part.run.job.job,
                part.peer.rank,
                end.status,
                end.reason,
                part.moved_bytes,
                seconds,
                end.shorter_tokens,
            )
            self._core.outbox.post(part.peer, message, now_s)

    def _conclude(self, part: Part) -> End:
        """How it ended. A bug in that must cost neither its outcome nor those that follow."""
        try:
            return part.run.work.conclude(part)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine waits for an outcome
            self._bug("end of a job failed", part.run.job.job, error)
            return End(JobStatusName.FAILED, Reason.INTERNAL)

    def _bug(self, event: str, job: int, error: Exception) -> None:
        self._core.log.error(event, job=job, exc_info=error)

    def _settle_if_decided(self, run: JobRun) -> None:
        key = (run.job.life, run.job.job)
        if not run.decided() or self._runs.get(key) is not run:
            return
        for step in (run.work.settle, self._core.journal.settled):
            try:
                step(run)
            except Exception as error:  # noqa: BLE001 - as above; what it held may be lost, loudly
                self._bug("job not settled", run.job.job, error)
        # A run and its parts name each other, and a part's copies hold the engine's memory: left
        # to the collector, an engine that is gone would stay mapped until its next round.
        run.parts.clear()
        del self._runs[key]
        del self._digests[run.digest]
        _uncount(self._runs_of, run.session.key)

    def _refuse(self, peer: Peer, job: Job, decline: Decline, now_s: float) -> None:
        """A refused submit gets its outcome too, remembered until acknowledged."""
        # While saves are paused each one is refused: the operator knows, and the count says so.
        tell = self._core.log.debug if decline.reason is Reason.PAUSED else self._core.log.warning
        tell(
            "submit refused",
            reason=str(decline.reason),
            detail=decline.detail,
            job=job.job,
            rank=peer.rank,
        )
        self._core.ledger.refuse(peer.session.key, decline.reason)
        if decline.reason is not Reason.LIFE:  # ids of another life say nothing about this one
            self._core.tombstones.add(peer.generation, job.job)
            run = self._runs.get((job.life, job.job))
            if run is not None and peer.rank in run.missing():
                run.absent[peer.rank] = decline.reason
                self._settle_if_decided(run)
        outcome = OutcomeMessage(job.job, peer.rank, JobStatusName.FAILED, decline.reason, 0, 0.0)
        if self._core.outbox.count(peer.generation) < self._core.limits.outcomes_unacked_max:
            self._core.outbox.post(peer, outcome, now_s)
        else:
            # Not kept: a half that asks for it is told "unknown", which ends it as failed too.
            self._core.send(peer, outcome)

    def _give_up(self, run: JobRun, rank: int, reason: Reason) -> None:
        """A rank that did not submit never will: its late submit is refused."""
        run.absent[rank] = reason
        peer = run.session.workers.get(rank)
        if peer is not None:
            self._core.tombstones.add(peer.generation, run.job.job)


def _uncount(counts: Counter[T], name: T) -> None:
    """Take one off, and do not keep a name whose count is 0."""
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _bounded(job: Job) -> Job:
    """A request id is a label here; a frame may hold a mebibyte of it, an open job must not."""
    if len(job.request) <= id_chars_max:
        return job
    return msgspec.structs.replace(job, request=job.request[:id_chars_max])


def _digest(job: bytes, raw: list[bytes]) -> bytes:
    """Digest over the frames and their lengths, so that no byte can move between frames."""
    lengths = struct.pack(f"<{len(raw) + 1}Q", len(job), *map(len, raw))
    state = hashlib.blake2b(lengths, digest_size=_DIGEST_BYTES)
    for frame in (job, *raw):
        state.update(frame)
    return state.digest()


def _ranks_of(peer: Peer) -> list[Peer]:
    """Return the ranks a half speaks for: its own, or all of the engine."""
    return list(peer.session.workers.values()) if peer.role == "scheduler" else [peer]

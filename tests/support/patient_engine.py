"""An engine that asks again, as the connector does: it gets through whatever frames suffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvferry_connector.wire.hot import (
    Answer,
    Cancel,
    Error,
    JobState,
    JobStatus,
    NeedFull,
    Outcome,
    OutcomeAck,
    Release,
    Submit,
)
from support.client_half import ClientEngine, ClientHalf
from support.hot_engine import Job
from support.raw_half import BLOCK_TOKENS

M = TypeVar("M")
PATIENCE_S = 0.15  # then it asks again
TRIES_MAX = 600


class PatientEngine:
    """Over a ClientEngine. Every method returns what became of it, never an exception."""

    def __init__(self, engine: ClientEngine) -> None:
        self.engine = engine
        self.outcomes: dict[int, list[Outcome]] = {}

    def hear(
        self, half: ClientHalf, kind: type[M], which: Callable[[M], bool] = lambda _: True
    ) -> M | None:
        """Return a message of this kind, or None when its time is over."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            self.tend()
            for at, message in enumerate(half.heard):
                if isinstance(message, kind) and which(message):
                    del half.heard[at]
                    return message
            if time.monotonic() > end_s:
                return None

    def tend(self) -> None:
        """Take what has come, and acknowledge every outcome: each time that it comes."""
        worker = self.engine.worker_half
        self.engine.scheduler_half.take()
        worker.take()
        for message in worker.heard:
            if isinstance(message, Outcome):
                self.outcomes.setdefault(message.job, []).append(message)
                worker.send(OutcomeAck([message.job]))
        worker.heard = [m for m in worker.heard if not isinstance(m, Outcome)]

    def end_of(self, job: int) -> str:
        """Return "done", "failed" or "cancelled", or "unknown": it never began and never will."""
        for _ in range(TRIES_MAX):
            end = self._end_within(job, PATIENCE_S)
            if end:
                return end
            self.engine.worker.send(JobStatus(job))
        raise AssertionError(f"job {job} has no end")

    def _end_within(self, job: int, patience_s: float) -> str:
        """Return a job's end, or "" when its time is over."""
        end_s = time.monotonic() + patience_s
        worker = self.engine.worker_half
        while time.monotonic() < end_s:
            self.tend()
            if job in self.outcomes:
                return self.outcomes[job][0].status
            if any(isinstance(m, JobState) and m == JobState(job, "unknown") for m in worker.heard):
                return "unknown"
        return ""

    def save(self, prompt: str, blocks: Sequence[int]) -> None:
        """Save until it is done: an unknown job is ordered anew, under another number."""
        self.engine.fill(prompt, blocks)
        for _ in range(9):
            if self.end_of(self.engine.submit(self.engine.save_job(prompt, blocks))) == "done":
                return
        raise AssertionError("no save is done")

    def lease(self, prompt: str, count: int) -> tuple[int, Answer]:
        """Ask until there is an answer, with the hashes again when they are wanted."""
        engine, half = self.engine, self.engine.scheduler_half
        admission = engine.next_admission()
        engine.probe(admission, prompt, count)
        for _ in range(TRIES_MAX):
            seq = engine.ask(admission, count * BLOCK_TOKENS)
            heard = self.hear(half, (Answer, NeedFull), partial(_is_for, admission, seq))
            if isinstance(heard, Answer):
                return admission, heard
            if isinstance(heard, NeedFull):
                engine.probe(admission, prompt, count)
        raise AssertionError("no answer")

    def load(self, prompt: str, blocks: Sequence[int]) -> int:
        """Look up, load, compare; a load that never began is asked for anew. Returns the hit."""
        for _ in range(9):
            admission, answer = self.lease(prompt, len(blocks))
            used = blocks[: answer.hit_tokens // BLOCK_TOKENS]
            self.engine.wipe(used)
            end = self.end_of(self.engine.submit(self.engine.load_job(admission, used)))
            self.release(admission)
            if end == "done":
                assert self.engine.holds(prompt, used), "other bytes than were saved"
                return answer.hit_tokens
        raise AssertionError("no load is done")

    def release(self, admission: int) -> None:
        """Give an admission up; the heartbeats say so too, should this be lost."""
        self.engine.scheduler_half.client.set_live(self.engine.asked, [])
        self.engine.scheduler.send(Release([admission]))

    def cancelled(self, job: Job) -> str:
        """Submit a job that waits for its step, and cancel it until it has ended."""
        number = self.engine.submit(job)
        for _ in range(TRIES_MAX):
            self.engine.scheduler.send(Cancel(number))
            end = self._end_within(number, PATIENCE_S / 2)
            self.engine.worker.send(JobStatus(number))
            if end or (end := self._end_within(number, PATIENCE_S / 2)):
                return end
        raise AssertionError("a cancelled job has no end")

    def refused(self) -> Error:
        """Send what is no job until it is refused."""
        for _ in range(TRIES_MAX):
            self.engine.worker.send(Submit(b"\xc1"))
            error = self.hear(self.engine.worker_half, Error, lambda found: found.code == "frames")
            if error is not None:
                return error
        raise AssertionError("garbage is not refused")


def _is_for(admission: int, seq: int, message: Answer | NeedFull) -> bool:
    """Whether this answers the last ask: an earlier one's answer counts as little as none."""
    return message.admission == admission and getattr(message, "seq", seq) == seq

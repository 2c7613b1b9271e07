"""A sidecar and the workers of one engine, scripted, at the connector's client interface.

It stands where ``Client`` stands in the scheduler half, answers from a store of keys, and runs
the jobs of each step against a model of KV memory: the content of a block is the prefix hash of
the chunk it holds. A wrong block id, a wrong table index, a block read after its reuse or a load
into somebody else's block all show as a wrong content.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvferry_connector.jobs import JobOrder, Report
from kvferry_connector.link import Link
from kvferry_connector.meta import FerryMetadata
from kvferry_connector.wire import codec, hot
from kvferry_connector.wire.attach import RegisterEngine

Key = tuple[bytes, int, bytes]  # version, group, prefix hash at the chunk's end
Content = tuple[int, bytes]


@dataclass
class Known:
    """What the sidecar knows of an admission."""

    probe: hot.Probe
    hashes: list[bytes]
    leased_tokens: int = 0


@dataclass
class Running:
    """A job on the (one) rank; it ends when ``steps_left`` is 0."""

    order: JobOrder
    job: hot.Job
    frames: list[bytes]
    steps_left: int
    cancelled: bool = False


@dataclass
class StepEnd:
    """What the worker half would report at the end of a step."""

    reports: dict[int, list[Report]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class ScriptedNode:
    """Set the public attributes to script it; ``messages`` holds all that was sent to it."""

    def __init__(self, block_tokens: list[int], hash_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._hash_tokens = hash_tokens
        self.epoch = 1
        self.away = False
        self.ready = True
        self.is_silent = False
        self.takes_sends = True
        self.answers = True  # False: asks are kept in ``unanswered``
        self.hints = False
        self.load_fails = False
        self.load_steps = 1
        self.save_steps = 1
        self.store: set[Key] = set()
        self.content: dict[int, Content] = {}
        self.known: dict[int, Known] = {}
        self.unanswered: list[hot.Ask] = []
        self.inbox: list[hot.FromSidecar] = []
        self.messages: list[hot.FromHalf] = []
        self.live: tuple[int, list[int]] = (0, [])
        self.rotations: list[bytes] = []
        self.registration: RegisterEngine | None = None
        self.running: list[Running] = []
        self.saved: Counter[Key] = Counter()
        self.jobs: list[hot.Job] = []
        self.closed = False

    # --- the client's interface --------------------------------------------------------------

    def __call__(self, config: Any, half: Any, registration: RegisterEngine) -> ScriptedNode:
        self.registration = registration
        return self

    def start(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def link(self) -> Link | None:
        if self.away:
            return None
        rules = tuple("all" for _ in self._block_tokens)
        return Link(self.epoch, 7, 1, rules, ready=self.ready)

    def silent(self) -> bool:
        return self.is_silent

    def is_dead(self, epoch: int) -> bool:
        return epoch < self.epoch

    def rotate(self, version: bytes) -> None:
        self.rotations.append(version)

    def set_live(self, as_of: int, live: list[int]) -> None:
        self.live = (as_of, list(live))

    def send(self, link: Link, message: hot.FromHalf, raw: Any = ()) -> bool:
        if not self.takes_sends or self.away or link.epoch != self.epoch:
            return False
        self.messages.append(message)
        if isinstance(message, hot.Probe):
            self._probe(message, bytes(raw[0]))
        elif isinstance(message, hot.Ask):
            self.unanswered.append(message)
            if self.answers:
                self.answer_all()
        elif isinstance(message, hot.Release):
            for admission in message.admissions:
                self.known.pop(admission, None)
        elif isinstance(message, hot.Cancel):
            for running in self.running:
                running.cancelled |= running.order.job == message.job
        return True

    def receive(self, link: Link, wait_us: int = 0) -> list[tuple[hot.FromSidecar, list[bytes]]]:
        taken, self.inbox = self.inbox, []
        return [(message, []) for message in taken]

    # --- the sidecar -------------------------------------------------------------------------

    def restart(self) -> None:
        """A new epoch: committed keys stay, everything else is gone."""
        self.epoch += 1
        self.known.clear()
        self.unanswered.clear()
        self.inbox.clear()

    def sent(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    def answer_all(self) -> None:
        for ask in self.unanswered:
            known = self.known.get(ask.admission)
            if known is None:
                self.inbox.append(hot.NeedFull(ask.admission))
                continue
            hit = min(self._hit(known), ask.max_tokens)
            known.leased_tokens = hit if hit > ask.local_tokens else 0
            tiers = {"host": hit - ask.local_tokens} if known.leased_tokens else {}
            self.inbox.append(hot.Answer(ask.admission, ask.seq, hit, tiers))
        self.unanswered = []

    def _probe(self, probe: hot.Probe, raw: bytes) -> None:
        size = probe.hash_bytes
        hashes = [raw[at : at + size] for at in range(0, len(raw), size)]
        assert len(hashes) == probe.total
        assert probe.start == 0
        self.known[probe.admission] = known = Known(probe, hashes)
        if self.hints:
            self.inbox.append(hot.Hint(probe.admission, self._hit(known), probe.total))

    def _hit(self, known: Known) -> int:
        """The longest prefix, in steps of all groups, that is complete in every group."""
        unit = int(np.lcm.reduce(self._block_tokens))
        hit = 0
        while hit + unit <= len(known.hashes) * self._hash_tokens:
            keys = [
                (known.probe.version, group, known.hashes[end // self._hash_tokens - 1])
                for group, block in enumerate(self._block_tokens)
                for end in range(hit + block, hit + unit + 1, block)
            ]
            if not self.store.issuperset(keys):
                break
            hit += unit
        return hit

    # --- the workers -------------------------------------------------------------------------

    def execute(self, meta: FerryMetadata) -> StepEnd:
        """Submit a step's jobs, let time pass for the running ones, report what has ended."""
        end = StepEnd()
        for order in (*meta.loads, *meta.saves):
            if self.away or order.epoch != self.epoch:
                self._finish(end, order, is_load=order in meta.loads, status="failed")
                continue
            job = codec.read_job(order.body)
            assert job.job == order.job
            assert job.step == meta.step
            self.jobs.append(job)
            steps = self.load_steps if isinstance(job, hot.LoadJob) else self.save_steps
            if isinstance(job, hot.LoadJob):
                assert self.known[job.admission].leased_tokens >= job.total_tokens
            self.running.append(Running(order, job, list(order.frames), steps))
        for running in list(self.running):
            running.steps_left -= 1
            if running.steps_left < 0 or running.cancelled:
                self.running.remove(running)
                is_load = isinstance(running.job, hot.LoadJob)
                self._finish(end, running.order, is_load=is_load, status=self._run(running))
        return end

    def _finish(self, end: StepEnd, order: JobOrder, *, is_load: bool, status: str) -> None:
        end.reports[order.job] = [Report(0, status, "scripted")]
        if is_load:
            end.finished.add(order.request)
            if status != "done":
                end.failed.add(order.request)

    def _run(self, running: Running) -> str:
        job = running.job
        if running.cancelled:
            return "cancelled"
        ids = iter(np.frombuffer(running.frames[0], "<i4").tolist())
        if isinstance(job, hot.SaveJob):
            raw, size = running.frames[1], job.hash_bytes
            hashes = [raw[at : at + size] for at in range(0, len(raw), size)]
            assert len(hashes) == (job.end_tokens - job.start_tokens) // self._hash_tokens
            first = job.first_hash
        else:
            hashes, first = self.known[job.admission].hashes, 0
        for table in job.tables:
            block_tokens = self._block_tokens[table.group]
            for chunk, block in zip(
                range(table.start, table.start + table.count),
                itertools.islice(ids, table.count),
                strict=True,
            ):
                assert block != 0, "the null block is never the end of a copy"
                name = hashes[(chunk + 1) * block_tokens // self._hash_tokens - 1 - first]
                if isinstance(job, hot.SaveJob):
                    assert self.content.get(block) == (table.group, name), (job, chunk, block)
                    self.store.add((job.version, table.group, name))
                    self.saved[job.version, table.group, name] += 1
                else:
                    self.content[block] = (table.group, b"torn") if self.load_fails else (
                        table.group, name,
                    )  # fmt: skip
        return "failed" if isinstance(job, hot.LoadJob) and self.load_fails else "done"

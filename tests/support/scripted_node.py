"""A sidecar and the workers of one engine, scripted, at the connector's client interface.

It stands where ``Client`` stands in the scheduler half, answers from a store of keys, and runs
the jobs of each step against a model of KV memory: the content of a block is the prefix hash of
the chunk it holds. A wrong block id, a wrong table index, a block read after its reuse or a load
into somebody else's block all show as a wrong content. What is kept, hit and loaded of each group
is the sidecar's own answer (its masks are proven against vLLM elsewhere).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvferry_connector.jobs import JobOrder, Report
from kvferry_connector.link import Link
from kvferry_connector.meta import FerryMetadata
from kvferry_connector.wire import codec, hot
from kvferry_connector.wire.attach import RegisterEngine
from kvferry_sidecar.masks.expand import Blocks, expand_load
from kvferry_sidecar.masks.load import needed_chunks
from kvferry_sidecar.masks.objects import partial_tail
from kvferry_sidecar.masks.rules import Refused, Rules, check
from kvferry_sidecar.masks.search import find_hit
from kvferry_sidecar.masks.store import kept_boundaries, kept_chunks
from kvferry_sidecar.sessions.model import RankGeometry, RankGroup
from kvferry_sidecar.sessions.rules import rules_of, save_rule_of
from support.contents import Contents

Key = tuple[bytes, int, bytes]  # version, group, prefix hash at the chunk's end


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
    rotation: int
    cancelled: bool = False
    known: Known | None = None


@dataclass
class StepEnd:
    """What the worker half would report at the end of a step."""

    reports: dict[int, list[Report]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)  # what another connector did not load
    ended_step: int = 0


class ScriptedNode:
    """Set the public attributes to script it; ``messages`` holds all that was sent to it."""

    def __init__(self, groups: list[RankGroup], hash_tokens: int) -> None:
        self._groups = groups
        self._hash_tokens = hash_tokens
        self.rules: Rules | None = None  # from the registration on
        self.epoch = 1
        self.away = False
        self.ready = True
        self.is_silent = False
        self.takes_sends = True
        self.hears = True  # False: nothing is cancelled
        self.answers = True  # False: asks are kept in ``unanswered``
        self.hints = False
        self.tells_ends = True  # False: what ranks say of a step in doubt is lost
        self.load_fails = False
        self.damaged: set[Key] = set()  # objects whose bytes do not verify
        self.load_steps = 1
        self.save_steps = 1
        self.store: set[Key] = set()
        self.objects: dict[Key, frozenset[bytes]] = {}  # what was copied, by ``store``'s keys
        self.contents = Contents()
        self.known: dict[int, Known] = {}
        self.unanswered: list[hot.Ask] = []
        self.inbox: list[hot.FromSidecar] = []
        self.messages: list[hot.FromHalf] = []
        self.live: tuple[int, list[int]] = (0, [])
        self.rotations: list[bytes] = []
        self.registration: RegisterEngine | None = None
        self.running: list[Running] = []
        self.saved: Counter[Key] = Counter()
        self.lost: Counter[Key] = Counter()  # kept by the mask, but null by then
        self.jobs: list[hot.Job] = []
        self.news: Counter[str] = Counter()  # what the client counted and did not tell yet
        self.closed = False

    # --- the client's interface --------------------------------------------------------------

    def __call__(self, config: Any, half: Any, registration: RegisterEngine) -> ScriptedNode:
        self.registration = registration
        geometry = RankGeometry(1, tuple(self._groups), {}, b"", self._hash_tokens)
        self.rules = rules_of(registration, geometry)
        assert not isinstance(check(self.rules), Refused), check(self.rules)
        return self

    def start(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def link(self) -> Link | None:
        if self.away:
            return None
        assert self.rules is not None
        rules = tuple(save_rule_of(self.rules, group) for group in self._groups)
        return Link(self.epoch, 7, 1, rules, ready=self.ready)

    def silent(self) -> bool:
        return self.is_silent

    def is_dead(self, epoch: int) -> bool:
        return epoch < self.epoch

    def rotate(self, version: bytes) -> None:
        self.rotations.append(version)

    def tell(self, count: Callable[[str, int], None]) -> None:
        while self.news:
            count(*self.news.popitem())

    def set_pace(self, token_ns: int) -> None:
        self.token_ns = token_ns

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
                running.cancelled |= self.hears and running.order.job == message.job
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
            hit = self._hit(known, ask.max_tokens)
            known.leased_tokens = hit if hit > ask.local_tokens else 0
            tiers = {"host": hit - ask.local_tokens} if known.leased_tokens else {}
            self.inbox.append(hot.Answer(ask.admission, ask.seq, hit, tiers))
        self.unanswered = []

    def _probe(self, probe: hot.Probe, raw: bytes) -> None:
        size = probe.hash_bytes
        hashes = [raw[at : at + size] for at in range(0, len(raw), size)]
        if probe.start:
            former = self.known.get(probe.former)
            if former is None or former.hashes[-1:] != [probe.predecessor]:
                self.inbox.append(hot.NeedFull(probe.admission))
                return
            hashes = former.hashes + hashes
        assert len(hashes) == probe.total
        self.known[probe.admission] = known = Known(probe, hashes)
        if self.hints:
            hit = self._hit(known, probe.num_tokens)
            self.inbox.append(hot.Hint(probe.admission, hit, probe.total))

    def _hit(self, known: Known, max_tokens: int) -> int:
        assert self.rules is not None
        present = [
            np.array(
                [
                    (known.probe.version, group.group, known.hashes[number]) in self.store
                    for number in range(unit - 1, len(known.hashes), unit)
                ],
                dtype=np.bool_,
            )
            for group in self._groups
            for unit in [self.rules.unit(group.group) // self._hash_tokens]
        ]
        return find_hit(self.rules, present, max_tokens=max_tokens).tokens

    # --- the workers -------------------------------------------------------------------------

    def execute(self, meta: FerryMetadata) -> StepEnd:
        """Submit a step's jobs, let time pass for the running ones, report what has ended."""
        end = StepEnd(ended_step=meta.step if meta.doubtful and self.tells_ends else 0)
        for order in (*meta.loads, *meta.saves):
            if self.away or order.epoch != self.epoch:
                self._finish(end, order, is_load=order in meta.loads, status="failed")
                continue
            job = codec.read_job(order.body)
            assert job.job == order.job
            assert job.step <= meta.step
            self.jobs.append(job)
            steps = self.load_steps if isinstance(job, hot.LoadJob) else self.save_steps
            known = self.known.get(job.admission)  # a job outlives what is known of its request
            if isinstance(job, hot.LoadJob):
                if known is None:  # given back while the step was still in flight: no lease
                    self._finish(end, order, is_load=True, status="failed")
                    continue
                assert known.leased_tokens >= job.total_tokens
            running = Running(order, job, list(order.frames), steps, meta.rotation, known=known)
            self.running.append(running)
        for running in list(self.running):
            running.steps_left -= 1
            if running.steps_left < 0 or running.cancelled:
                self.running.remove(running)
                is_load = isinstance(running.job, hot.LoadJob)
                status, shorter = self._run(running)
                if is_load and running.rotation != meta.rotation:  # as the worker half has it
                    status, shorter = "failed", 0
                self._finish(end, running.order, is_load=is_load, status=status, shorter=shorter)
        return end

    def _finish(
        self, end: StepEnd, order: JobOrder, *, is_load: bool, status: str, shorter: int = 0
    ) -> None:
        end.reports[order.job] = [Report(0, status, "scripted", shorter)]
        if is_load:
            end.finished.add(order.request)
            if status != "done":
                end.failed.add(order.request)

    def _run(self, running: Running) -> tuple[str, int]:
        """Return the job's status, and of a failed load what is still whole."""
        job = running.job
        if running.cancelled:
            return "cancelled", 0
        ids = iter(np.frombuffer(running.frames[0], "<i4").tolist())
        tables = {
            table.group: dict(enumerate(itertools.islice(ids, table.count), start=table.start))
            for table in job.tables
        }
        if isinstance(job, hot.SaveJob):
            raw, size = running.frames[1], job.hash_bytes
            hashes = [raw[at : at + size] for at in range(0, len(raw), size)]
            self._save(job, tables, dict(enumerate(hashes, start=job.first_hash)))
            return "done", 0
        assert running.known is not None
        bad = self._load(job, tables, running.known.hashes)
        if bad:
            self.store -= bad
            return "failed", self._hit(running.known, job.total_tokens - 1)
        return "failed" if self.load_fails else "done", 0

    def _save(
        self, job: hot.SaveJob, tables: dict[int, dict[int, int]], hashes: dict[int, bytes]
    ) -> None:
        assert self.rules is not None
        boundaries = kept_boundaries(self.rules, job.prefill_tokens, job.junction_tokens)
        for group in self._groups:
            slots = tables.get(group.group, {})
            for state in job.hand_offs:
                if state.group == group.group:
                    self._put(job, group, state.block, hashes[self._number(state.end_tokens)])
            if group.save_rule in ("hand-offs", "none"):
                assert not slots, "states are in no table, and rings are never saved"
                continue
            kept = kept_chunks(
                self.rules, group.group, start_tokens=job.start_tokens, tokens=job.end_tokens,
                boundaries=boundaries,
            ).tolist()  # fmt: skip
            ends = {chunk: (chunk + 1) * group.block_tokens for chunk in kept}
            tail = partial_tail(
                self.rules, group.group, boundary=job.tail_tokens, computed_tokens=job.end_tokens,
                hashed_tokens=job.end_tokens,
            )  # fmt: skip
            for chunk, end in zip(tail.chunks.tolist(), tail.ends.tolist(), strict=True):
                if end % group.block_tokens:
                    ends[chunk] = end
            for chunk, end in ends.items():
                name = hashes[self._number(end)]
                assert slots[chunk] or group.save_rule != "all", "full attention has every block"
                if slots[chunk]:
                    self._put(job, group, slots[chunk], name)
                else:
                    self.lost[job.version, group.group, name] += 1

    def _put(self, job: hot.SaveJob, group: RankGroup, block: int, name: bytes) -> None:
        held = self.contents.held.get(block)
        assert held is not None, (job, group.group, block)
        assert held[0] == group.group, (job, group.group, block, held)
        assert name in held[1], (job, group.group, block, held)
        assert block not in self.contents.wrong, (job, block, "wrong bytes under a valid key")
        key = (job.version, group.group, name)
        if key not in self.store:
            self.store.add(key)
            self.objects[key] = held[1]
        self.saved[key] += 1

    def _number(self, tokens: int) -> int:
        """The number of the hash that ends there."""
        assert tokens % self._hash_tokens == 0
        return tokens // self._hash_tokens - 1

    def _load(
        self, job: hot.LoadJob, tables: dict[int, dict[int, int]], hashes: list[bytes]
    ) -> set[Key]:
        """Load what is whole; returns the damaged objects it met."""
        assert self.rules is not None
        bad: set[Key] = set()
        stored = [group for group in self._groups if group.save_rule != "none"]
        assert tables.keys() == {group.group for group in stored}
        for group in stored:
            rule, slots = self.rules.groups[group.group], tables[group.group]
            ids = [slots[at] for at in sorted(slots)]
            compact = (
                len(slots) and not min(slots) and len(slots) < -(-job.total_tokens // rule.block)
            )
            if group.save_rule == "hand-offs" or compact:
                assert min(slots) == 0, "the table of a state comes whole"
                found = expand_load(
                    rule, ids, total_tokens=job.total_tokens, local_tokens=job.local_tokens,
                    scratch_slots=group.scratch_blocks,
                )  # fmt: skip
                assert isinstance(found, Blocks), found
                blocks = dict(zip(found.chunks.tolist(), found.ids.tolist(), strict=True))
            else:
                needed = needed_chunks(
                    rule, local_tokens=job.local_tokens, total_tokens=job.total_tokens
                ).tolist()
                assert needed == [chunk for chunk, block in slots.items() if block], (job, slots)
                blocks = {chunk: slots[chunk] for chunk in needed}
            bad |= self._load_group(job, group, blocks, hashes)
        return bad

    def _load_group(
        self, job: hot.LoadJob, group: RankGroup, blocks: dict[int, int], hashes: list[bytes]
    ) -> set[Key]:
        keys = {}
        for chunk in blocks:
            end = min((chunk + 1) * group.block_tokens, job.total_tokens)
            last = len(hashes) * self._hash_tokens
            ends = range(end, min((chunk + 1) * group.block_tokens, last) + 1, self._hash_tokens)
            tried = [(job.version, group.group, hashes[self._number(one)]) for one in ends]
            keys[chunk] = next(key for key in tried if key in self.objects)
            assert group.save_rule != "hand-offs" or keys[chunk] == tried[0], "exactly there"
        bad = self.damaged & set(keys.values())
        for chunk, block in blocks.items():
            torn = self.load_fails or bad
            names = frozenset([b"torn"]) if torn else self.objects[keys[chunk]]
            self.contents.held[block] = (group.group, names)
            self.contents.wrong.discard(block)
        return bad

"""A job in the sidecar, and each rank's part of it.

Ownership, in one place:

* engine blocks belong to a part from its copies' submission until the last of them was collected;
* pool entries belong to the job's work (a load's lease, a save's reservation) until every local
  rank is terminal: its part ended, or it can never start any more (``absent``);
* a part ends once. Cancelling, deadlines and deaths only ask its copies to stop.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from kvferry_connector.wire.hot import Job, JobStatusName

from kvferry_sidecar.engines.base import CopyResult, Direction, Extents
from kvferry_sidecar.outcomes.ledger import PartKey
from kvferry_sidecar.outcomes.reasons import Reason
from kvferry_sidecar.outcomes.records import Record
from kvferry_sidecar.sessions.model import Peer, Session


class PartState(enum.Enum):
    """Where a part is on its way."""

    FENCE = "fence"  # waits for the engine's step
    QUEUED = "queued"  # waits for its turn at the copy engine
    COPYING = "copying"  # the copy engine owns its memory
    ENDED = "ended"


class PlannedCopy(msgspec.Struct, frozen=True):
    """One group's copy of one rank; ``group_index`` counts the groups of the job's work."""

    group_index: int
    direction: Direction
    extents: Extents


class End(msgspec.Struct, frozen=True):
    """How a part ended."""

    status: JobStatusName
    reason: Reason
    shorter_tokens: int = 0


class Work(Protocol):
    """What a kind of job does: loads.py and saves.py."""

    kind: str
    fence_offset: int
    objects: int  # that it stores

    def copies(self, peer: Peer, rank_index: int) -> list[PlannedCopy]:
        """Return this rank's copies; none means its part is done at once."""

    def conclude(self, part: Part) -> End:
        """All copies of the part stopped: say how it ended."""

    def settle(self, run: JobRun) -> None:
        """Every local rank is terminal: give up or publish the pool entries."""


@dataclass(slots=True, eq=False)
class Part:
    """One rank of one job."""

    run: JobRun
    peer: Peer
    key: PartKey  # its name everywhere
    rank_index: int
    accepted_s: float
    deadline_s: float
    copies: list[PlannedCopy]
    state: PartState = PartState.FENCE
    running: int = 0
    results: list[tuple[PlannedCopy, CopyResult]] = field(default_factory=list)
    stop: End | None = None  # how it ends if its copies did not finish by themselves
    end: End | None = None
    peer_gone: bool = False
    # When it moved on; 0 where it never got there.
    passed_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    moved_bytes: int = 0  # by its copies, also when they failed; set at its end
    # Seconds at its fence, in the queue and at the copy engine; set at its end.
    stages: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def ended(self, end: End, now_s: float) -> None:
        """Nothing of it runs any more."""
        self.end, self.ended_s = end, now_s
        passed_s = self.passed_s or now_s
        started_s = self.started_s or now_s
        self.stages = (passed_s - self.accepted_s, started_s - passed_s, now_s - started_s)
        for _, result in self.results:
            self.moved_bytes += result.moved_bytes


@dataclass(slots=True, eq=False)
class JobRun:
    """One job over all local ranks of its session."""

    session: Session
    job: Job
    ranks: tuple[int, ...]
    work: Work
    opened_s: float
    digest: bytes = b""  # over the frames: the other ranks must bring the same
    parts: dict[int, Part] = field(default_factory=dict)  # by rank
    absent: dict[int, Reason] = field(default_factory=dict)  # ranks that never start
    record: Record | None = None  # what operators are told of its request

    def missing(self) -> list[int]:
        """Ranks that may still submit."""
        return [r for r in self.ranks if r not in self.parts and r not in self.absent]

    def decided(self) -> bool:
        """Whether every local rank is terminal."""
        terminal = len(self.absent)
        for part in self.parts.values():
            terminal += part.end is not None
        return terminal == len(self.ranks)

    def all_done(self) -> bool:
        """Whether every local rank ended as done."""
        if self.absent:
            return False
        for part in self.parts.values():
            if part.end is None or part.end.status is not JobStatusName.DONE:
                return False
        return True

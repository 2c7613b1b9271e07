"""The account of every job: accepted = done + failed + cancelled + open, per session and in all.

Metrics are derived from here, so they cannot drift from what was reported to the engines.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from kvferry_connector.wire.hot import JobStatusName
from kvferry_native import observer_of

from kvferry_sidecar.outcomes.histogram import BYTES, SECONDS, Histogram, HistogramReading
from kvferry_sidecar.outcomes.reasons import Reason

KINDS = ("load", "save")
STAGES = ("fence", "queue", "copy")  # waiting for the engine's step, for its turn, being copied
End = tuple[str, JobStatusName, Reason]  # kind, status, reason
SessionName = tuple[str, str]  # (engine_id, instance_id): sessions.model.SessionKey


class PartKey(NamedTuple):
    """One rank's part of a job. A generation belongs to one half, so this is unique."""

    generation: int
    job: int


class Totals(msgspec.Struct, frozen=True):
    """A reading of one account. ``reasons`` counts the ends by "status/reason"."""

    accepted: int
    done: int
    failed: int
    cancelled: int
    open: int
    refused: int
    loaded_bytes: int
    saved_bytes: int
    seconds: float
    reasons: dict[str, int]


@dataclass(slots=True)
class _Account:
    """The only counts: totals and reasons are sums of these, worked out when somebody asks."""

    accepted: int = 0
    open: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    seconds: float = 0.0
    ends: Counter[End] = field(default_factory=Counter)
    refused: Counter[Reason] = field(default_factory=Counter)

    def add(self, other: _Account) -> None:
        self.accepted += other.accepted
        self.open += other.open
        self.loaded_bytes += other.loaded_bytes
        self.saved_bytes += other.saved_bytes
        self.seconds += other.seconds
        self.ends.update(other.ends)
        self.refused.update(other.refused)

    def totals(self) -> Totals:
        ended: Counter[JobStatusName] = Counter()
        reasons: Counter[str] = Counter()
        for (_, status, reason), count in self.ends.items():
            ended[status] += count
            reasons[f"{status}/{reason}" if reason else str(status)] += count
        refused = {f"refused/{reason}": count for reason, count in self.refused.items()}
        return Totals(
            accepted=self.accepted,
            done=ended[JobStatusName.DONE],
            failed=ended[JobStatusName.FAILED],
            cancelled=ended[JobStatusName.CANCELLED],
            open=self.open,
            refused=self.refused.total(),
            loaded_bytes=self.loaded_bytes,
            saved_bytes=self.saved_bytes,
            seconds=self.seconds,
            reasons=dict(reasons) | refused,
        )


class Ledger:
    """Counts jobs by part (one rank of one job). Owned by the control loop."""

    def __init__(self, sessions_max: int) -> None:
        self._sessions_max = sessions_max
        self._gone = _Account()  # of sessions that are forgotten
        self._sessions: OrderedDict[SessionName, _Account] = OrderedDict()
        self._open: dict[PartKey, tuple[_Account, str]] = {}
        self._faults: list[str] = []
        self._bytes = {kind: Histogram(BYTES) for kind in KINDS}
        self._stages = {kind: tuple(Histogram(SECONDS) for _ in STAGES) for kind in KINDS}
        self._observers = {
            kind: observer_of(self._bytes[kind], *self._stages[kind]) for kind in KINDS
        }
        self._changed = False  # since the last audit

    def accept(self, session: SessionName, part: PartKey, kind: str) -> None:
        """A part was taken; it must end exactly once. ``kind`` is "load" or "save"."""
        self._changed = True
        if part in self._open:
            self._fault(f"{part} was accepted twice")
            return
        account = self._account(session)
        self._open[part] = (account, kind)
        account.accepted += 1
        account.open += 1

    def end(
        self,
        part: PartKey,
        status: JobStatusName,
        reason: Reason,
        moved_bytes: int,
        seconds: float,
        *,
        stages: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> None:
        """The one end of an accepted part, after its copies stopped; ``stages``: see STAGES."""
        self._changed = True
        entry = self._open.pop(part, None)
        if entry is None:
            self._fault(f"{part} ended without being open")
            return
        account, kind = entry
        account.open -= 1
        account.ends[kind, status, reason] += 1
        account.seconds += seconds
        if kind == "load":
            account.loaded_bytes += moved_bytes
        else:
            account.saved_bytes += moved_bytes
        self._observe(kind, moved_bytes, stages)

    def refuse(self, session: SessionName, reason: Reason) -> None:
        """A submit was refused: never accepted, so it is counted apart."""
        self._account(session).refused[reason] += 1

    def open_parts(self) -> Collection[PartKey]:
        """Parts accepted and not ended."""
        return self._open.keys()

    def totals(self) -> Totals:
        """The reading over all sessions since the start."""
        return self._whole().totals()

    def sessions(self) -> dict[str, Totals]:
        """The readings by session, "engine/instance"."""
        return {f"{key[0]}/{key[1]}": a.totals() for key, a in self._sessions.items()}

    def ends(self) -> dict[str, int]:
        """Parts that ended, by "kind/status/reason"."""
        return {"/".join(key): count for key, count in self._whole().ends.items()}

    def stage_seconds(self) -> dict[str, HistogramReading]:
        """Seconds of parts, by "kind/stage"."""
        return {
            f"{kind}/{stage}": histogram.reading()
            for kind, histograms in self._stages.items()
            for stage, histogram in zip(STAGES, histograms, strict=True)
        }

    def part_bytes(self) -> dict[str, HistogramReading]:
        """Bytes of parts, by kind."""
        return {kind: histogram.reading() for kind, histogram in self._bytes.items()}

    def audit(self) -> list[str]:
        """Violations while nothing is open; looked for once after each change."""
        changed, self._changed = self._changed, False
        return self.integrity(()) if changed else []

    def integrity(self, running: Collection[PartKey]) -> list[str]:
        """Violations of the account; ``running`` are the parts that really are open."""
        found = list(self._faults)
        if set(running) != set(self._open):
            found.append(f"open in the ledger: {len(self._open)}, really open: {len(running)}")
        for name, account in [("gone", self._gone), *self._sessions.items()]:
            ended = account.ends.total()
            if account.accepted != ended + account.open:
                found.append(
                    f"{name}: accepted {account.accepted} is not "
                    f"{ended} ended + {account.open} open"
                )
            if account.open < 0:
                found.append(f"{name}: {account.open} open")
        by_count = sum(account.open for account in self._sessions.values())
        if by_count != len(self._open):
            found.append(f"{by_count} open by count, {len(self._open)} by name")
        return found

    def _observe(self, kind: str, moved_bytes: int, stages: tuple[float, float, float]) -> None:
        fence_s, queue_s, copy_s = stages
        self._observers[kind](moved_bytes, fence_s, queue_s, copy_s)

    def _whole(self) -> _Account:
        """Return the sum over all sessions since the start."""
        whole = _Account()
        for account in (self._gone, *self._sessions.values()):
            whole.add(account)
        return whole

    def _fault(self, text: str) -> None:
        if len(self._faults) < 100:  # one is a bug already; the list must not grow
            self._faults.append(text)

    def _account(self, session: SessionName) -> _Account:
        account = self._sessions.get(session)
        if account is None:
            self._make_room()
            account = self._sessions[session] = _Account()
        return account

    def _make_room(self) -> None:
        """Forget the oldest session that has nothing open; its sums stay in the whole."""
        if len(self._sessions) < self._sessions_max:
            return
        for key, account in self._sessions.items():
            if account.open == 0:
                self._gone.add(account)
                del self._sessions[key]
                return

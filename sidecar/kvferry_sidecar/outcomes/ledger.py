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

from kvferry_sidecar.outcomes.histogram import BYTES, SECONDS, Histogram, HistogramReading
from kvferry_sidecar.outcomes.reasons import Reason

KINDS = ("load", "save")
STAGES = ("fence", "queue", "copy")  # waiting for the engine's step, for its turn, being copied
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
    accepted: int = 0
    open: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    seconds: float = 0.0
    ended: Counter[JobStatusName] = field(default_factory=Counter)
    refused: Counter[Reason] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def totals(self) -> Totals:
        refused = {f"refused/{reason}": count for reason, count in self.refused.items()}
        return Totals(
            accepted=self.accepted,
            done=self.ended[JobStatusName.DONE],
            failed=self.ended[JobStatusName.FAILED],
            cancelled=self.ended[JobStatusName.CANCELLED],
            open=self.open,
            refused=self.refused.total(),
            loaded_bytes=self.loaded_bytes,
            saved_bytes=self.saved_bytes,
            seconds=self.seconds,
            reasons=dict(self.reasons) | refused,
        )


class Ledger:
    """Counts jobs by part (one rank of one job). Owned by the control loop."""

    def __init__(self, sessions_max: int) -> None:
        self._sessions_max = sessions_max
        self._all = _Account()
        self._sessions: OrderedDict[SessionName, _Account] = OrderedDict()
        self._open: dict[PartKey, tuple[SessionName, str]] = {}
        self._faults: list[str] = []
        self._ends: Counter[tuple[str, str, str]] = Counter()
        self._stages = {kind: [Histogram(SECONDS) for _ in STAGES] for kind in KINDS}
        self._bytes = {kind: Histogram(BYTES) for kind in KINDS}

    def accept(self, session: SessionName, part: PartKey, kind: str) -> None:
        """A part was taken; it must end exactly once. ``kind`` is "load" or "save"."""
        if part in self._open:
            self._fault(f"{part} was accepted twice")
            return
        self._open[part] = (session, kind)
        for account in (self._all, self._account(session)):
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
        entry = self._open.pop(part, None)
        if entry is None:
            self._fault(f"{part} ended without being open")
            return
        session, kind = entry
        self._ends[kind, status, reason] += 1
        self._bytes[kind].observe(moved_bytes)
        for histogram, spent_s in zip(self._stages[kind], stages, strict=True):
            histogram.observe(spent_s)
        for account in (self._all, self._account(session)):
            account.open -= 1
            account.ended[status] += 1
            account.reasons[f"{status}/{reason}" if reason else str(status)] += 1
            account.seconds += seconds
            if kind == "load":
                account.loaded_bytes += moved_bytes
            else:
                account.saved_bytes += moved_bytes

    def refuse(self, session: SessionName, reason: Reason) -> None:
        """A submit was refused: never accepted, so it is counted apart."""
        for account in (self._all, self._account(session)):
            account.refused[reason] += 1

    def open_parts(self) -> Collection[PartKey]:
        """Parts accepted and not ended."""
        return self._open.keys()

    def totals(self) -> Totals:
        """The reading over all sessions since the start."""
        return self._all.totals()

    def sessions(self) -> dict[str, Totals]:
        """The readings by session, "engine/instance"."""
        return {f"{key[0]}/{key[1]}": a.totals() for key, a in self._sessions.items()}

    def ends(self) -> dict[str, int]:
        """Parts that ended, by "kind/status/reason"."""
        return {"/".join(key): count for key, count in self._ends.items()}

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

    def integrity(self, running: Collection[PartKey]) -> list[str]:
        """Violations of the account; ``running`` are the parts that really are open."""
        found = list(self._faults)
        if set(running) != set(self._open):
            found.append(f"open in the ledger: {len(self._open)}, really open: {len(running)}")
        named = [("all sessions", self._all), *((str(k), a) for k, a in self._sessions.items())]
        for name, account in named:
            ended = account.ended.total()
            if account.accepted != ended + account.open:
                found.append(
                    f"{name}: accepted {account.accepted} is not "
                    f"{ended} ended + {account.open} open"
                )
            if account.open < 0:
                found.append(f"{name}: {account.open} open")
        if self._all.open != len(self._open):
            found.append(f"{self._all.open} open by count, {len(self._open)} by name")
        return found

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
        """Forget the oldest session that has nothing open; its sums stay in the total."""
        if len(self._sessions) < self._sessions_max:
            return
        for key, account in self._sessions.items():
            if account.open == 0:
                del self._sessions[key]
                return

"""Parts on their way through the copy engine: fence, queue, copy, collect.

Loads go before saves, and only so many saves are in flight at a time: a flood of saves delays a
load by at most those. Nothing here decides how a part ends; it only reports that it stopped.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from kvferry_connector.wire.hot import JobStatusName

from kvferry_sidecar.engines.base import CopyEngine
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.outcomes.reasons import Reason
from kvferry_sidecar.stages.logs import Log
from kvferry_sidecar.stages.parts import End, Part, PartState, PlannedCopy

_impatient_s = 0.02  # after this a fence is polled less often: the engine is between steps
_saves_patience = 4.0  # times as long between two looks: nobody waits for a save


class CopyDesk:
    """Owns which part waits for what; ``on_stopped`` is called once per part."""

    def __init__(
        self,
        copies: CopyEngine,
        limits: Limits,
        log: Log,
        on_stopped: Callable[[Part, float], None],
        *,
        serialized: bool = False,
    ) -> None:
        self._copies = copies
        self.limits = limits
        self._log = log
        self._on_stopped = on_stopped
        self._serialized = serialized
        self._numbers = itertools.count(1)
        self._fenced: dict[Part, None] = {}
        self._queued: dict[str, deque[Part]] = {"load": deque(), "save": deque()}
        self._copying: dict[Part, None] = {}
        self._tickets: dict[int, tuple[Part, PlannedCopy]] = {}
        self._saves_in_flight = 0

    def admit(self, part: Part, now_s: float) -> None:
        """Take a part: it starts when its fence and its turn come, or is done without copies."""
        if not part.copies:
            self._stopped(part, now_s)
            return
        part.deadline_s = now_s + self.limits.fence_ms_max / 1e3
        self._fenced[part] = None
        if _fence_passed(part):
            self._enqueue(part, now_s)
            self._pump(now_s)

    def poll_fences(self, now_s: float) -> None:
        """Move on what the engine has reached."""
        passed = [part for part in self._fenced if _fence_passed(part)]
        for part in passed:
            self._enqueue(part, now_s)
        if passed:
            self._pump(now_s)

    def collect(self, now_s: float) -> None:
        """Fetch finished copies; a part stops with the last of its own."""
        for result in self._copies.collect():
            entry = self._tickets.pop(result.ticket, None)
            if entry is None:
                self._log.error("result of an unknown copy", ticket=result.ticket)
                continue
            part, planned = entry
            part.results.append((planned, result))
            part.running -= 1
            if part.running == 0:
                self._stopped(part, now_s)
        self._pump(now_s)

    def stop(self, part: Part, end: End, now_s: float) -> None:
        """Ask a part to end early; what runs is cancelled and still collected first."""
        if part.state is PartState.ENDED:
            return
        if part.stop is None:
            part.stop = end
        if part.state is PartState.COPYING:
            self._cancel_running(part)
            return
        self._fenced.pop(part, None)
        if part.state is PartState.QUEUED:
            self._queued[part.run.work.kind].remove(part)
        self._stopped(part, now_s)

    def sweep(self, now_s: float) -> None:
        """Fail fences and turns that did not come; ask copies that take too long to stop."""
        late = [part for part in self._fenced if part.deadline_s <= now_s]
        for part in late:
            self.stop(part, End(JobStatusName.FAILED, Reason.FENCE), now_s)
        for queue in self._queued.values():
            while queue and queue[0].deadline_s <= now_s:
                self.stop(queue[0], End(JobStatusName.FAILED, Reason.QUEUE), now_s)
        for part in self._copying:
            if part.deadline_s <= now_s and part.stop is None:
                self.stop(part, End(JobStatusName.FAILED, Reason.COPY_DEADLINE), now_s)

    def fence_wait_s(self, now_s: float) -> float | None:
        """Seconds until fences should be read again; None when no part waits for one."""
        if not self._fenced:
            return None
        poll_s = self.limits.fence_poll_us / 1e6
        if not any(part.run.work.kind == "load" for part in self._fenced):
            poll_s *= _saves_patience
        newest = next(reversed(self._fenced))
        patient = now_s - newest.accepted_s < _impatient_s
        return poll_s if patient else max(poll_s, 1e-3)

    def queues(self) -> dict[str, int]:
        """Parts that wait for their fence, for their turn, and that are copied."""
        return {
            "fence": len(self._fenced),
            "load": len(self._queued["load"]),
            "save": len(self._queued["save"]),
            "copy": len(self._copying),
        }

    def check(self) -> list[str]:
        """Violations; empty when sound."""
        found = []
        if len({part for part, _ in self._tickets.values()}) != len(self._copying):
            found.append("parts that copy and parts with copies differ")
        saves = sum(part.run.work.kind == "save" for part in self._copying)
        if saves != self._saves_in_flight:
            found.append(f"{self._saves_in_flight} saves in flight by count, really {saves}")
        return found

    def _enqueue(self, part: Part, now_s: float) -> None:
        del self._fenced[part]
        part.passed_s = now_s
        part.deadline_s = now_s + self.limits.copy_ms_max / 1e3
        part.state = PartState.QUEUED
        self._queued[part.run.work.kind].append(part)

    def _pump(self, now_s: float) -> None:
        loads, saves = self._queued["load"], self._queued["save"]
        for part in [loads.popleft() for _ in range(len(loads))]:
            if self._serialized and any(_same_rank(part, other) for other in self._copying):
                loads.append(part)
            else:
                self._start(part, now_s)
        while saves and self._saves_in_flight < self.limits.save_copies_max:
            self._start(saves.popleft(), now_s)

    def _start(self, part: Part, now_s: float) -> None:
        """Hand all copies of a part over; from here its memory belongs to the copy engine."""
        part.state = PartState.COPYING
        part.started_s = now_s
        part.deadline_s = now_s + self.limits.copy_ms_max / 1e3
        self._copying[part] = None
        if part.run.work.kind == "save":
            self._saves_in_flight += 1
        for planned in part.copies:
            ticket = next(self._numbers)
            try:
                self._copies.submit(ticket, planned.direction, planned.extents)
            except Exception as error:  # noqa: BLE001 - those behind it wait for their turn
                self._log.error("copy refused", job=part.run.job.job, exc_info=error)
                part.stop = End(JobStatusName.FAILED, Reason.COPY_FAILED)
                self._cancel_running(part)
                break
            self._tickets[ticket] = (part, planned)
            part.running += 1
        if part.running == 0:
            self._stopped(part, now_s)

    def _cancel_running(self, part: Part) -> None:
        for ticket, (owner, _) in self._tickets.items():
            if owner is part:
                self._copies.cancel(ticket)

    def _stopped(self, part: Part, now_s: float) -> None:
        if part.state is PartState.COPYING:
            del self._copying[part]
            if part.run.work.kind == "save":
                self._saves_in_flight -= 1
        part.state = PartState.ENDED
        self._on_stopped(part, now_s)


def _same_rank(load: Part, other: Part) -> bool:
    return other.peer is load.peer and other.run.work.kind == "load"


def _fence_passed(part: Part) -> bool:
    fence = part.peer.fence
    assert fence is not None, "a part is only admitted with a fence page"
    return fence.load_u64(part.run.work.fence_offset) >= part.run.job.step

"""Calls into slower tiers: who waits for which, and whether a tier may be called at all.

A tier is ``on``; ``paused`` after a call failed or is late, until a trial call succeeds; or
``off``. A late call is abandoned, not ended: it keeps its thread and its slots until it returns,
and only then is its result handed on. Past ``abandoned_calls_max`` of them the tier is off until
they have returned. A failure that only an operator can mend switches it off for good.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.limits import Limits
from kvferry_sidecar.slow_tiers import Policy
from kvferry_sidecar.stages.logs import Log
from kvferry_sidecar.tiers.host import Entries, HostTier
from kvferry_sidecar.tiers.runner import Call, CallResult, Crcs, Find, SlowTier

# Keys that nobody stores, several of them: a store of many servers may lack one for a while.
_TRIAL = Find((tuple(bytes([number]) * 16 for number in range(8)),), stop=False)


class TierState(enum.StrEnum):
    """Whether a tier may be called."""

    ON = "on"
    PAUSED = "paused"
    OFF = "off"


class TierSnapshot(msgspec.Struct, frozen=True):
    """One slower tier, for the status document."""

    name: str
    source: str
    policy: str
    state: str
    reason: str
    calls_open: int
    calls_late: int  # abandoned: over store_ms_max and not back yet
    counts: dict[str, int]
    facts: dict[str, str | int]


@dataclass(slots=True, eq=False)
class Tier:
    """One slower tier as the control loop sees it. ``runner`` None: it could not be opened."""

    name: str
    source: str
    runner: SlowTier | None
    policy: Policy
    state: TierState = TierState.ON
    reason: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    final: bool = False
    trial_at_s: float = math.inf
    trying: bool = False
    late: set[int] = field(default_factory=set)  # tickets

    @property
    def on(self) -> bool:
        """Whether it may be called."""
        return self.state is TierState.ON


@dataclass(slots=True, eq=False)
class _Open:
    tier: Tier
    call: Call
    sent_s: float
    done: Callable[[CallResult, float], None]


class StoreDesk:
    """Open calls of all slower tiers. ``done`` of a call is called once, when it has returned."""

    def __init__(self, tiers: Sequence[Tier], limits: Limits, log: Log) -> None:
        self.tiers = tuple(tiers)
        self._late_s = limits.store_ms_max / 1e3
        self._retry_s = limits.store_retry_ms / 1e3
        self._abandoned_max = limits.abandoned_calls_max
        self._log = log
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}  # oldest first
        for tier in self.tiers:
            if tier.runner is None:
                tier.state, tier.final = TierState.OFF, True

    def send(
        self, tier: Tier, call: Call, now_s: float, done: Callable[[CallResult, float], None]
    ) -> None:
        """Start a call of a tier that is on."""
        assert tier.runner is not None, "a tier that is on has a runner"
        ticket = next(self._numbers)
        self._open[ticket] = _Open(tier, call, now_s, done)
        tier.counts[f"{type(call).__name__.lower()}_calls"] += 1
        tier.runner.submit(ticket, call)

    def collect(self, now_s: float) -> None:
        """Hand on what has returned."""
        for tier in self.tiers:
            for result in tier.runner.collect() if tier.runner is not None else ():
                opened = self._open.pop(result.ticket)
                self._note(tier, opened, result, now_s)
                try:
                    opened.done(result, now_s)
                except Exception as error:  # noqa: BLE001 - the results behind it own slots
                    self._log.error("result not taken", tier=tier.name, exc_info=error)

    def tick(self, now_s: float) -> float:
        """Look for late calls and due trials; returns seconds until wanted again."""
        for ticket, opened in self._open.items():
            if opened.sent_s + self._late_s > now_s:
                break
            if ticket not in opened.tier.late:
                self._abandon(opened.tier, ticket, opened.call)
        for tier in self.tiers:
            if tier.state is TierState.PAUSED and not tier.trying and tier.trial_at_s <= now_s:
                tier.trying = True
                self.send(tier, _TRIAL, now_s, lambda _result, _now_s: None)
        paused = [t for t in self.tiers if t.state is TierState.PAUSED and not t.trying]
        waits = [tier.trial_at_s - now_s for tier in paused]
        waits += [o.sent_s + self._late_s - now_s for o in self._first_in_time()]
        return max(0.0, min(waits, default=math.inf))

    def try_again(self, now_s: float) -> None:
        """Have paused tiers tried at the next tick."""
        for tier in self.tiers:
            if tier.state is TierState.PAUSED:
                tier.trial_at_s = now_s

    def calls_in_time(self) -> int:
        """Calls that are open and not late: worth waiting for."""
        return len(self._open) - sum(len(tier.late) for tier in self.tiers)

    def check(self) -> list[str]:
        """Violations; empty when sound."""
        late = {ticket for tier in self.tiers for ticket in tier.late}
        return [] if late <= self._open.keys() else ["a late call is not open"]

    def snapshots(self) -> list[TierSnapshot]:
        """Return a reading of every tier."""
        opened = Counter(one.tier.name for one in self._open.values())
        return [
            TierSnapshot(
                name=tier.name,
                source=tier.source,
                policy=tier.policy,
                state=str(tier.state),
                reason=tier.reason,
                calls_open=opened[tier.name],
                calls_late=len(tier.late),
                counts=dict(tier.counts),
                facts=tier.runner.facts() if tier.runner is not None else {},
            )
            for tier in self.tiers
        ]

    # --- health -----------------------------------------------------------------------------

    def _first_in_time(self) -> list[_Open]:
        for ticket, opened in self._open.items():
            if ticket not in opened.tier.late:
                return [opened]
        return []

    def _note(self, tier: Tier, opened: _Open, result: CallResult, now_s: float) -> None:
        trial = opened.call is _TRIAL
        was_late = result.ticket in tier.late
        tier.late.discard(result.ticket)
        tier.trying = tier.trying and not trial
        tier.counts["damaged"] += result.damaged
        if not result.started:
            return
        if result.final:
            self._turn(tier, TierState.OFF, result.error)
            tier.final = True
        elif tier.final:
            return
        elif result.error:
            tier.counts["errors"] += 1
            self._pause(tier, result.error, now_s)
        elif tier.state is TierState.OFF and not tier.late:
            self._pause(tier, tier.reason, now_s)  # all came back: a trial decides
        elif trial and not was_late and tier.state is TierState.PAUSED:
            self._turn(tier, TierState.ON, "")

    def _abandon(self, tier: Tier, ticket: int, call: Call) -> None:
        tier.late.add(ticket)
        tier.counts["abandoned"] += 1
        if tier.final:
            return
        what = f"a {type(call).__name__.lower()} did not return within {self._late_s * 1e3:.0f} ms"
        if len(tier.late) >= self._abandoned_max:
            self._turn(tier, TierState.OFF, f"{what}, {len(tier.late)} of them by now")
        else:
            self._pause(tier, what, self._open[ticket].sent_s + self._late_s)

    def _pause(self, tier: Tier, reason: str, now_s: float) -> None:
        tier.trial_at_s = now_s + self._retry_s
        if tier.state is not TierState.OFF or not tier.late:
            self._turn(tier, TierState.PAUSED, reason)

    def _turn(self, tier: Tier, state: TierState, reason: str) -> None:
        if state is not tier.state:
            tell = self._log.info if state is TierState.ON else self._log.warning
            tell(f"tier {tier.name} is {state}", reason=reason or tier.reason)
        tier.state, tier.reason = state, reason
        if state is not TierState.ON and tier.runner is not None:
            tier.runner.take_back()


def publish(pool: HostTier, entries: Entries, crcs: Sequence[Crcs | None]) -> NDArray[np.bool_]:
    """Commit the reserved entries (n,) whose bytes verified, give the other slots back.

    ``crcs``: of each entry's shards, None where nothing came. Returns which are committed.
    """
    good = np.array([one is not None for one in crcs], np.bool_)
    if good.any():
        table = np.array([one for one in crcs if one is not None], np.uint32)
        for shard in range(table.shape[1]):
            pool.set_crcs(entries[good], shard, np.ascontiguousarray(table[:, shard]))
        pool.commit(entries[good])
    if not good.all():
        pool.abort(entries[~good])
    return good

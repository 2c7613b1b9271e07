"""Outcomes that were not acknowledged yet: kept, sent again, bounded per half.

Nothing depends on delivery: a ROUTER drops silently at its high-water mark, so an outcome stays
here until its OutcomeAck, or until its half is proven dead.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvferry_connector.wire.hot import FromSidecar, Outcome

from kvferry_sidecar.outcomes.ledger import PartKey
from kvferry_sidecar.sessions.model import Peer


@dataclass(slots=True)
class _Kept:
    peer: Peer
    outcome: Outcome
    due_s: float


class Outbox:
    """Kept outcomes in the order they are due again (one interval for all, so a queue)."""

    def __init__(
        self, send: Callable[[Peer, FromSidecar], None], resend_ms: int, per_turn_max: int
    ) -> None:
        self._send = send
        self._resend_s = resend_ms / 1e3
        self._per_turn_max = per_turn_max
        self._kept: OrderedDict[PartKey, _Kept] = OrderedDict()
        self._per_half: Counter[int] = Counter()
        self.resent = 0

    def post(self, peer: Peer, outcome: Outcome, now_s: float) -> None:
        """Send an outcome and keep it until it is acknowledged."""
        key = PartKey(peer.generation, outcome.job)
        if self._kept.pop(key, None) is None:
            self._per_half[peer.generation] += 1
        self._kept[key] = _Kept(peer, outcome, now_s + self._resend_s)
        self._send(peer, outcome)

    def repeat(self, key: PartKey, now_s: float) -> bool:
        """Send one kept outcome again at once; False when none is kept under this key."""
        kept = self._kept.get(key)
        if kept is None:
            return False
        self._again(key, kept, now_s)
        return True

    def acknowledge(self, generation: int, jobs: list[int]) -> None:
        """These arrived: forget them. Unknown ones were acknowledged before."""
        for job in jobs:
            if self._kept.pop(PartKey(generation, job), None) is not None:
                self._decrement(generation)

    def drop(self, generation: int) -> None:
        """The half is gone for good: nobody is left to tell."""
        for key in [key for key in self._kept if key.generation == generation]:
            del self._kept[key]
        self._per_half.pop(generation, None)

    def resend(self, now_s: float) -> None:
        """Send again what is due, at most ``per_turn_max`` of them."""
        for _ in range(self._per_turn_max):
            if not self._kept:
                return
            key = next(iter(self._kept))
            kept = self._kept[key]
            if kept.due_s > now_s:
                return
            self._again(key, kept, now_s)

    def due_s(self) -> float:
        """Return when the next one must be sent again; infinite without any."""
        return next((kept.due_s for kept in self._kept.values()), math.inf)

    def count(self, generation: int) -> int:
        """Kept outcomes of one half."""
        return self._per_half[generation]

    def __len__(self) -> int:
        return len(self._kept)

    def _again(self, key: PartKey, kept: _Kept, now_s: float) -> None:
        kept.due_s = now_s + self._resend_s
        self._kept.move_to_end(key)
        self.resent += 1
        self._send(kept.peer, kept.outcome)

    def _decrement(self, generation: int) -> None:
        self._per_half[generation] -= 1
        if self._per_half[generation] == 0:
            del self._per_half[generation]

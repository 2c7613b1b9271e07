"""Load or recompute: hits that would take longer to load than to compute are not offered.

Both costs are measured, per engine: loading by what its loads took, from the fence to the last
rank's end, over the tokens they brought; computing by what the scheduler half says in its
heartbeats. The costs are seconds per token, so a load's fixed part counts with its usual length.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvferry_sidecar.sessions.model import SessionKey

loads_min = 8  # before a verdict
decay = 0.8  # of older loads, with each new one
ratio_min = 1.5  # loading must cost this many times as much
loss_s_min = 0.010  # and this much more, for the hit in question
trial_every = 16  # of the hits that would lose one is offered, to measure anew


class BreakerReading(msgspec.Struct, frozen=True):
    """One engine: microseconds per token (0: not known), hits withheld and tried all the same."""

    load_us: float
    compute_us: float
    loads: int
    withheld: int
    trials: int
    open: bool
    saved_s: float = 0.0  # what its loads were faster than computing, in all; may be negative


@dataclass(slots=True)
class _Costs:
    tokens: float = 0.0
    seconds: float = 0.0
    loads: int = 0
    compute_s: float = 0.0
    losing: int = 0
    withheld: int = 0
    saved_s: float = 0.0

    @property
    def load_s(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0

    def loses(self, tokens: int) -> bool:
        """Whether loading so many tokens takes clearly longer than computing them."""
        if self.loads < loads_min:
            return False
        loss_s = (self.load_s - self.compute_s) * tokens
        return self.load_s > ratio_min * self.compute_s and loss_s > loss_s_min


class Breaker:
    """Owned by the control loop."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._sessions: dict[SessionKey, _Costs] = {}

    def computes(self, session: SessionKey, token_ns: int) -> None:
        """The engine said what a token of prefill costs it."""
        if token_ns > 0:
            self._sessions.setdefault(session, _Costs()).compute_s = token_ns / 1e9

    def loaded(self, session: SessionKey, tokens: int, seconds: float) -> None:
        """A load is done on every rank; of no use before the engine said what computing costs."""
        costs = self._sessions.get(session)
        if costs is None:
            return
        costs.tokens = costs.tokens * decay + tokens
        costs.seconds = costs.seconds * decay + seconds
        costs.loads += 1
        costs.saved_s += tokens * costs.compute_s - seconds

    def withholds(self, session: SessionKey, tokens: int) -> bool:
        """Whether a hit of so many tokens is not to be offered."""
        costs = self._sessions.get(session)
        if not self.enabled or costs is None or not costs.loses(tokens):
            return False
        costs.losing += 1
        if costs.losing % trial_every == 0:
            return False
        costs.withheld += 1
        return True

    def forget(self, session: SessionKey) -> None:
        """The engine is gone."""
        self._sessions.pop(session, None)

    def reading(self) -> dict[str, BreakerReading]:
        """Return the costs by engine, "engine/instance"."""
        return {
            "/".join(key): BreakerReading(
                load_us=round(costs.load_s * 1e6, 3),
                compute_us=round(costs.compute_s * 1e6, 3),
                loads=costs.loads,
                withheld=costs.withheld,
                trials=costs.losing - costs.withheld,
                open=self.enabled and costs.loses(1 << 20),
                saved_s=round(costs.saved_s, 6),
            )
            for key, costs in self._sessions.items()
        }

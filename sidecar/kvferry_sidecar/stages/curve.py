"""How many tokens would miss in a pool of another size: sampled while serving (SHARDS).

The counting is native (``kvferry/miss_curve.h``): keys are chosen and followed where a lookup costs
little more than a comparison per key. Left out: the eighth of the pool that a scan leaves alone,
slots' rounding, and slower tiers (a hit is one of the host pool).
"""

from __future__ import annotations

import msgspec
from kvferry_native import MissCurve

SIZES = tuple(MissCurve.sizes)  # of the pool
window_s = MissCurve.window_s


class CurveReading(msgspec.Struct, frozen=True):
    """Tokens wanted, and of these missed in a pool of ``sizes`` times the bytes of this one.

    ``recent_*`` are of the last hour or two, the others since the start.
    """

    sizes: list[float]
    pool_bytes: int
    wanted_tokens: int
    missed_tokens: list[float]
    recent_wanted_tokens: int
    recent_missed_tokens: list[float]
    tracked: int
    sampled: float  # share of the keys that are followed


class Curve:
    """Keys of the objects that whole-prefix hits are made of. Owned by the control loop."""

    def __init__(self, pool_bytes: int, tracked_max: int = 8192) -> None:
        self._pool_bytes = pool_bytes
        self._counted = MissCurve(pool_bytes, tracked_max)
        self.looked_up = self._counted.looked_up  # see the stub: called for every lookup
        self.stored = self._counted.stored

    def reading(self) -> CurveReading:
        """Return the counts so far."""
        counted = self._counted
        wanted, missed = counted.whole
        recent_wanted, recent_missed = counted.recent
        return CurveReading(
            sizes=list(SIZES),
            pool_bytes=self._pool_bytes,
            wanted_tokens=wanted,
            missed_tokens=missed,
            recent_wanted_tokens=recent_wanted,
            recent_missed_tokens=recent_missed,
            tracked=counted.tracked,
            sampled=counted.sampled,
        )

"""Histograms that cost the control loop one bisection per value, and no lock.

Buckets count values up to and including their bound, as Prometheus has them; they are not
cumulative here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec
import numpy as np

SECONDS = (
    1e-5, 2.5e-5, 1e-4, 2.5e-4, 1e-3, 2.5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0,
)  # fmt: skip
BYTES = tuple(float(1 << shift) for shift in range(14, 36, 2))  # 16 KiB to 16 GiB


class HistogramReading(msgspec.Struct, frozen=True):
    """One reading. ``counts`` has one place more than ``bounds``: values above the last."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float

    @property
    def count(self) -> int:
        """Values in all."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Return the upper bound of the bucket where ``share`` of the values lie; 0 for none.

        Values above the last bound are told as that bound.
        """
        wanted, seen = share * self.count, 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if count and seen >= wanted:
                return bound
        return self.bounds[-1] if self.count else 0.0


class Histogram:
    """Counts of values by bucket. Owned by the control loop."""

    __slots__ = ("_bounds", "_counts", "_edges", "_first", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._edges = np.array(bounds)
        self._first = bounds[0]  # most values of a loop's turn: no bisection
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        counts = self._counts
        counts[0 if value <= self._first else bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many values at once, at a fraction of the cost of each."""
        places = np.searchsorted(self._edges, values)
        found = np.bincount(places, minlength=len(self._counts)).tolist()
        self._counts = [a + b for a, b in zip(self._counts, found, strict=True)]
        self._sum += sum(values)

    def reading(self) -> HistogramReading:
        """Return what was counted so far."""
        return HistogramReading(self._bounds, list(self._counts), self._sum)

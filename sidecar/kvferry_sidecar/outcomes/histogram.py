"""Histograms whose values are counted natively: the control loop observes several per message."""

from __future__ import annotations

import kvferry_native as native
import msgspec

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


class Histogram(native.Histogram):
    """Counts of values by bucket: up to and including its bound, as Prometheus has them.

    They are not cumulative here. Owned by the control loop.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        super().__init__(bounds)
        self._bounds = bounds

    def reading(self) -> HistogramReading:
        """Return what was counted so far."""
        return HistogramReading(self._bounds, self.counts, self.sum)

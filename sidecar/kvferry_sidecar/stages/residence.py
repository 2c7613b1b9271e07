"""How long objects stay in the pool before they are evicted: of a sample, chosen by their keys.

Every ``one_in``-th key by its first byte is marked when it enters and told when it goes. Keys are
mixed, so the sample is fair. What an earlier process stored has no mark and is not told.
"""

from __future__ import annotations

import numpy as np

from kvferry_sidecar.outcomes.histogram import Histogram, HistogramReading
from kvferry_sidecar.sessions.admissions import Keys

one_in = 16
marks_max = 65_536  # then the oldest are forgotten
AGES_S = (
    1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86_400.0, 3 * 86_400.0,
    7 * 86_400.0,
)  # fmt: skip


class Residence:
    """Owned by the control loop."""

    def __init__(self) -> None:
        self._entered_s: dict[bytes, float] = {}  # oldest first
        self._seconds = Histogram(AGES_S)

    def entered(self, keys: Keys, now_s: float) -> None:
        """Objects were committed to the pool; keys (n, 16)."""
        for key in _sample(keys):
            self._entered_s.pop(key, None)
            self._entered_s[key] = now_s
        while len(self._entered_s) > marks_max:
            del self._entered_s[next(iter(self._entered_s))]

    def left(self, evicted: bytes, now_s: float) -> None:
        """Objects were evicted; 16 bytes each."""
        if not evicted or not self._entered_s:
            return
        for key in _sample(np.frombuffer(evicted, np.uint8).reshape(-1, 16)):
            entered_s = self._entered_s.pop(key, None)
            if entered_s is not None:
                self._seconds.observe(now_s - entered_s)

    def reading(self) -> HistogramReading:
        """Return the seconds of those that went."""
        return self._seconds.reading()


def _sample(keys: Keys) -> list[bytes]:
    chosen = keys[keys[:, 0] < 256 // one_in]
    return [key.tobytes() for key in chosen]

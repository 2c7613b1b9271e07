"""How long objects stay in the pool before they are evicted: of a sample, chosen by their keys.

Every ``one_in``-th key by its first byte is marked when it enters and told when it goes. Keys are
mixed, so the sample is fair. What an earlier process stored has no mark and is not told.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from kvferry_sidecar.outcomes.histogram import Histogram, HistogramReading
from kvferry_sidecar.sessions.admissions import Keys

one_in = 64
marks_max = 65_536  # then the oldest are forgotten
untold_max = 64  # groups of keys that wait to be looked at
untold_keys_max = 4096
_KEY_BYTES = 16
AGES_S = (
    1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86_400.0, 3 * 86_400.0,
    7 * 86_400.0,
)  # fmt: skip


class Residence:
    """Owned by the control loop. What comes and goes is looked at many objects at a time."""

    def __init__(self) -> None:
        self._entered_s: dict[bytes, float] = {}  # oldest first
        self._untold: list[tuple[bytes, float, bool]] = []  # in order; the last: it entered
        self._untold_keys = 0
        self._seconds = Histogram(AGES_S)

    def entered(self, keys: Keys, now_s: float) -> None:
        """Objects were committed to the pool; keys (n, 16)."""
        self._note(keys.tobytes(), now_s, entered=True)

    def left(self, evicted: bytes, now_s: float) -> None:
        """Objects were evicted; 16 bytes each."""
        if evicted:
            self._note(evicted, now_s, entered=False)

    def reading(self) -> HistogramReading:
        """Return the seconds of those that went."""
        self._look()
        return self._seconds.reading()

    def _note(self, keys: bytes, now_s: float, *, entered: bool) -> None:
        self._untold.append((keys, now_s, entered))
        self._untold_keys += len(keys) // _KEY_BYTES
        if len(self._untold) >= untold_max or self._untold_keys >= untold_keys_max:
            self._look()

    def _look(self) -> None:
        """Choose the sample: one comparison for many small saves."""
        untold, self._untold, self._untold_keys = self._untold, [], 0
        if not untold:
            return
        keys = b"".join([keys for keys, _, _ in untold])
        chosen = (np.frombuffer(keys, np.uint8)[::_KEY_BYTES] < 256 // one_in).nonzero()[0]
        chosen *= _KEY_BYTES
        ends = list(accumulate([len(keys) for keys, _, _ in untold]))
        groups = np.searchsorted(ends, chosen, side="right").tolist()
        for at, group in zip(chosen.tolist(), groups, strict=True):
            _, now_s, entered = untold[group]
            name = keys[at : at + _KEY_BYTES]
            before_s = self._entered_s.pop(name, None)
            if entered:
                self._entered_s[name] = now_s
            elif before_s is not None:
                self._seconds.observe(now_s - before_s)
        while len(self._entered_s) > marks_max:
            del self._entered_s[next(iter(self._entered_s))]

"""How many tokens would miss in a pool of another size: sampled while serving (SHARDS).

The pool evicts by last use, so one list of keys in order of use answers for every size: a key
misses in all pools smaller than the bytes used since its own last use. Only keys whose bits lie
under a threshold are followed, and the sizes shrink by the same share. The threshold is chosen
for the size of the first objects, and halved when more than ``tracked_max`` keys are followed. A
lookup costs one vectorised comparison over its keys, and about a microsecond per followed key.

What is wanted is counted exactly and only misses are estimated: a hot key that is not followed
then biases nothing. Left out: the eighth of the pool that a scan leaves alone, slots' rounding,
and slower tiers (a hit is one of the host pool).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the pool
_SAME = SIZES.index(1.0)
_ALL = 1 << 64
window_s = 3600.0
new_max = 64  # lookups and saves that wait to be counted
new_keys_max = 4096

_KEY_BYTES = 16

Keys = NDArray[np.uint8]  # (n, 16)
_Lookup = tuple[int, tuple[int, int], int]  # tokens of a unit, (local, wanted), of the hit


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


class _Tally:
    """Counts of one span of time."""

    def __init__(self) -> None:
        self.wanted = 0
        self.missed = [0.0] * len(SIZES)

    def add(self, other: _Tally) -> None:
        self.wanted += other.wanted
        self.missed = [a + b for a, b in zip(self.missed, other.missed, strict=True)]


class Curve:
    """Keys of the objects that whole-prefix hits are made of. Owned by the control loop."""

    def __init__(self, pool_bytes: int, tracked_max: int = 8192) -> None:
        self._pool_bytes = pool_bytes
        self._tracked_max = tracked_max
        self._kept_max = tracked_max * 7 // 8  # room for more until the next look at them all
        self._threshold = _ALL
        self._chosen = False
        # Uses are numbered. Of each: the bytes of its key, 0 once the key was used again.
        self._uses: list[int] = []
        self._first = 0  # number of _uses[0]
        self._last_use: dict[int, int] = {}  # in the order of use
        # Per size: what was used at or after its edge fits, and how many bytes that is.
        self._edges = [0] * len(SIZES)
        self._inside = [0] * len(SIZES)
        self._carry_bytes = 0
        # Not counted yet: keys in the order of rows, bytes of each, and of what kind of lookup.
        self._new: list[tuple[bytes, int, _Lookup | None]] = []
        self._new_keys = 0
        self._past, self._before, self._now = _Tally(), _Tally(), _Tally()
        self._window_end_s = 0.0

    def looked_up(
        self,
        keys: Keys,
        unit: tuple[int, int],
        span: tuple[int, int],
        hit_tokens: int,
        now_s: float,
    ) -> None:
        """Count one lookup of the tokens ``span`` (local, wanted], answered with ``hit_tokens``.

        ``keys`` (n, 16) are of all units of the request; ``unit``: tokens of one, and the bytes
        to reckon with for one that was stored before this start.
        """
        if now_s >= self._window_end_s:
            self._take_in()
            self._turn_window(now_s)
        self._now.wanted += max(0, span[1] - span[0])
        self._note(keys, unit[1], (unit[0], span, hit_tokens))

    def stored(self, keys: Keys, total_bytes: int) -> None:
        """Objects were stored: ``keys`` of one group, ``total_bytes`` of all groups.

        What other groups take without a key of this one is borne by the next that come.
        """
        self._carry_bytes += total_bytes
        if len(keys):
            each, self._carry_bytes = divmod(self._carry_bytes, len(keys))
            self._note(keys, each, None)

    def reading(self) -> CurveReading:
        """Return the counts so far."""
        self._take_in()
        recent, whole = _Tally(), _Tally()
        recent.add(self._before)
        recent.add(self._now)
        whole.add(self._past)
        whole.add(recent)
        return CurveReading(
            sizes=list(SIZES),
            pool_bytes=self._pool_bytes,
            wanted_tokens=whole.wanted,
            missed_tokens=whole.missed,
            recent_wanted_tokens=recent.wanted,
            recent_missed_tokens=recent.missed,
            tracked=len(self._last_use),
            sampled=self._threshold / _ALL,
        )

    def _note(self, keys: Keys, each_bytes: int, lookup: _Lookup | None) -> None:
        # Bytes: to join many small arrays takes NumPy longer than to choose among their keys.
        self._new.append((keys.tobytes(), each_bytes, lookup))
        self._new_keys += len(keys)
        if len(self._new) >= new_max or self._new_keys >= new_keys_max:
            self._take_in()

    def _take_in(self) -> None:
        """Count what happened since the last time, in its order: the keys are chosen at once."""
        new, self._new, self._new_keys = self._new, [], 0
        if not new:
            return
        if not self._chosen:
            for _, each_bytes, _ in new:
                self._choose(each_bytes)
        threshold = self._threshold
        bits = np.frombuffer(b"".join([keys for keys, _, _ in new]), "<u8")[1::2]
        rows = np.arange(len(bits))
        if threshold < _ALL:
            rows = (bits < np.uint64(threshold)).nonzero()[0]
        ends = np.cumsum([len(keys) // _KEY_BYTES for keys, _, _ in new])
        lasts = np.searchsorted(rows, ends).tolist()
        chosen = list(zip(rows.tolist(), bits[rows].tolist(), strict=True))
        begin = first = 0
        for (_, each_bytes, lookup), end, last in zip(new, ends.tolist(), lasts, strict=True):
            followed = chosen[first:last]
            if self._threshold < threshold:  # it fell meanwhile
                followed = [one for one in followed if one[1] < self._threshold]
            if followed and lookup is not None:
                self._look_up(followed, begin, each_bytes, lookup)
            elif followed:  # the head of a prefix is used last, as in the pool
                self._use([(key, each_bytes) for _, key in reversed(followed)])
            begin, first = end, last

    def _look_up(
        self, followed: list[tuple[int, int]], begin: int, each_bytes: int, lookup: _Lookup
    ) -> None:
        """Count the misses among followed (row, key) of a request, then use what there is.

        Rows are counted from ``begin`` on.
        """
        unit_tokens, (local, wanted), hit_tokens = lookup
        first, last, stored = (
            begin + tokens // unit_tokens for tokens in (local, wanted, hit_tokens)
        )
        places = [0] * (len(SIZES) + 1)
        found = []
        for row, key in followed:
            place = self._place(key)
            if place == len(SIZES):
                if row >= stored:
                    places[place] += first <= row < last
                    continue
                place = _SAME  # the pool has it from before this start
            places[place] += first <= row < last
            found.append((key, each_bytes))
        if any(places[1:]):
            self._count_missed(places, unit_tokens)
        if found:
            found.reverse()
            self._use(found)

    def _count_missed(self, places: list[int], unit_tokens: int) -> None:
        """Count what each size misses: the keys that are ``places`` sizes further."""
        missing, share = 0, unit_tokens * (_ALL / self._threshold)
        for size in range(len(SIZES) - 1, -1, -1):
            missing += places[size + 1]
            self._now.missed[size] += missing * share

    def _choose(self, unit_bytes: int) -> None:
        """Choose the threshold by the first objects' size."""
        if not self._chosen and unit_bytes:
            self._chosen = True
            most = int(SIZES[-1] * self._pool_bytes) // unit_bytes
            while most * self._threshold > self._kept_max * _ALL:
                self._threshold //= 2

    def _place(self, key: int) -> int:
        """Return how many of the sizes are too small to hold a key still."""
        use = self._last_use.get(key)
        if use is None:
            return len(SIZES)
        for place, edge in enumerate(self._edges):
            if use >= edge:
                return place
        return len(SIZES)

    def _use(self, used: Iterable[tuple[int, int]]) -> None:
        """Number a use of each key; of a prefix the head is used last, as in the pool.

        With the bytes of each: to be reckoned with where no size holds the key any more.
        """
        uses, inside, first = self._uses, self._inside, self._first
        last_use, edges, oldest = self._last_use, self._edges, self._edges[-1]
        fresh_bytes = 0
        for key, new_bytes in used:
            use, size = last_use.pop(key, -1), new_bytes
            if use < oldest:  # new to every size
                fresh_bytes += size
            else:
                size, uses[use - first] = uses[use - first], 0
                for place, edge in enumerate(edges):
                    if use >= edge:
                        break
                    inside[place] += size
            last_use[key] = first + len(uses)
            uses.append(size)
        if fresh_bytes:
            self._inside = [held + fresh_bytes for held in inside]
        self._settle()
        if len(self._last_use) > self._tracked_max or len(uses) > 4 * self._tracked_max:
            self._forget()

    def _settle(self) -> None:
        """Move each size's edge on until what lies behind it fits."""
        uses, first = self._uses, self._first
        share = self._threshold / _ALL * self._pool_bytes
        for place, size in enumerate(SIZES):
            held, edge = self._inside[place], self._edges[place] - first
            while held > size * share:
                held -= uses[edge]
                edge += 1
            self._inside[place], self._edges[place] = held, edge + first

    def _forget(self) -> None:
        """Drop what no size holds any more, and follow half as many keys if that is not enough."""
        oldest = self._edges[-1]
        kept = {key: use for key, use in self._last_use.items() if use >= oldest}
        while len(kept) > self._kept_max:
            self._threshold //= 2
            kept = {key: use for key, use in kept.items() if key < self._threshold}
        numbers = list(kept.values())
        uses = [self._uses[number - self._first] for number in numbers]
        edges = [bisect_left(numbers, edge) for edge in self._edges]
        self._uses, self._first = uses, 0
        self._last_use = {key: at for at, key in enumerate(kept)}
        self._edges, self._inside = edges, [sum(uses[edge:]) for edge in edges]
        self._settle()

    def _turn_window(self, now_s: float) -> None:
        self._past.add(self._before)
        self._before, self._now = self._now, _Tally()
        self._window_end_s = now_s + window_s

"""Job ids that must never start any more, per half.

A job that ended, was cancelled before it came or was declared unknown leaves its id here, so
that a late or repeated submit is refused. When a half has too many, the lower half of them
collapses to a watermark that refuses every id at or below it: ids grow over the life of an
engine, so what it refuses beyond the tombstones is at worst a very late first submit.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Graves:
    jobs: set[int] = field(default_factory=set)
    watermark: int | None = None


class Tombstones:
    """Bounded sets of refused job ids by generation (which belongs to one rank of one session)."""

    def __init__(self, per_half_max: int) -> None:
        self._max = per_half_max
        self._halves: dict[int, _Graves] = {}
        self.collapses = 0

    def add(self, generation: int, job: int) -> None:
        """Refuse this job on this half from now on."""
        graves = self._halves.get(generation)
        if graves is None:
            graves = self._halves[generation] = _Graves()
        elif graves.watermark is not None and job <= graves.watermark:
            return
        graves.jobs.add(job)
        if len(graves.jobs) > self._max:
            self._collapse(graves)

    def refuses(self, generation: int, job: int) -> bool:
        """Whether a submit of this job on this half must be refused."""
        graves = self._halves.get(generation)
        if graves is None:
            return False
        below = graves.watermark is not None and job <= graves.watermark
        return below or job in graves.jobs

    def drop(self, generation: int) -> None:
        """The half is proven dead: no frame of it is accepted any more."""
        self._halves.pop(generation, None)

    def count(self) -> int:
        """Tombstones of all halves, those below a watermark not counted."""
        return sum(len(graves.jobs) for graves in self._halves.values())

    def _collapse(self, graves: _Graves) -> None:
        ordered = sorted(graves.jobs)
        keep = len(ordered) // 2
        graves.watermark = ordered[-keep - 1]
        graves.jobs = set(ordered[-keep:]) if keep else set()
        self.collapses += 1

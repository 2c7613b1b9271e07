"""Outcomes that are to be acknowledged: two threads take from one queue, each what it can send."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Acks(deque[int]):
    """Job numbers, oldest first. The hook thread adds; it and the lifeline take them away.

    Each is taken once, by one of them: a deque's own methods are atomic, slices and lengths of a
    list that another thread changes are not.
    """

    def take(self, jobs_max: int) -> list[int]:
        """Return (and forget) at most ``jobs_max`` of them."""
        taken: list[int] = []
        try:
            while len(taken) < jobs_max:
                taken.append(self.popleft())
        except IndexError:
            pass  # the other thread took the rest
        return taken

    def put_back(self, jobs: Sequence[int]) -> None:
        """They could not be sent now."""
        self.extendleft(reversed(jobs))

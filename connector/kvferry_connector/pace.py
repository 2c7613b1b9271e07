"""What a token of prefill costs the engine: from the time between two of its steps."""

from __future__ import annotations

from collections import deque
from statistics import median

step_tokens_min = 64  # a step with fewer is decoding, whose cost is another one
samples_max = 16


class Pace:
    """``token_ns``: the median over the last large steps; 0 while there was none.

    A step's time ends when the next one is built. After the last step of a burst that may be much
    later: a median does not mind.
    """

    def __init__(self) -> None:
        self.token_ns = 0
        self._tokens = 0
        self._at_s = 0.0
        self._samples: deque[float] = deque(maxlen=samples_max)

    def step(self, tokens: int, now_s: float) -> bool:
        """A step of so many tokens is built; whether ``token_ns`` was measured anew."""
        large = self._tokens >= step_tokens_min
        if large:
            self._samples.append((now_s - self._at_s) / self._tokens)
            self.token_ns = max(1, round(median(self._samples) * 1e9))
        self._tokens, self._at_s = tokens, now_s
        return large

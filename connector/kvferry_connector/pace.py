"""What a token of prefill costs the engine: from the time between two of its steps."""

from __future__ import annotations

from collections import deque
from statistics import median

step_tokens_min = 64  # a step with fewer is decoding, whose cost is another one
samples_max = 16


class Pace:
    """``token_ns``: the median over the last large steps; 0 while there was none.

    A step's time ends when the next one is built. After the last step of a burst that may be much
    later: a median does not mind. ``open``: a large step's time has begun, and the next step is to
    be told whatever its size; between small steps there is nothing to tell.
    """

    def __init__(self) -> None:
        self.token_ns = 0
        self.open = False
        self._tokens = 0
        self._at_s = 0.0
        self._samples: deque[float] = deque(maxlen=samples_max)

    def step(self, tokens: int, now_s: float) -> None:
        """A step of so many tokens is built."""
        if self.open:
            self._samples.append((now_s - self._at_s) / self._tokens)
            self.token_ns = max(1, round(median(self._samples) * 1e9))
        self.open = tokens >= step_tokens_min
        self._tokens, self._at_s = tokens, now_s

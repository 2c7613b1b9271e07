"""Wait on a condition with a generous deadline: the tests' only way to wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], what: str, deadline_s: float = 90.0, every_s: float = 0.005
) -> T:
    """Return the first truthy value of ``condition``; fail naming ``what`` at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"after {deadline_s} s still not: {what}")
        time.sleep(every_s)

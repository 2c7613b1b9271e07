"""Signals while the loop does not take them: while the sidecar starts, and while it closes.

What it has made by then is as after a kill, which the next start is made for.

The first process of a container has no default action: without a handler the kernel drops a
SIGTERM that comes while modules are loaded or the pool is made, and the sidecar would serve until
it is killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def heed_sigterm() -> None:
    """Have SIGTERM end a first process, too."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


@contextmanager
def obeyed() -> Iterator[None]:
    """Meanwhile SIGTERM and SIGINT end the process at once, and SIGHUP does nothing."""
    action = _end if os.getpid() == 1 else signal.SIG_DFL
    former = {number: signal.signal(number, action) for number in (signal.SIGTERM, signal.SIGINT)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        # What it would have read again is being read.
        former[signal.SIGHUP] = signal.signal(signal.SIGHUP, _nothing)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """See obeyed."""

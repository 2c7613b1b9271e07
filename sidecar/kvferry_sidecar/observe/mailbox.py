"""Questions of other threads to the control loop, answered between its turns.

The loop never waits for whoever asks. It answers with immutable values, or with records that only
grow. The asker waits at most as long as it likes: a loop that hangs is an answer too.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
questions_max = 64  # waiting at a time; further ones are refused


class BusyError(Exception):
    """Too many questions wait already, or the loop has ended."""


class Mailbox:
    """``fd`` becomes readable when a question waits; the loop then calls ``on_wake``."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._questions: deque[tuple[Callable[[float], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()  # for the descriptor's end; held for one system call
        self._open = True
        self.refused = 0

    def ask(self, question: Callable[[float], T]) -> Future[T]:
        """Have ``question(now_s)`` called in the loop's thread. Raises BusyError."""
        future: Future[T] = Future()
        with self._lock:
            if not self._open or len(self._questions) >= questions_max:
                self.refused += 1
                raise BusyError
            self._questions.append((question, future))
            os.eventfd_write(self.fd, 1)
        return future

    def on_wake(self, _events: int, now_s: float) -> None:
        """Answer what waits now (a handler of the loop)."""
        os.eventfd_read(self.fd)
        for _ in range(len(self._questions)):
            question, future = self._questions.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # whoever asked has given up
            try:
                future.set_result(question(now_s))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
                future.set_exception(error)

    def close(self) -> None:
        """Take no more questions; those that wait are refused."""
        with self._lock:
            self._open = False
            os.close(self.fd)
        for _, future in self._questions:
            future.cancel()

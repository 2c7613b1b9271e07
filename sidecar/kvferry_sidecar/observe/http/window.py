"""What the HTTP thread sees of the sidecar: questions to the control loop, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from kvferry_sidecar.observe.mailbox import BusyError, Mailbox
from kvferry_sidecar.observe.paths import PathsReading
from kvferry_sidecar.observe.progress import WorkStatus
from kvferry_sidecar.observe.reading import Reading
from kvferry_sidecar.outcomes.records import Record
from kvferry_sidecar.stages.objects import Filter, NamespaceView, ObjectsPage
from kvferry_sidecar.stages.views import GroupView, JobView, LeaseView
from kvferry_sidecar.stages.warm import WarmReading
from kvferry_sidecar.tiers.store import Listed

T = TypeVar("T")
answer_s_max = 2.0  # how long a question may take
# Parts of that time: a process that stood still (SIGSTOP, a paused machine) has spent but one.
_PARTS = 4


class Desk(Protocol):
    """The control loop's side (desk.py); what takes ``now_s`` runs in its thread only."""

    def reading(self, now_s: float) -> Reading:
        """Return a reading of everything."""

    def records(self, now_s: float) -> tuple[Record, ...]:
        """Return the last requests, oldest first."""

    def jobs(self, now_s: float) -> list[JobView]:
        """Return open jobs."""

    def leases(self, now_s: float) -> list[LeaseView]:
        """Return leases."""

    def groups(self, engine: str, total_tokens: int) -> list[GroupView]:
        """Return the groups of an engine (loop's thread)."""

    def namespaces(self) -> list[NamespaceView]:
        """Return what every namespace has in the pool (loop's thread)."""

    def warming(self) -> WarmReading:
        """Return how `kvferry warm` goes (loop's thread)."""

    def objects(self, wanted: Filter, first: int, most: int) -> ObjectsPage:
        """Return objects of one page of the pool (loop's thread)."""

    def on_disk(
        self, name: str, after: bytes, most: int, now_s: float
    ) -> Future[tuple[Listed, ...]]:
        """Ask a disk for objects behind the key ``after`` (loop's thread)."""

    def act(self, name: str, body: bytes, now_s: float) -> dict[str, object]:
        """Carry out one action."""

    def events(self) -> Sequence[Mapping[str, object]]:
        """Return the last events of the log."""

    def drift(self) -> object:
        """Return where the settings in effect are not those on disk (reads files)."""

    def settings(self) -> Sequence[tuple[str, str, str]]:
        """Return every setting with its origin."""


class UnavailableError(Exception):
    """The control loop cannot answer now, and why."""


class Window:
    """Built before the pool, so that probes are answered while it is made.

    ``desk`` is None until the sidecar is complete. ``last_turn_s``: end of the loop's last turn.
    """

    def __init__(
        self, mailbox: Mailbox, last_turn_s: Callable[[], float], stall_s_max: float
    ) -> None:
        self._mailbox = mailbox
        self._last_turn_s = last_turn_s
        self._stall_s_max = stall_s_max
        self.desk: Desk | None = None
        self.last: Reading | None = None  # what a loop that hangs is judged by
        self.doctor: Callable[[], Sequence[Any]] = tuple
        self.progress: Callable[[], Sequence[WorkStatus]] = tuple
        self.paths: Callable[[], PathsReading] = PathsReading  # any thread may ask

    def stalled_s(self) -> float | None:
        """Return how long the loop has made no progress when that is too long, else None."""
        if self.desk is None:
            return None  # starting: making a pool takes as long as it takes
        idle_s = time.monotonic() - self._last_turn_s()
        return idle_s if idle_s > self._stall_s_max else None

    async def ask(self, question: Callable[[Desk, float], T], seconds: float = answer_s_max) -> T:
        """Ask the loop. Raises UnavailableError, and whatever the question raises."""
        desk = self.desk
        if desk is None:
            raise UnavailableError("the sidecar is starting: its pool is being made")
        try:
            future = self._mailbox.ask(lambda now_s: question(desk, now_s))
        except BusyError:
            raise UnavailableError("too many questions wait for the control loop") from None
        answer = asyncio.wrap_future(future)
        try:
            for _ in range(_PARTS):
                await asyncio.wait([answer], timeout=seconds / _PARTS)
                if answer.done():
                    return answer.result()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # whoever asked has left; else the mailbox was closed
            raise UnavailableError("the sidecar is ending") from None
        finally:
            answer.cancel()
        raise UnavailableError(f"the control loop did not answer in {seconds:g} s")

    async def ask_later(
        self, question: Callable[[Desk, float], Future[T]], seconds: float = answer_s_max
    ) -> T:
        """Ask the loop for what a thread of a tier answers. Raises as ``ask``."""
        future = await self.ask(question, seconds)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except TimeoutError:
            raise UnavailableError(f"the tier did not answer in {seconds:g} s") from None

    async def reading(self) -> Reading:
        """Return a reading of everything."""
        self.last = await self.ask(lambda desk, now_s: desk.reading(now_s))
        return self.last

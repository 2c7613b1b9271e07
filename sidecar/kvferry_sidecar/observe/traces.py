"""Traces of finished requests, made from their records: the control loop does nothing for them.

A thread looks at the ring now and then. What has ended is kept or not (spans.py says which),
sent, and forgotten; a collector that does not take it costs those traces, which are counted, and
nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, TimeoutError  # noqa: A004 - of futures
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import NamedTuple, Protocol

from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.observe.mailbox import BusyError
from kvferry_sidecar.observe.spans import Keep, keeps, last_s, trace_id_of
from kvferry_sidecar.outcomes.ledger import STAGES
from kvferry_sidecar.outcomes.records import Record

look_s = 1.0  # between two looks at the ring
settle_s = 1.0  # after a request's end, for its last saves
batch_max = 256  # traces of one call
exemplars_max = 16  # of one stage
answer_s_max = 2.0
end_s_max = 6.0

Records = tuple[Record, ...]
Ask = Callable[[], Records]  # raises BusyError, TimeoutError, CancelledError


class Exemplar(NamedTuple):
    """A value of a histogram whose trace was sent. ``at_s``: seconds since 1970."""

    trace_id: str
    value: float
    at_s: float


@dataclass(frozen=True, slots=True)
class TracesReading:
    """``counts``: traces sent, failed and not_kept. ``exemplars`` by "kind/stage"."""

    endpoint: str
    error: str
    counts: Mapping[str, int]
    exemplars: Mapping[str, tuple[Exemplar, ...]]


class Sink(Protocol):
    """Where traces go."""

    def export(self, records: list[Record], wall_ns: int) -> bool:
        """Send them; False when they were not taken."""

    def close(self) -> None:
        """Send no more."""


def open_sink(endpoint: str, facts: Mapping[str, str]) -> Sink:
    """Return the collector at an OTLP address. Raises ConfigError."""
    for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _installed(name):
            raise ConfigError(
                f"traces.endpoint is set, and {name} is not installed",
                "pip install 'kvferry[otel]', or leave traces.endpoint empty",
            )
    from kvferry_sidecar.observe.otlp import Otlp  # noqa: PLC0415 - half a second, only where on

    return Otlp(endpoint, facts)


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@dataclass(slots=True)
class Traces:
    """The thread and what it has seen. ``ask`` returns the ring's records."""

    sink: Sink
    keep: Keep
    endpoint: str
    ask: Ask
    log: Log
    _counts: Counter[str] = field(default_factory=Counter)
    _exemplars: dict[str, deque[Exemplar]] = field(default_factory=dict)
    _done: set[Record] = field(default_factory=set)
    _open: set[Record] = field(default_factory=set)
    _error: str = ""
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def close(self, records: Records = ()) -> None:
        """End the thread, and send what has ended by now, within a bound."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(end_s_max)
        if self._thread is not None and not self._thread.is_alive() and not self._error:
            self.look(records, time.monotonic() + settle_s)
        self.sink.close()

    def reading(self) -> TracesReading:
        """Return the counts so far; any thread may ask."""
        exemplars = {name: tuple(found.copy()) for name, found in self._exemplars.copy().items()}
        return TracesReading(self.endpoint, self._error, dict(self._counts), exemplars)

    def look(self, records: Records, now_s: float) -> None:
        """Send what has ended since the last look; what left the ring counts as ended."""
        ring = set(records)
        fresh = ring - self._done
        ended = {one for one in fresh if _ended(one, now_s)} | (self._open - ring)
        self._done = (self._done | ended) & ring
        self._open = fresh - ended
        kept = sorted((one for one in ended if keeps(one, self.keep)), key=lambda one: one.at_s)
        self._counts["not_kept"] += len(ended) - len(kept)
        for first in range(0, len(kept), batch_max):
            self._send(kept[first : first + batch_max])

    def _run(self) -> None:
        while not self._end.wait(look_s):
            try:
                records = self.ask()
            except (BusyError, TimeoutError, CancelledError):
                continue  # the loop is busy, or ends: the ring keeps them
            self.look(records, time.monotonic())

    def _send(self, records: list[Record]) -> None:
        wall_ns = time.time_ns() - time.monotonic_ns()
        try:
            taken, why = self.sink.export(records, wall_ns), "it was not taken"
        except Exception as error:  # noqa: BLE001 - a collector's fault must not end the thread
            taken, why = False, f"{type(error).__name__}: {error}"
        self._counts["sent" if taken else "failed"] += len(records)
        if not taken and not self._error:
            self.log.warning("traces are lost", endpoint=self.endpoint, error=why)
        elif taken and self._error:
            self.log.info("traces are taken again", endpoint=self.endpoint)
        self._error = "" if taken else why
        for record in records if taken else ():
            trace_id = trace_id_of(record)
            self._remember(record, trace_id, wall_ns / 1e9)
            record.trace_id = trace_id  # last: who reads it finds the exemplars

    def _remember(self, record: Record, trace_id: str, wall_s: float) -> None:
        for job in record.jobs:
            for stage, seconds in zip(STAGES, job.stages, strict=True):
                found = self._exemplars.setdefault(
                    f"{job.kind}/{stage}", deque(maxlen=exemplars_max)
                )
                found.append(Exemplar(trace_id, seconds, wall_s + job.ended_s))


def _ended(record: Record, now_s: float) -> bool:
    """Whether nothing more is to come: forgotten by the engine, and quiet since."""
    return record.ended_s > 0 and record.load != "open" and now_s - last_s(record) >= settle_s

"""Structured logs on stderr: text for people, or one JSON object per line.

An event is a short fixed phrase; everything that varies is a field. Identifiers come from clients
and engines, so they are cut to a bound and stripped of control characters. Tokens, hashes, keys,
nonces and descriptors are no fields of any event: nothing logged lets a reader rebuild a prompt.

Whoever logs is never held up or ended by it: a thread of its own writes. What does not fit its
queue (a reader that stopped reading) or cannot be written (a full disk, a reader that is gone) is
lost and counted, and the next line that can be written says how many were.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Literal, TextIO

import structlog

text_chars_max = 256
recent_max = 512  # events that are kept for whoever looks at the sidecar
log_lines_max = 1024  # lines that wait for the writer; further ones are lost and counted
flush_s_max = 1.0  # at the end: how long the last lines may take
Level = Literal["debug", "info", "warning", "error"]
Format = Literal["console", "json"]

_SECRET = ("token", "secret", "password", "credential", "nonce", "salt", "prompt")
_COUNTS = ("_tokens", "_prompts")  # numbers of them, not themselves


class Lines:
    """Writes lines to a stream from a thread of its own; a structlog logger. Nothing here raises.

    ``note``: the count of lost lines -> a line that tells it.
    """

    def __init__(self, stream: TextIO | None, note: Callable[[int], str]) -> None:
        self._stream = stream
        self._note = note
        self._queue: queue.Queue[str] = queue.Queue(log_lines_max)
        self._lock = threading.Lock()
        self._untold = 0
        self._cut = False  # the stream ends in a part of a line
        self.lost = 0
        self.recent: deque[Mapping[str, object]] = deque(maxlen=recent_max)
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def msg(self, line: str) -> None:
        """Hand a line to the writer; it is lost where the queue is full."""
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._lose(1)

    debug = info = warning = error = critical = msg

    def flush(self, deadline_s: float = flush_s_max) -> bool:
        """Wait until every line was written or lost; False where that takes longer."""
        done = self._queue.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._queue.unfinished_tasks, deadline_s)

    def _lose(self, lines: int) -> None:
        with self._lock:
            self.lost += lines
            self._untold += lines

    def _write_all(self) -> None:
        while True:
            line = self._queue.get()
            try:
                self._write_line(line)
            except Exception:  # noqa: BLE001 - whatever it is, there is nowhere to tell it
                self._lose(1)
            finally:
                self._queue.task_done()

    def _write_line(self, line: str) -> None:
        told = self._untold
        text = f"{self._note(told)}\n{line}\n" if told else f"{line}\n"
        self._write(f"\n{text}" if self._cut else text)
        with self._lock:
            self._untold -= told

    def _write(self, text: str) -> None:
        """Write by the descriptor: sys.stderr's lock, held by a stuck write, would bar the exit."""
        if self._stream is None:
            raise OSError("there is no stderr")
        try:
            fd = self._stream.fileno()
        except OSError:  # a stream in memory
            self._stream.write(text)
            return
        rest = memoryview(text.encode(errors="backslashreplace"))
        while rest:
            try:
                written = os.write(fd, rest)
            except BlockingIOError:
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll()
                continue
            rest = rest[written:]
            self._cut = bool(rest)


class Throttle:
    """Lets one event of a kind through per ``interval_s`` and counts those between."""

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> (next one, held back since)

    def passes(self, kind: str, now_s: float) -> int | None:
        """Return how many were held back since the last one; None: this one is, too."""
        next_s, held_back = self._kinds.get(kind, (now_s, 0))
        if now_s < next_s:
            self._kinds[kind] = (next_s, held_back + 1)
            return None
        self._kinds[kind] = (now_s + self._interval_s, 0)
        return held_back


def configure(level: Level, style: Format, stream: TextIO | None = None) -> Lines:
    """Set structlog up for the process; loggers made before it follow.

    ``recent`` of what is returned holds the last events, oldest first, as fields.
    """
    out: TextIO | None = sys.stderr if stream is None else stream  # None: started without one
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        tidy,
    ]
    ends: list[structlog.typing.Processor]
    if style == "json":
        # Tracebacks without local variables: they hold nonces, keys and ids.
        plain = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        ends = [
            structlog.processors.ExceptionRenderer(plain),
            structlog.processors.JSONRenderer(),
        ]
    else:
        colors = out is not None and out.isatty()
        ends = [
            structlog.dev.ConsoleRenderer(
                colors=colors, exception_formatter=structlog.dev.plain_traceback
            )
        ]
    processors = [*shared, *ends]

    def remember(
        _logger: object, _method: str, event: MutableMapping[str, object]
    ) -> MutableMapping[str, object]:
        lines.recent.append({k: v for k, v in event.items() if k != "exc_info"})
        return event

    def note(lost: int) -> str:
        event: object = {"event": "log lines were lost", "lines": lost, "part": "log"}
        for processor in processors:
            event = processor(None, "warning", event)  # type: ignore[arg-type]  # the chain's
        return str(event)

    lines = Lines(out, note)
    structlog.configure(
        processors=[*shared, remember, *ends],
        wrapper_class=_at_level(level),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=False,
    )
    return lines


def set_level(level: Level) -> None:
    """Change the least level that is logged, for all loggers at once."""
    structlog.configure(wrapper_class=_at_level(level))


def _at_level(level: Level) -> type[structlog.typing.FilteringBoundLogger]:
    return structlog.make_filtering_bound_logger(getattr(logging, level.upper()))


def get_logger(part: str) -> structlog.typing.FilteringBoundLogger:
    """Return the logger of one part of the sidecar; its name is the field ``part``."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=part)
    return logger


def tidy(
    _logger: object, _method: str, event: MutableMapping[str, object]
) -> MutableMapping[str, object]:
    """Bound every text, print bytes as hex, and drop what must not be logged (a processor)."""
    for name, value in list(event.items()):
        if name.endswith(_COUNTS) and isinstance(value, int | float):
            continue
        if any(word in name for word in _SECRET):
            event[name] = "(not logged)"
        elif isinstance(value, str):
            event[name] = bounded(value)
        elif isinstance(value, bytes | bytearray | memoryview):
            event[name] = bounded(bytes(value[: text_chars_max // 2 + 1]).hex())
    return event


def bounded(text: str) -> str:
    """Return text for one line of a log: printable, at most text_chars_max characters."""
    cut = text if len(text) <= text_chars_max else text[: text_chars_max - 1] + "…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)

"""Structured logs on stderr: text for people, or one JSON object per line.

An event is a short fixed phrase; everything that varies is a field. Identifiers come from clients
and engines, so they are cut to a bound and stripped of control characters. Tokens, hashes, keys,
nonces and descriptors are no fields of any event: nothing logged lets a reader rebuild a prompt.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Literal, TextIO

import structlog

text_chars_max = 256
Level = Literal["debug", "info", "warning", "error"]
Format = Literal["console", "json"]

_SECRET = ("token", "secret", "password", "credential", "nonce", "salt", "prompt")
_COUNTS = ("_tokens", "_prompts")  # numbers of them, not themselves


def configure(level: Level, style: Format, stream: TextIO | None = None) -> None:
    """Set structlog up for the process; loggers made before it follow."""
    out = sys.stderr if stream is None else stream
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        tidy,
    ]
    ends: list[structlog.typing.Processor]
    if style == "json":
        ends = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        ends = [structlog.dev.ConsoleRenderer(colors=out.isatty())]
    structlog.configure(
        processors=[*shared, *ends],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )


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

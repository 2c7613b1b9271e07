"""Logs of child processes that are alive during a test: shown when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LINES_SHOWN = 60
_watched: list[tuple[str, Path]] = []


@contextmanager
def watch_log(name: str, log: Path) -> Iterator[None]:
    """Have the end of ``log`` shown with every test that fails inside this block."""
    entry = (name, log)
    _watched.append(entry)
    try:
        yield
    except BaseException:
        print(f"--- {name} log ---\n{tail(log)}")
        raise
    finally:
        _watched.remove(entry)


def watched() -> list[tuple[str, Path]]:
    """Return (name, log) of the child processes that are alive now."""
    return list(_watched)


def tail(log: Path) -> str:
    """Return the last lines of a log, "" when there is none."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-LINES_SHOWN:])

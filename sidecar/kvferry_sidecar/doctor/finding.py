"""What a check finds: a verdict, the facts, and the remedy."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

import msgspec


class Verdict(enum.StrEnum):
    """How bad it is. ``note``: good to know, nothing to change."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the machine tells about itself; other roots in tests."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")

    @property
    def shm(self) -> Path:
        """Where segments of shared memory are."""
        return self.dev / "shm"

    def read(self, path: str) -> str:
        """Return a file below ``/proc`` or ``/sys`` without its end of line; "" without one."""
        root, _, rest = path.partition("/")
        try:
            return ((self.proc if root == "proc" else self.sys) / rest).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def names(self, path: str) -> list[str]:
        """Return the names in a folder below ``/sys`` or ``/proc``, sorted; none without one."""
        root, _, rest = path.partition("/")
        try:
            folder = (self.proc if root == "proc" else self.sys) / rest
            return sorted(path.name for path in folder.iterdir())
        except OSError:
            return []


def ok(check: str, text: str) -> Finding:
    """Nothing to change."""
    return Finding(check, Verdict.OK, text)


def note(check: str, text: str, remedy: str = "") -> Finding:
    """Good to know."""
    return Finding(check, Verdict.NOTE, text, remedy)


def warn(check: str, text: str, remedy: str) -> Finding:
    """It works, and less well than it could."""
    return Finding(check, Verdict.WARN, text, remedy)


def fail(check: str, text: str, remedy: str) -> Finding:
    """It will not work."""
    return Finding(check, Verdict.FAIL, text, remedy)

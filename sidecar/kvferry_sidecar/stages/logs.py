"""What the stages need of a logger."""

from __future__ import annotations

from typing import Protocol


class Log(Protocol):
    """The part of a structlog logger that is used here."""

    def debug(self, event: str, **facts: object) -> object:
        """Of interest while searching a fault."""

    def info(self, event: str, **facts: object) -> object:
        """Of interest always."""

    def warning(self, event: str, **facts: object) -> object:
        """Something was declined or failed."""

    def error(self, event: str, **facts: object) -> object:
        """A bug."""

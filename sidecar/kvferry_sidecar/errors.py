"""Errors an operator reads: one type per operation, each with a remedy and an exit code.

A miss or a refusal is a value with a reason, not an exception. These end a command.
"""

from __future__ import annotations

import enum
from typing import ClassVar


class ExitCode(enum.IntEnum):
    """What the commands end with; docs/operations.md lists them."""

    OK = 0
    FAILED = 1  # it ran, and what it checks is not so
    USAGE = 2  # flags, configuration or installation
    NO_SIDECAR = 3  # no sidecar answers in this run directory
    RUN_DIR = 4  # the run directory cannot be used, or another sidecar has it
    POOL = 5  # the pool segment cannot be made, or another sidecar has it
    WARNED = 6  # doctor: it works, and something should be changed
    STALLED = 7  # the control loop made no progress; the watchdog ended the process
    GPU = 8  # the context of a GPU is lost to this process


class KvferryError(Exception):
    """What went wrong and why (``message``), and what to change (``remedy``)."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}; {remedy}")
        self.message = message
        self.remedy = remedy


class ConfigError(KvferryError):
    """A setting is unknown, cannot be read, or contradicts another."""

    exit_code = ExitCode.USAGE


class MissingExtraError(KvferryError):
    """A package of an optional extra is not installed."""

    exit_code = ExitCode.USAGE


class RunDirError(KvferryError):
    """The run directory is missing, foreign, or too long for a socket path."""

    exit_code = ExitCode.RUN_DIR


class PoolSegmentError(KvferryError):
    """The shared-memory segment of the host pool cannot be made or used."""

    exit_code = ExitCode.POOL


class HttpError(KvferryError):
    """An HTTP address cannot be bound, or its token file cannot be read."""

    exit_code = ExitCode.USAGE


class RequestError(KvferryError):
    """An operator asked for something that does not exist, or in the wrong form."""


class NoSidecarError(KvferryError):
    """Nothing answers at the attach socket."""

    exit_code = ExitCode.NO_SIDECAR


class ProtocolError(KvferryError):
    """The sidecar answered with something this version does not read."""

"""The command line: `kvferry serve | status | explain | doctor | act | config | ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from kvferry_sidecar import early_signals

# What the extra `sidecar` brings; the base install is the connector's and lacks all of it.
_EXTRA = (
    "click",
    "posix_ipc",
    "prometheus_client",
    "rich",
    "starlette",
    "structlog",
    "uvicorn",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (errors.ExitCode)."""
    early_signals.heed_sigterm()
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        print(
            f"kvferry: {', '.join(missing)} not installed: this is the connector's base install\n"
            "  remedy: pip install 'kvferry[sidecar]'",
            file=sys.stderr,
        )
        return 2
    from kvferry_sidecar.cli import commands  # noqa: PLC0415 - only now are its imports known

    return commands.run(arguments)

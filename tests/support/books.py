"""A sidecar's books, asked in this process: status, and that everything adds up when idle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvferry_sidecar.cli.query import ask_status
from support.waiting import wait_until


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the status document. Raises NoSidecarError."""
    document: dict[str, Any] = json.loads(ask_status(run_dir, deadline_s=90.0))
    return document


def wait_settled(run_dir: Path) -> dict[str, Any]:
    """Wait until nothing is in flight, check that the ledger balances, return the status."""
    status = wait_until(lambda: _settled(read_status(run_dir)), "the sidecar is idle", every_s=0.02)
    assert status is not None  # wait_until returns what is true
    pipeline = status["pipeline"]
    for account in (pipeline["ledger"], *pipeline["sessions"].values()):
        ended = account["done"] + account["failed"] + account["cancelled"]
        assert account["accepted"] == ended, account
    assert pipeline["violations"] == []
    assert status["loop"]["handler_errors"] == 0
    return status


def _settled(status: dict[str, Any]) -> dict[str, Any] | None:
    pipeline, pool = status["pipeline"], status["pool"]
    open_now = (
        pipeline["leases"],
        pipeline["leased_entries"],
        pipeline["outcomes_unacked"],
        pipeline["ledger"]["open"],
        *pipeline["jobs_open"].values(),
        pool["leased"],
        pool["writing"],
        pool["doomed"],
    )
    return None if any(open_now) else status


def resident_bytes(pid: int) -> int:
    """Return the anonymous memory of a process: shared segments (the pool) do not count."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, whatever else the machine did."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descriptors(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))

"""What the pipeline shows to operators: a frozen reading, taken by the control loop."""

from __future__ import annotations

import msgspec

from kvferry_sidecar.outcomes.ledger import Totals


class PipelineSnapshot(msgspec.Struct, frozen=True):
    """Counts since the start, and what is open now. Keys of the dicts are names or reasons."""

    draining: bool
    # Now.
    jobs_open: dict[str, int]  # parts by kind: "load", "save"
    leases: int
    leased_entries: int
    admissions: int
    key_bytes: int
    outcomes_unacked: int
    tombstones: int
    # Jobs since the start.
    ledger: Totals
    sessions: dict[str, Totals]
    outcomes_resent: int
    # Lookups since the start; requests and tokens count first answers only.
    probes: int
    asks: int
    need_full: int
    hit_requests: int
    missed_requests: int
    hit_tokens: int
    missed_tokens: int
    local_requests: int
    declines: dict[str, int]  # lookups and frames that were declined, by reason
    skips: dict[str, int]  # chunks that saves skipped, by reason
    idle_falls: int  # leases that fell by idle time
    beat_falls: int  # leases that a heartbeat healed
    admissions_dropped: int
    tombstone_collapses: int
    damaged_chunks: int  # dropped with or behind a checksum mismatch
    violations: list[str]  # of the ledger, found while idle: each one is a bug

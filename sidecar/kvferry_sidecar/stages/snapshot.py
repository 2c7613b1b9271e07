"""What the pipeline shows to operators: a frozen reading, taken by the control loop."""

from __future__ import annotations

import msgspec

from kvferry_sidecar.outcomes.histogram import HistogramReading
from kvferry_sidecar.outcomes.ledger import Totals
from kvferry_sidecar.stages.breaker import BreakerReading
from kvferry_sidecar.stages.curve import CurveReading
from kvferry_sidecar.stages.shadow import ShadowReading
from kvferry_sidecar.stages.stores import TierSnapshot


class JournalReading(msgspec.Struct, frozen=True):
    """Tokens and requests of first answers; ``records``: requests that are remembered now."""

    hit_tokens: dict[str, int]  # by tier
    miss_tokens: dict[str, int]  # by reason
    miss_requests: dict[str, int]  # by reason
    load_tokens: dict[str, int]  # by how the load ended
    saved_objects: int
    records: int
    records_dropped: int
    curve: CurveReading  # misses in a pool of other sizes


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
    queues: dict[str, int]  # parts now: at their fence, waiting by kind, at the copy engine
    oldest_job_s: float  # age of the oldest open job
    ends: dict[str, int]  # parts by "kind/status/reason"
    stage_seconds: dict[str, HistogramReading]  # by "kind/stage"
    part_bytes: dict[str, HistogramReading]  # by kind
    journal: JournalReading
    tiers: list[TierSnapshot] = []  # slower ones, in the order they are asked
    staging: dict[str, int] = {}  # asks that waited for slower tiers, and bounds that were hit
    breaker: dict[str, BreakerReading] = {}  # load or recompute, by engine
    shadow: ShadowReading | None = None  # hits computed and compared
    saves_paused: bool = False  # by an operator
    residence_seconds: HistogramReading | None = None  # of what was evicted
    stage_in_seconds: HistogramReading | None = None  # of asks that waited for slower tiers

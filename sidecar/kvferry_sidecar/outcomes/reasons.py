"""Why a lookup found less, a job was refused or a job did not end as done: the whole list.

A reason travels in Answer, Outcome and Error, and is the label of every counter derived from
them. Each has a meaning an operator can read and a remedy: ``EXPLANATIONS``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Reason(enum.StrEnum):
    """One word per cause; "" where there is nothing to explain."""

    NONE = ""
    # Lookups.
    ABSENT = "absent"
    EVICTED = "evicted"
    BOUNDARY = "boundary"
    EAGLE = "eagle"
    NAMESPACE = "other-namespace"
    STAGING = "staging"
    NOT_READY = "not-ready"
    DRAINING = "draining"
    PAUSED = "paused"
    VERSION = "version"
    HASHES_MAX = "hashes-max"
    ADMISSIONS_MAX = "admissions-max"
    KEY_BYTES_MAX = "key-bytes-max"
    LEASES_MAX = "leases-max"
    LEASE_BUSY = "lease-busy"
    SLOWER = "slower"
    SHADOW = "shadow"
    QUARANTINED = "quarantined"
    # Frames that could not be taken.
    FRAMES = "frames"
    ROLE = "role"
    # Submits that were refused.
    LIFE = "life"
    TOMBSTONE = "tombstone"
    DIGEST = "digest"
    TABLES = "tables"
    HASHES = "hashes"
    LEASE = "lease"
    NO_FENCE = "no-fence"
    STRIPE_BYTES = "stripe-bytes"
    JOBS_MAX = "jobs-max"
    OUTCOMES_MAX = "outcomes-max"
    DECIDED = "decided"
    PARTNER = "partner"
    # Ends of accepted jobs.
    CANCELLED = "cancelled"
    FENCE = "fence"
    QUEUE = "queue"
    COPY_DEADLINE = "copy-deadline"
    COPY_FAILED = "copy-failed"
    INTERNAL = "internal"
    CHECKSUM = "checksum"
    GONE = "gone"
    PEER_DEAD = "peer-dead"
    PEER_LEFT = "peer-left"
    DRAINED = "drained"
    # Ranks of a job that never submitted.
    LATE = "late"
    ASKED = "asked"
    # Chunks that a save skipped.
    STORED = "stored"
    BEING_WRITTEN = "being-written"
    POOL_FULL = "pool-full"


class Explanation(NamedTuple):
    """What a reason means, and what an operator can do about it."""

    meaning: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Decline:
    """A refusal as a value: the reason, and the facts of this case."""

    reason: Reason
    detail: str


_NOTHING = "nothing to do"
_REPORT = "a bug of the connector: report it with the log lines of this job"

EXPLANATIONS: dict[Reason, Explanation] = {
    Reason.NONE: Explanation("nothing to explain", _NOTHING),
    Reason.ABSENT: Explanation(
        "the next chunk of the prefix is in no tier", "raise tiers.host.bytes if it was evicted"
    ),
    Reason.EVICTED: Explanation(
        "the next chunk of the prefix was stored and has been evicted since",
        "raise tiers.host.bytes",
    ),
    Reason.BOUNDARY: Explanation(
        "full attention is stored further, but a window or a state is missing where a request "
        "could resume",
        "nothing to do; raise tiers.host.bytes if evictions grow",
    ),
    Reason.EAGLE: Explanation(
        "a drafter (EAGLE or MTP) recomputes the last chunk of every hit", _NOTHING
    ),
    Reason.NAMESPACE: Explanation(
        "the prompt is stored for an engine that differs, or before a reset of the cache",
        "start both engines alike where the named facts should agree",
    ),
    Reason.STAGING: Explanation(
        "the rest of the prefix is in a slower tier and did not reach the pool in time",
        "raise limits.stage_ms_max, and above it probe_ms_max of the connector",
    ),
    Reason.NOT_READY: Explanation(
        "not every local rank of the engine is registered at this epoch",
        "see `kvferry status`: which rank is missing, and its refusal in the log",
    ),
    Reason.DRAINING: Explanation("the sidecar is shutting down", "start it again"),
    Reason.PAUSED: Explanation(
        "an operator paused saves", "`kvferry act resume-saves`, when the reason is gone"
    ),
    Reason.VERSION: Explanation(
        "the request was admitted under an older namespace version (weights or cache were reset)",
        _NOTHING,
    ),
    Reason.HASHES_MAX: Explanation(
        "the prompt has more prefix hashes than one admission may", "raise limits.hashes_max"
    ),
    Reason.ADMISSIONS_MAX: Explanation(
        "every known admission of the engine holds a lease", "raise limits.admissions_max"
    ),
    Reason.KEY_BYTES_MAX: Explanation(
        "the keys of all admissions together fill their bound", "raise limits.key_bytes_max"
    ),
    Reason.LEASES_MAX: Explanation(
        "the engine already leases as many pool entries as it may", "raise limits.leases_max"
    ),
    Reason.SHADOW: Explanation(
        "the hit is computed and compared with what is stored", "nothing: see loads.shadow_percent"
    ),
    Reason.QUARANTINED: Explanation(
        "a comparison with computed KV failed in this namespace: nothing of it is believed",
        "find the cause (operations.md, shadow verification); delete RUN_DIR/quarantine, restart",
    ),
    Reason.SLOWER: Explanation(
        "loading takes this engine longer than computing",
        "see `breaker` in `kvferry status`; copy.threads, a faster tier, or loads.breaker = false",
    ),
    Reason.LEASE_BUSY: Explanation(
        "a load job owns the lease of this admission until its ranks are done", _NOTHING
    ),
    Reason.FRAMES: Explanation("a message's raw frames do not fit its body", _REPORT),
    Reason.ROLE: Explanation("this half may not send this message", _REPORT),
    Reason.LIFE: Explanation(
        "the job was made by another life of the scheduler half", "nothing: it was restarted"
    ),
    Reason.TOMBSTONE: Explanation(
        "the job had already ended, was cancelled, or was declared unknown on this rank", _NOTHING
    ),
    Reason.DIGEST: Explanation("this rank's copy of the job differs from the first one", _REPORT),
    Reason.TABLES: Explanation(
        "the job's block tables or hand-offs do not cover what its masks name", _REPORT
    ),
    Reason.HASHES: Explanation("the job's hashes do not cover the chunks it saves", _REPORT),
    Reason.LEASE: Explanation(
        "the load's lease had fallen, or does not cover it",
        "raise limits.lease_idle_ms_max if requests wait that long for blocks",
    ),
    Reason.NO_FENCE: Explanation("the rank attached without a fence page", _REPORT),
    Reason.STRIPE_BYTES: Explanation(
        "one chunk of all local ranks, with its checksums, is larger than a slab of the pool",
        "raise tiers.host.slab_bytes and restart with a new pool",
    ),
    Reason.JOBS_MAX: Explanation(
        "the engine has as many jobs in flight as it may", "raise limits.jobs_max"
    ),
    Reason.OUTCOMES_MAX: Explanation(
        "the half does not acknowledge its outcomes", "see whether the engine still steps"
    ),
    Reason.DECIDED: Explanation("the job was decided without this rank", _NOTHING),
    Reason.PARTNER: Explanation(
        "a save needs all local ranks, and one of them cannot take part", _NOTHING
    ),
    Reason.CANCELLED: Explanation("the engine cancelled the job", _NOTHING),
    Reason.FENCE: Explanation(
        "the engine did not reach the job's step in time",
        "see whether the engine hangs; else raise limits.fence_ms_max",
    ),
    Reason.QUEUE: Explanation(
        "the copy did not get its turn in time",
        "see the machine's load, and whether another copy is stuck; limits.copy_ms_max",
    ),
    Reason.INTERNAL: Explanation(
        "a bug while the job ended; what it brought is not used", "report it with the log"
    ),
    Reason.COPY_DEADLINE: Explanation(
        "the copy took longer than its deadline", "see the machine's load; limits.copy_ms_max"
    ),
    Reason.COPY_FAILED: Explanation("the copy engine failed", "see the log for its error"),
    Reason.CHECKSUM: Explanation(
        "the stored bytes do not match their checksum; the chunk was dropped",
        "check the node's memory when this is seen again",
    ),
    Reason.GONE: Explanation(
        "another load found a chunk of this one damaged before it began; the chunk was dropped",
        "check the node's memory when this is seen again",
    ),
    Reason.PEER_DEAD: Explanation("the half's process has died", "see the engine's log"),
    Reason.PEER_LEFT: Explanation("the half left in order", _NOTHING),
    Reason.DRAINED: Explanation(
        "the shutdown's deadline came before the job's end", "raise limits.drain_ms_max"
    ),
    Reason.LATE: Explanation(
        "the rank did not submit its part of the job in time", "see that rank's log"
    ),
    Reason.ASKED: Explanation(
        "the rank asked for the job before its submit arrived, so it was declared unknown",
        _NOTHING,
    ),
    Reason.STORED: Explanation("the chunk is in the pool already", _NOTHING),
    Reason.BEING_WRITTEN: Explanation("another job is writing this chunk", _NOTHING),
    Reason.POOL_FULL: Explanation(
        "nothing in the pool could be evicted for the chunk", "raise tiers.host.bytes"
    ),
}

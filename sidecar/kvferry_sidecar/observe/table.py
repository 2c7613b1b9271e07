"""The table of all metrics: name, help, labels, and where in a Reading the numbers stand.

Names follow Prometheus: base units, ``_total`` (added by the encoder) for what only grows. Ratios
are left to queries, because ratios of nodes cannot be added. Labels come from fixed lists, never
from requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from kvferry_connector.wire.version import PROTOCOL_MAX

from kvferry_sidecar.observe.reading import Reading
from kvferry_sidecar.observe.samples import (
    Labels,
    Numbers,
    Readings,
    by,
    curve_misses,
    findings,
    gpus,
    limits,
    moved,
    named,
    nic_bytes,
    objects,
    one,
    pinned,
    pool,
    ranks,
    refused,
    requests,
    sessions,
    shadow_steps,
    split,
    state,
    tier_calls,
    tier_events,
    tier_states,
    tier_transports,
    whole,
)


class Row(NamedTuple):
    """One metric. ``read`` gives its samples: values of ``labels``, and a number."""

    name: str
    help: str
    labels: Labels
    read: Callable[[Reading], Numbers]


class Bars(NamedTuple):
    """One histogram."""

    name: str
    help: str
    labels: Labels
    read: Callable[[Reading], Readings]


COUNTERS = (
    Row(
        "lookup_probes",
        "Messages with the hashes of a request.",
        (),
        one(lambda r: r.pipeline.probes),
    ),
    Row(
        "lookup_asks",
        "Questions how much of a request can be loaded.",
        (),
        one(lambda r: r.pipeline.asks),
    ),
    Row(
        "lookup_need_full",
        "Lookups whose hashes had to be sent again.",
        (),
        one(lambda r: r.pipeline.need_full),
    ),
    Row(
        "lookup_requests",
        "Requests by first answer; local: the engine had as much itself.",
        ("result",),
        by(requests),
    ),
    Row(
        "lookup_tokens",
        "Tokens that were wanted beyond the engine's own: hits and misses.",
        (),
        one(lambda r: r.pipeline.hit_tokens + r.pipeline.missed_tokens),
    ),
    Row(
        "lookup_hit_tokens",
        "Tokens that were offered, by the tier they lie in.",
        ("tier",),
        by(lambda r: {"host": 0} | r.pipeline.journal.hit_tokens),
    ),
    Row(
        "lookup_miss_tokens",
        "Tokens that were wanted in vain, by reason.",
        ("reason",),
        by(lambda r: r.pipeline.journal.miss_tokens),
    ),
    Row(
        "lookup_miss_requests",
        "Requests offered nothing, by reason.",
        ("reason",),
        by(lambda r: r.pipeline.journal.miss_requests),
    ),
    Row(
        "lookup_declined",
        "Lookups and messages declined, by reason.",
        ("reason",),
        by(lambda r: r.pipeline.declines),
    ),
    Row(
        "load_tokens",
        "Tokens of loads, by how the load ended.",
        ("result",),
        by(lambda r: r.pipeline.journal.load_tokens),
    ),
    Row("save_objects", "Objects stored.", (), one(lambda r: r.pipeline.journal.saved_objects)),
    Row(
        "save_skipped_objects",
        "Objects that a save did not store, by reason.",
        ("reason",),
        by(lambda r: r.pipeline.skips),
    ),
    Row(
        "job_parts",
        "Ends of jobs, one per rank.",
        ("kind", "status", "reason"),
        split(lambda r: r.pipeline.ends),
    ),
    Row(
        "job_parts_accepted",
        "Jobs taken, one per rank.",
        (),
        one(lambda r: r.pipeline.ledger.accepted),
    ),
    Row("job_parts_refused", "Jobs refused, one per rank.", ("reason",), by(refused)),
    Row("transfer_bytes", "Bytes copied between engines and the pool.", ("direction",), by(moved)),
    Row(
        "outcomes_resent",
        "Outcomes sent again for want of an acknowledgement.",
        (),
        one(lambda r: r.pipeline.outcomes_resent),
    ),
    Row(
        "lease_falls",
        "Leases that no release ended.",
        ("cause",),
        by(lambda r: {"idle": r.pipeline.idle_falls, "heartbeat": r.pipeline.beat_falls}),
    ),
    Row("pool_evictions", "Objects evicted.", ("tier",), pool("evictions")),
    Row(
        "pool_quota_evictions",
        "Of them those evicted to keep their own namespace within its quota.",
        ("tier",),
        pool("quota_evictions"),
    ),
    Row(
        "pool_dropped_before_reuse",
        "Objects evicted that were never loaded.",
        ("tier",),
        pool("dropped_before_reuse"),
    ),
    Row(
        "pool_curve_tokens",
        "Tokens of the lookups that the curve of misses by the pool's size counts.",
        (),
        one(lambda r: r.pipeline.journal.curve.wanted_tokens),
    ),
    Row(
        "pool_curve_miss_tokens",
        "Of these, those that would miss in a pool of another size, estimated from a sample.",
        ("size",),
        by(curve_misses),
    ),
    Row(
        "damaged_chunks",
        "Chunks dropped for a checksum that differed.",
        (),
        one(lambda r: r.pipeline.damaged_chunks),
    ),
    Row(
        "shadow_hits",
        "Hits computed and compared: watched, compared, differed, dropped.",
        ("step",),
        by(shadow_steps),
    ),
    Row("tier_events", "What happened at a slower tier.", ("tier", "event"), tier_events),
    Row(
        "staging_events",
        "Lookups that waited for slower tiers, and bounds that were hit.",
        ("event",),
        by(lambda r: r.pipeline.staging),
    ),
    Row("limit_hits", "Times that a bound was hit.", ("limit",), by(limits)),
    Row(
        "attach_refused",
        "Streams refused or closed.",
        ("cause",),
        by(lambda r: r.loop.attach_refused),
    ),
    Row(
        "frames_refused",
        "Frames refused or dropped.",
        ("cause",),
        by(lambda r: r.loop.frames_refused),
    ),
    Row("loop_turns", "Turns of the control loop.", (), one(lambda r: r.loop.turns)),
    Row(
        "loop_handler_errors",
        "Exceptions that left a handler; see the log.",
        (),
        one(lambda r: r.loop.handler_errors),
    ),
    Row(
        "log_lines_lost",
        "Log lines that could not be written.",
        (),
        one(lambda r: r.loop.log_lines_lost),
    ),
    Row(
        "traces",
        "Requests that ended, by what became of their trace; nothing where traces are off.",
        ("result",),
        by(lambda r: r.traces.counts if r.traces is not None else {}),
    ),
    Row(
        "nic_bytes",
        "Bytes through network cards and RDMA ports that are seen here, of everybody.",
        ("nic", "direction"),
        nic_bytes,
    ),
)
GAUGES = (
    Row(
        "build_info",
        "The version, and the newest protocol it speaks.",
        ("version", "protocol"),
        lambda r: [((r.document.kvferry, str(PROTOCOL_MAX)), 1)],
    ),
    Row(
        "epoch_info", "This start of the sidecar.", ("epoch",), lambda r: [((r.document.epoch,), 1)]
    ),
    Row(
        "start_time_seconds",
        "When this sidecar started, seconds since 1970.",
        (),
        one(lambda r: r.started_s),
    ),
    Row("state", "1 for the state it is in.", ("state",), by(state)),
    Row(
        "degraded",
        "1 for each thing that is not well.",
        ("what",),
        by(lambda r: dict.fromkeys(r.document.degraded, 1.0)),
    ),
    Row(
        "doctor_findings",
        "Lines of the doctor's report at the start, by verdict.",
        ("verdict",),
        by(findings),
    ),
    Row("tier_state", "1 for the state a slower tier is in.", ("tier", "state"), tier_states),
    Row("tier_transport", "1 for a tier's transport now.", ("tier", "transport"), tier_transports),
    Row(
        "tier_calls",
        "Calls into a slower tier: open, and given up.",
        ("tier", "state"),
        tier_calls,
    ),
    Row("sessions", "Engines attached.", ("state",), by(sessions)),
    Row("ranks", "Ranks of all engines.", ("state",), by(ranks)),
    Row(
        "engine_memory_mapped_bytes",
        "KV memory of engines that is mapped.",
        (),
        one(lambda r: sum(h.memory_bytes for s in r.document.sessions for h in s.halves)),
    ),
    Row(
        "gpu_memory_bytes",
        "Memory of a GPU that is used here: total, free, staging of copies, mapped of engines.",
        ("gpu", "what"),
        gpus,
    ),
    Row(
        "job_parts_open",
        "Jobs under way, one per rank.",
        ("kind",),
        by(lambda r: r.pipeline.jobs_open),
    ),
    Row(
        "job_oldest_seconds",
        "Age of the oldest open job.",
        (),
        one(lambda r: r.pipeline.oldest_job_s),
    ),
    Row(
        "queue_depth",
        "Parts of jobs that wait: for the engine's step, for their turn, for their copies.",
        ("queue",),
        by(lambda r: r.pipeline.queues),
    ),
    Row("leases", "Leases held.", (), one(lambda r: r.pipeline.leases)),
    Row("leased_objects", "Objects in leases.", (), one(lambda r: r.pipeline.leased_entries)),
    Row("admissions", "Requests whose keys are known.", (), one(lambda r: r.pipeline.admissions)),
    Row(
        "admission_key_bytes",
        "Bytes of the keys of all known requests.",
        (),
        one(lambda r: r.pipeline.key_bytes),
    ),
    Row(
        "outcomes_unacknowledged",
        "Outcomes kept until their acknowledgement.",
        (),
        one(lambda r: r.pipeline.outcomes_unacked),
    ),
    Row("tombstones", "Job ids that are refused.", (), one(lambda r: r.pipeline.tombstones)),
    Row(
        "violations",
        "Faults of the account; each is a bug.",
        (),
        one(lambda r: len(r.pipeline.violations)),
    ),
    Row("pool_capacity_bytes", "Size of a tier.", ("tier",), pool("total_bytes")),
    Row("pool_used_bytes", "Bytes in use of a tier.", ("tier",), pool("used_bytes")),
    Row("pool_leased_objects", "Objects that may not be evicted.", ("tier",), pool("leased")),
    Row("pool_pinned_objects", "Objects pinned in the host pool.", ("pin",), by(pinned)),
    Row("pool_pinned_bytes", "Bytes that hard pins keep.", ("tier",), pool("pinned_hard_bytes")),
    Row("pool_objects_limit", "Places in the index.", ("tier",), pool("keys_max")),
    Row("pool_objects", "Objects in the host pool, by state.", ("state",), by(objects)),
    Row(
        "pool_node_bytes",
        "Bytes of the host pool by NUMA node, from a sample of its pages.",
        ("node",),
        by(lambda r: r.paths.pool_nodes if r.paths is not None else {}),
    ),
    Row(
        "loop_longest_turn_seconds",
        "The longest turn of the control loop.",
        (),
        one(lambda r: r.loop.longest_turn_s),
    ),
    Row(
        "loop_lag_seconds",
        "Age of this reading: more than a second or so means a loop that hangs.",
        (),
        one(lambda r: max(0.0, time.monotonic() - r.taken_s)),
    ),
    Row("attach_streams", "Open attach streams.", (), one(lambda r: r.loop.connections)),
    Row(
        "records",
        "Requests that `kvferry explain` knows.",
        (),
        one(lambda r: r.pipeline.journal.records),
    ),
)
HISTOGRAMS = (
    Bars(
        "part_stage_seconds",
        "Seconds of a rank's part at the engine's step (fence), in the queue, and copied.",
        ("kind", "stage"),
        lambda r: named(r.pipeline.stage_seconds),
    ),
    Bars(
        "part_bytes",
        "Bytes moved for a rank's part of a job.",
        ("kind",),
        lambda r: named(r.pipeline.part_bytes),
    ),
    Bars(
        "stage_in_seconds",
        "How long lookups waited for slower tiers.",
        (),
        whole(lambda r: r.pipeline.stage_in_seconds),
    ),
    Bars(
        "pool_residence_seconds",
        "How long evicted objects had been in the pool, in whole seconds.",
        ("tier",),
        lambda r: [(("host",), s)] if (s := r.pipeline.residence_seconds) else [],
    ),
    Bars(
        "message_seconds",
        "Handling one message; Probe and Ask look up, Submit plans, Copied: commits and reports.",
        ("message",),
        lambda r: named(r.loop.message_seconds),
    ),
    Bars("loop_turn_seconds", "One turn of the loop.", (), whole(lambda r: r.loop.turn_seconds)),
)

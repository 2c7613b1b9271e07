"""The table of all metrics: name, help, labels, and where in a Reading the numbers stand.

Names follow Prometheus: base units, ``_total`` (added by the encoder) for what only grows. Ratios
are left to queries, because ratios of nodes cannot be added. Labels come from fixed lists, never
from requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kvferry_connector.wire.version import PROTOCOL_MAX

from kvferry_sidecar.doctor.finding import Verdict
from kvferry_sidecar.observe.reading import Reading
from kvferry_sidecar.outcomes.histogram import HistogramReading

Labels = tuple[str, ...]
Numbers = Iterable[tuple[Labels, float]]
Readings = Iterable[tuple[Labels, HistogramReading]]


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


def _one(read: Callable[[Reading], float]) -> Callable[[Reading], Numbers]:
    return lambda reading: [((), read(reading))]


def _by(read: Callable[[Reading], Mapping[str, float]]) -> Callable[[Reading], Numbers]:
    return lambda reading: [((name,), number) for name, number in read(reading).items()]


def _split(read: Callable[[Reading], Mapping[str, float]]) -> Callable[[Reading], Numbers]:
    return lambda reading: [(tuple(k.split("/")), n) for k, n in read(reading).items()]


def _sessions(reading: Reading) -> dict[str, float]:
    ready = sum(session.ready for session in reading.document.sessions)
    return {"ready": ready, "incomplete": len(reading.document.sessions) - ready}


def _ranks(reading: Reading) -> dict[str, float]:
    states = dict.fromkeys(("registered", "attached", "disconnected", "missing"), 0.0)
    for session in reading.document.sessions:
        workers = [half for half in session.halves if half.rank >= 0]
        states["missing"] += len(set(session.ranks) - {half.rank for half in workers})
        for half in workers:
            state = "registered" if half.registered else "attached"
            states[state if half.connected else "disconnected"] += 1
    return states


def _objects(reading: Reading) -> dict[str, float]:
    pool = reading.document.pool
    if pool is None:
        return {}
    return {"ready": pool.ready, "writing": pool.writing, "doomed": pool.doomed}


def _pool(field: str) -> Callable[[Reading], Numbers]:
    def read(reading: Reading) -> Numbers:
        pool = reading.document.pool
        return [] if pool is None else [(("host",), getattr(pool, field))]

    return read


def _requests(reading: Reading) -> dict[str, float]:
    pipeline = reading.pipeline
    return {
        "hit": pipeline.hit_requests,
        "miss": pipeline.missed_requests,
        "local": pipeline.local_requests,
    }


def _moved(reading: Reading) -> dict[str, float]:
    ledger = reading.pipeline.ledger
    return {"load": ledger.loaded_bytes, "save": ledger.saved_bytes}


def _refused(reading: Reading) -> dict[str, float]:
    found = reading.pipeline.ledger.reasons.items()
    return {name.removeprefix("refused/"): n for name, n in found if name.startswith("refused/")}


def _limits(reading: Reading) -> dict[str, float]:
    """Bounds that were hit: those that are reasons, and those that have a counter of their own."""
    pipeline, loop = reading.pipeline, reading.loop
    hits: dict[str, float] = {
        name.replace("-", "_"): count
        for name, count in {**pipeline.declines, **_refused(reading)}.items()
        if name.endswith("-max")
    }
    for name in ("connections-max", "sessions-max", "ranks-max"):
        hits[name.replace("-", "_")] = loop.attach_refused.get(name, 0)
    for name in ("hello_ms_max", "attach_out_bytes_max"):
        hits[name] = loop.attach_refused.get(name, 0)
    return hits | {
        "admissions_dropped": pipeline.admissions_dropped,
        "tombstones_max": pipeline.tombstone_collapses,
        "records_max": pipeline.journal.records_dropped,
        "router_hwm": loop.frames_refused.get("send_full", 0),
    }


def _state(reading: Reading) -> dict[str, float]:
    return {name: reading.document.state == name for name in ("ready", "degraded", "draining")}


def _findings(reading: Reading) -> dict[str, float]:
    found = [one.verdict for one in reading.findings]
    return {str(verdict): found.count(verdict) for verdict in Verdict}


def _named(readings: Mapping[str, HistogramReading]) -> Readings:
    return [(tuple(name.split("/")), one) for name, one in readings.items()]


COUNTERS = (
    Row(
        "lookup_probes",
        "Messages with the hashes of a request.",
        (),
        _one(lambda r: r.pipeline.probes),
    ),
    Row(
        "lookup_asks",
        "Questions how much of a request can be loaded.",
        (),
        _one(lambda r: r.pipeline.asks),
    ),
    Row(
        "lookup_need_full",
        "Lookups whose hashes had to be sent again.",
        (),
        _one(lambda r: r.pipeline.need_full),
    ),
    Row(
        "lookup_requests",
        "Requests by first answer; local: the engine had as much itself.",
        ("result",),
        _by(_requests),
    ),
    Row(
        "lookup_tokens",
        "Tokens that were wanted beyond the engine's own: hits and misses.",
        (),
        _one(lambda r: r.pipeline.hit_tokens + r.pipeline.missed_tokens),
    ),
    Row(
        "lookup_hit_tokens",
        "Tokens that were offered, by the tier they lie in.",
        ("tier",),
        _by(lambda r: r.pipeline.journal.hit_tokens),
    ),
    Row(
        "lookup_miss_tokens",
        "Tokens that were wanted in vain, by reason.",
        ("reason",),
        _by(lambda r: r.pipeline.journal.miss_tokens),
    ),
    Row(
        "lookup_miss_requests",
        "Requests offered nothing, by reason.",
        ("reason",),
        _by(lambda r: r.pipeline.journal.miss_requests),
    ),
    Row(
        "lookup_declined",
        "Lookups and messages declined, by reason.",
        ("reason",),
        _by(lambda r: r.pipeline.declines),
    ),
    Row(
        "load_tokens",
        "Tokens of loads, by how the load ended.",
        ("result",),
        _by(lambda r: r.pipeline.journal.load_tokens),
    ),
    Row("save_objects", "Objects stored.", (), _one(lambda r: r.pipeline.journal.saved_objects)),
    Row(
        "save_skipped_objects",
        "Objects that a save did not store, by reason.",
        ("reason",),
        _by(lambda r: r.pipeline.skips),
    ),
    Row(
        "job_parts",
        "Ends of jobs, one per rank.",
        ("kind", "status", "reason"),
        _split(lambda r: r.pipeline.ends),
    ),
    Row(
        "job_parts_accepted",
        "Jobs taken, one per rank.",
        (),
        _one(lambda r: r.pipeline.ledger.accepted),
    ),
    Row("job_parts_refused", "Jobs refused, one per rank.", ("reason",), _by(_refused)),
    Row(
        "transfer_bytes", "Bytes copied between engines and the pool.", ("direction",), _by(_moved)
    ),
    Row(
        "outcomes_resent",
        "Outcomes sent again for want of an acknowledgement.",
        (),
        _one(lambda r: r.pipeline.outcomes_resent),
    ),
    Row(
        "lease_falls",
        "Leases that no release ended.",
        ("cause",),
        _by(lambda r: {"idle": r.pipeline.idle_falls, "heartbeat": r.pipeline.beat_falls}),
    ),
    Row("pool_evictions", "Objects evicted.", ("tier",), _pool("evictions")),
    Row(
        "pool_dropped_before_reuse",
        "Objects evicted that were never loaded.",
        ("tier",),
        _pool("dropped_before_reuse"),
    ),
    Row("limit_hits", "Times that a bound was hit.", ("limit",), _by(_limits)),
    Row(
        "attach_refused",
        "Streams refused or closed.",
        ("cause",),
        _by(lambda r: r.loop.attach_refused),
    ),
    Row(
        "frames_refused",
        "Frames refused or dropped.",
        ("cause",),
        _by(lambda r: r.loop.frames_refused),
    ),
    Row("loop_turns", "Turns of the control loop.", (), _one(lambda r: r.loop.turns)),
    Row(
        "loop_handler_errors",
        "Exceptions that left a handler; see the log.",
        (),
        _one(lambda r: r.loop.handler_errors),
    ),
    Row(
        "log_lines_lost",
        "Log lines that could not be written.",
        (),
        _one(lambda r: r.loop.log_lines_lost),
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
        _one(lambda r: r.started_s),
    ),
    Row("state", "1 for the state it is in.", ("state",), _by(_state)),
    Row(
        "degraded",
        "1 for each thing that is not well.",
        ("what",),
        _by(lambda r: dict.fromkeys(r.document.degraded, 1.0)),
    ),
    Row(
        "doctor_findings",
        "Lines of the doctor's report at the start, by verdict.",
        ("verdict",),
        _by(_findings),
    ),
    Row("sessions", "Engines attached.", ("state",), _by(_sessions)),
    Row("ranks", "Ranks of all engines.", ("state",), _by(_ranks)),
    Row(
        "engine_memory_mapped_bytes",
        "KV memory of engines that is mapped.",
        (),
        _one(lambda r: sum(h.memory_bytes for s in r.document.sessions for h in s.halves)),
    ),
    Row(
        "job_parts_open",
        "Jobs under way, one per rank.",
        ("kind",),
        _by(lambda r: r.pipeline.jobs_open),
    ),
    Row(
        "job_oldest_seconds",
        "Age of the oldest open job.",
        (),
        _one(lambda r: r.pipeline.oldest_job_s),
    ),
    Row(
        "queue_depth",
        "Parts of jobs that wait: for the engine's step, for their turn, for their copies.",
        ("queue",),
        _by(lambda r: r.pipeline.queues),
    ),
    Row("leases", "Leases held.", (), _one(lambda r: r.pipeline.leases)),
    Row(
        "leased_objects", "Objects that leases hold.", (), _one(lambda r: r.pipeline.leased_entries)
    ),
    Row("admissions", "Requests whose keys are known.", (), _one(lambda r: r.pipeline.admissions)),
    Row(
        "admission_key_bytes",
        "Bytes of the keys of all known requests.",
        (),
        _one(lambda r: r.pipeline.key_bytes),
    ),
    Row(
        "outcomes_unacknowledged",
        "Outcomes kept until their acknowledgement.",
        (),
        _one(lambda r: r.pipeline.outcomes_unacked),
    ),
    Row("tombstones", "Job ids that are refused.", (), _one(lambda r: r.pipeline.tombstones)),
    Row(
        "violations",
        "Faults of the account; each is a bug.",
        (),
        _one(lambda r: len(r.pipeline.violations)),
    ),
    Row("pool_capacity_bytes", "Size of a tier.", ("tier",), _pool("total_bytes")),
    Row("pool_used_bytes", "Bytes in use of a tier.", ("tier",), _pool("used_bytes")),
    Row("pool_leased_objects", "Objects that may not be evicted.", ("tier",), _pool("leased")),
    Row("pool_objects_limit", "Places in the index.", ("tier",), _pool("keys_max")),
    Row("pool_objects", "Objects in the host pool, by state.", ("state",), _by(_objects)),
    Row(
        "loop_longest_turn_seconds",
        "The longest turn of the control loop.",
        (),
        _one(lambda r: r.loop.longest_turn_s),
    ),
    Row(
        "loop_lag_seconds",
        "Age of this reading: more than a second or so means a loop that hangs.",
        (),
        _one(lambda r: max(0.0, time.monotonic() - r.taken_s)),
    ),
    Row("attach_streams", "Open attach streams.", (), _one(lambda r: r.loop.connections)),
    Row(
        "records",
        "Requests that `kvferry explain` knows.",
        (),
        _one(lambda r: r.pipeline.journal.records),
    ),
)
HISTOGRAMS = (
    Bars(
        "part_stage_seconds",
        "Seconds of a rank's part at the engine's step (fence), in the queue, and copied.",
        ("kind", "stage"),
        lambda r: _named(r.pipeline.stage_seconds),
    ),
    Bars(
        "part_bytes",
        "Bytes moved for a rank's part of a job.",
        ("kind",),
        lambda r: _named(r.pipeline.part_bytes),
    ),
    Bars(
        "message_seconds",
        "Handling one message; Probe and Ask are lookups, Submit plans a job.",
        ("message",),
        lambda r: _named(r.loop.message_seconds),
    ),
    Bars(
        "loop_turn_seconds",
        "One turn of the control loop.",
        (),
        lambda r: [((), r.loop.turn_seconds)],
    ),
)

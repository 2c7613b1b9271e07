"""The status document: bounded, readable, and saying why two engines share nothing."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import pytest
from kvferry_connector.wire.attach import RegisterRank, Shard, StatusReply, encode
from kvferry_connector.wire.names import NO_VERSION
from kvferry_sidecar.cli import render
from kvferry_sidecar.engines.base import GpuUse
from kvferry_sidecar.observe import status
from kvferry_sidecar.outcomes.ledger import Totals
from kvferry_sidecar.sessions.model import Peer, RankGeometry, RankGroup, Session, SessionKey
from kvferry_sidecar.stages.snapshot import PipelineSnapshot

POOL = SimpleNamespace(
    total_bytes=1 << 30, used_bytes=1 << 28, ready=10, writing=1, doomed=0, leased=2,
    keys_max=4096, evictions=3, dropped_before_reuse=1, slabs=64, slabs_free=48,
    quota_evictions=2, pinned_soft=0, pinned_hard=0, pinned_hard_bytes=0,
)  # fmt: skip
REGISTRATION = RegisterRank(1, Shard(), {}, 8, "LBHNC", [], [], 16)


class Snapshot(msgspec.Struct):
    open_jobs: int
    leased_bytes: int
    reasons: dict[str, int]


@dataclass
class LoopReading:
    turns: int
    late_s: float


def session(engine="engine", identity=None, ranks=(0,)):
    made = Session(SessionKey(engine, "instance"))
    made.ready, made.ranks, made.version = True, ranks, NO_VERSION
    made.namespaces[NO_VERSION] = b"n" * 16
    layout = object()
    group = RankGroup(0, "full", 32, layout, 4096, 10, "all")
    geometry = RankGeometry(1, (group,), identity or {"model": "tiny"}, b"d" * 16, 16)
    made.scheduler = Peer(made, "scheduler", -1, 7, b"s", 1, 99, 1234, last_beat_s=90.0)
    made.workers[0] = Peer(
        made, "worker", 0, 8, b"w", 1, 99, 1234,
        memories={0: SimpleNamespace(total_bytes=1 << 20)},
        geometry=geometry, last_beat_s=95.0, last_message_s=97.0, registration=REGISTRATION,
        host="pod-1", dp_rank=2,
    )  # fmt: skip
    return made


def build(sessions, snapshot=None, now_s=100.0):
    body = status.encode(
        status.document(
            (1 << 64) - 1,
            sessions,
            snapshot or Snapshot(2, 1 << 20, {"done/loaded": 5}),
            POOL,
            LoopReading(12, 0.5),
            {"run_dir": "/run/x"},
            now_s,
        )
    )
    return body, status.read(body)


def test_the_document_says_what_runs():
    body, document = build([session()])
    assert document.epoch == "f" * 16
    assert document.format == status.STATUS_FORMAT
    (only,) = document.sessions
    assert (only.engine_id, only.ready, only.ranks) == ("engine", True, [0])
    assert only.namespace == (b"n" * 16).hex()
    assert (only.block_tokens, only.save_rules) == ([32], ["all"])
    scheduler, worker = only.halves
    assert (scheduler.role, scheduler.rank, scheduler.generation) == ("scheduler", -1, 7)
    assert scheduler.beat_age_s == 10.0
    assert not scheduler.registered
    assert (scheduler.message_age_s, worker.message_age_s) == (None, 3.0)
    assert (scheduler.position, worker.position) == ([], [0, 0, 0])
    assert (worker.host, worker.dp_rank) == ("pod-1", 2)
    assert (worker.registered, worker.memory_bytes, worker.payload_bytes) == (True, 1 << 20, [4096])
    assert document.pool.used_bytes == 1 << 28
    plain = json.loads(body)
    assert plain["pipeline"]["reasons"] == {"done/loaded": 5}
    assert plain["loop"] == {"turns": 12, "late_s": 0.5}
    assert plain["config"] == {"run_dir": "/run/x"}


def test_a_reader_passes_over_fields_it_does_not_know():
    body, document = build([session()])
    newer = json.loads(body) | {"added_later": 1}
    assert status.read(json.dumps(newer).encode()) == document


def test_nothing_attached():
    body = status.encode(status.document(1, [], None, None, None, {}))
    assert status.read(body).sessions == []
    assert status.read(body).pool is None


def test_a_seed_mismatch_is_reported_on_both_sides_and_only_there():
    facts = {"model": "tiny", "hash_seed": "0", "dtype": "float32"}
    sessions = [
        session("one", facts),
        session("two", {**facts, "hash_seed": "1"}),
        session("twin", facts),
        session("far", {"model": "big", "hash_seed": "9", "dtype": "float16"}),
    ]
    _, document = build(sessions)
    notes = {one.engine_id: one.notes for one in document.sessions}
    assert "hash_seed (0 against 1) differs from session two/instance" in notes["one"][0]
    assert "hash_seed (0 against 1)" in notes["twin"][0]
    assert "from session one/instance: no hits will be shared" in notes["two"][0]
    assert "PYTHONHASHSEED" in notes["two"][0]
    assert notes["far"] == []


def test_the_document_fits_one_message():
    wide = {f"fact{i}{'x' * 500}": "y" * 5000 for i in range(200)}
    _, document = build([session(f"e{i}" + "x" * 4000, wide) for i in range(64)])
    assert len(document.sessions[0].identity) == status.identity_facts_max
    body, document = build([session(f"e{i}", wide) for i in range(400)])
    assert (document.sessions, document.sessions_left_out) == ([], 400)
    encode(StatusReply(body))


def test_a_snapshot_over_the_bound_is_left_out():
    huge = Snapshot(1, 1, {f"reason{i}": i for i in range(400_000)})
    body, document = build([session()], huge)
    assert document.pipeline is None
    assert len(body) <= status.document_bytes_max


def test_another_document_is_refused():
    with pytest.raises(msgspec.DecodeError):
        status.read(b'{"format": 1}')


def test_the_tables_show_it(monkeypatch):
    absent = session("[red]two[/red]", {"model": "tiny", "dtype": "half"}, ranks=(0, 1))
    absent.ready = False
    absent.scheduler.connected = False
    totals = {"accepted": 5, "done": 4, "failed": 1, "cancelled": 0, "open": 0, "refused": 2,
              "loaded_bytes": 1 << 20, "saved_bytes": 0}  # fmt: skip
    snapshot = {
        "ledger": totals | {"reasons": {"failed/checksum": 1}},
        "sessions": {"engine/instance": totals},
        "hit_tokens": 12345,
        "jobs_open": {"load": 6},
        "violations": ["one job too many"],
        "tiers": [{"name": "redis", "state": "off", "reason": "it hangs", "calls_open": 7,
                   "counts": {"get_bytes": 3 << 20}, "facts": {"transport": "tcp"}}],
        "stage_seconds": {
            "load/copy": {"bounds": [0.025, 1.0], "counts": [99, 1, 0], "sum": 1.0},
            "save/copy": {"bounds": [0.025, 1.0], "counts": [0, 0, 0], "sum": 0.0},
        },
    }  # fmt: skip
    _, document = build([session(), absent], snapshot)
    gpu = GpuUse("a1b2", 80 << 30, 3 << 30, 34 << 20, 60 << 30)
    document = msgspec.structs.replace(document, gpus=[gpu])
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    render.console().print(render.status(document, everything=True))
    for words in ("engine/instance", "ready", "attached, disconnected", "worker 1", "not attached",
                  "256 MiB (25%)", "failed/checksum", "hit_tokens", "12,345", "jobs_open.load",
                  "violation: one job too many", "[red]two[/red]/instance",
                  "dtype (half against (absent)) differs", "off: it hangs", "tcp",
                  "3 MiB", "GPU a1b2: 3 GiB of 80 GiB free, 34 MiB staging, 60 GiB of",
                  "engines mapped"):  # fmt: skip
        assert words in out.getvalue(), out.getvalue()
    assert re.search(r"load copy +25 +25 +25", out.getvalue())
    assert "save copy" not in out.getvalue(), "nothing was saved"


def test_the_snapshot_of_the_pipeline_is_shown_as_it_is():
    fields = {field.name for field in msgspec.structs.fields(PipelineSnapshot)}
    assert {"ledger", "sessions", "violations"} <= fields
    totals = {field.name for field in msgspec.structs.fields(Totals)}
    assert {"accepted", "open", "done", "failed", "cancelled", "refused", "reasons"} <= totals
    assert {"loaded_bytes", "saved_bytes"} <= totals

"""The metrics: their table, its documentation, and what Prometheus' own linter says."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from kvferry_sidecar.observe import metrics, table
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families
from support.pipeline_bed import BLOCK, Bed, make_engine
from support.readings import reading
from support.sources import ROOT


def busy_bed():
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 1, 4)
    bed.probe(engine, 1, 1, 4)
    bed.ask(engine, 1, most=4 * BLOCK)
    job, raw = bed.load_job(engine, 1, [9, 10, 11, 12])
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    bed.probe(engine, 2, 9, 4)
    bed.ask(engine, 2, most=4 * BLOCK)
    return bed


def values(body):
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families(body.decode())
        for sample in family.samples
    }


def test_every_number_comes_from_the_reading():
    body, kind = metrics.exposition(reading(busy_bed(), disk="slow"))
    assert kind.startswith("text/plain")
    found = values(body)
    assert found["kvferry_lookup_hit_tokens_total", "host"] == 64
    assert found["kvferry_lookup_miss_tokens_total", "absent"] == 64
    assert found["kvferry_lookup_tokens_total",] == 128
    assert found["kvferry_load_tokens_total", "done"] == 64
    assert found["kvferry_job_parts_total", "", "done", "load"] == 1
    assert found["kvferry_save_objects_total",] == 4
    assert found["kvferry_transfer_bytes_total", "load"] == 4096
    assert found["kvferry_transfer_bytes_total", "save"] == 4096
    assert found["kvferry_pool_used_bytes", "host"] == 1 << 28
    assert found["kvferry_pool_dropped_before_reuse_total", "host"] == 1
    assert found["kvferry_pool_pinned_objects", "soft"] == 3
    assert found["kvferry_pool_pinned_objects", "hard"] == 1
    assert found["kvferry_pool_pinned_bytes", "host"] == 4096
    assert found["kvferry_limit_hits_total", "connections_max"] == 4
    assert found["kvferry_limit_hits_total", "tenant_share"] == 2
    assert found["kvferry_limit_hits_total", "router_hwm"] == 3
    assert found["kvferry_state", "degraded"] == 1
    assert found["kvferry_degraded", "disk"] == 1
    assert found["kvferry_doctor_findings", "ok"] == 1
    assert found["kvferry_loop_turn_seconds_bucket", "0.001"] == 0
    assert found["kvferry_loop_turn_seconds_bucket", "+Inf"] == 1
    assert found["kvferry_loop_turn_seconds_sum",] == 0.5
    assert found["kvferry_part_stage_seconds_count", "fence", "load"] == 1
    assert found["process_resident_memory_bytes",] > 1 << 20


def test_hits_and_misses_are_the_whole():
    found = values(metrics.exposition(reading(busy_bed()))[0])
    parts = [
        value for key, value in found.items()
        if key[0] in ("kvferry_lookup_hit_tokens_total", "kvferry_lookup_miss_tokens_total")
    ]  # fmt: skip
    assert sum(parts) == found["kvferry_lookup_tokens_total",]


def test_what_alerts_compare_is_there_before_the_first():
    """Without the series of hits a hit ratio of nothing would be no number, and no alert."""
    found = values(metrics.exposition(reading(Bed()))[0])
    assert found["kvferry_lookup_hit_tokens_total", "host"] == 0
    assert found["kvferry_damaged_chunks_total",] == 0


def test_openmetrics_where_it_is_asked_for():
    body, kind = metrics.exposition(reading(), "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert list(open_families(body.decode()))


@pytest.mark.parametrize("bed", [Bed, busy_bed], ids=["idle", "busy"])
def test_promtool_finds_nothing(bed):
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool (Debian package prometheus) is not installed")
    body, _ = metrics.exposition(reading(bed(), disk="slow"))
    told = subprocess.run(
        [promtool, "check", "metrics"], input=body, capture_output=True, check=False
    )
    assert (told.returncode, told.stdout, told.stderr) == (0, b"", b"")


def test_names_follow_the_conventions():
    rows = [*table.COUNTERS, *table.GAUGES, *table.HISTOGRAMS]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    for row in rows:
        assert re.fullmatch(r"[a-z][a-z0-9_]+", row.name)
        assert not re.search(
            r"ratio|rate|percent|_(ms|us|kib|mib|total|count|sum|bucket)$", row.name
        )
        assert row.help.endswith(".")
        assert not {"request", "engine", "session", "key"} & set(row.labels), "unbounded label"
    assert all(row.name.endswith(("_seconds", "_bytes")) for row in table.HISTOGRAMS)


def test_the_documentation_lists_them_all():
    documented = re.findall(
        r"^\| `kvferry_(\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$",
        (ROOT / "docs/metrics.md").read_text(),
        re.MULTILINE,
    )
    kinds = {"counter": table.COUNTERS, "gauge": table.GAUGES, "histogram": table.HISTOGRAMS}
    wanted = [
        (f"{row.name}_total" if kind == "counter" else row.name, kind,
         ", ".join(f"`{label}`" for label in row.labels) or "-", row.help)
        for kind, rows in kinds.items()
        for row in rows
    ]  # fmt: skip
    assert documented == wanted

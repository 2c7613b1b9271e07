"""Traces of requests: from the records of a real sidecar to a real OTLP receiver."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kvferry_sidecar.observe import spans
from kvferry_sidecar.observe.spans import Keep
from kvferry_sidecar.observe.traces import Traces, settle_s
from kvferry_sidecar.outcomes.reasons import Reason
from kvferry_sidecar.outcomes.records import JobEnd, Record
from structlog import get_logger
from support.collector import facts, running_collector
from support.hot_engine import raw_engine
from support.http import Http
from support.sidecar import running_sidecar, set_flags
from support.waiting import wait_until

LIFE = b"T" * 16
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def collector():
    with running_collector() as running:
        yield running


@pytest.fixture(scope="module")
def sidecar(collector):
    settings = {"traces.endpoint": collector.endpoint, "traces.sample_percent": 100}
    with running_sidecar(pool_bytes=8 << 20, flags=set_flags(settings)) as running:
        yield running


@pytest.fixture(scope="module")
def engine(sidecar):
    with raw_engine(sidecar.run_dir, LIFE) as one:
        yield one


def test_a_hit_is_one_trace_below_the_engines_span(sidecar, engine, collector):
    engine.put("traced")
    engine.trace = f"00-{TRACE}-{PARENT}-01"
    assert engine.get("traced") == 48
    engine.trace = ""
    found = wait_until(lambda: collector.trace("traced"), "the trace came")
    assert set(found) == {
        "kvferry.request", "kvferry.probe", "kvferry.load", "kvferry.fence", "kvferry.queue",
        "kvferry.copy", "kvferry.outcome",
    }  # fmt: skip
    root, load = found["kvferry.request"], found["kvferry.load"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert facts(root)["kvferry.loaded_tokens"] == 48
    assert facts(root)["kvferry.verdict"] == "Hit 48 tokens (48 from host). Loaded 48 tokens."
    assert facts(load)["kvferry.moved_bytes"] > 0
    assert facts(found["kvferry.outcome"])["kvferry.status"] == "done"
    for name, span in found.items():
        below = {"load": root, "probe": root, "request": None}.get(name.split(".")[1], load)
        assert below is None or span.parent_span_id == below.span_id, name
        assert root.start_time_unix_nano <= span.start_time_unix_nano, name
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
    assert len({span.span_id for span in found.values()}) == len(found)
    assert collector.resources[0]["service.name"] == "kvferry"


def test_metrics_and_the_api_name_the_trace(sidecar, engine, collector):
    engine.put("named")
    assert engine.get("named") == 48
    local = Http(sidecar.run_dir / "http.sock")
    (told,) = wait_until(
        lambda: [r for r in local.get("/api/v1/requests/named").json() if r["trace_id"]],
        "the trace was sent",
    )
    sent = collector.trace("named")["kvferry.request"]
    assert told["trace_id"] == sent.trace_id.hex()
    assert told["trace_id"] in {one["trace_id"] for one in local.get("/api/v1/slow").json()}
    text = local.get("/metrics", accept=OPEN_METRICS).text
    bucket = next(line for line in text.splitlines() if told["trace_id"] in line)
    assert bucket.startswith("kvferry_part_stage_seconds_bucket")
    assert "# {trace_id=" not in local.get("/metrics").text  # Prometheus' own text has none
    assert local.get("/api/v1/status").json()["traces"]["counts"]["sent"] >= 1


def test_a_collector_that_is_down_costs_its_traces_only(sidecar, engine, collector):
    local = Http(sidecar.run_dir / "http.sock")
    collector.status = 400
    assert engine.get("lost") == 0
    traces = wait_until(
        lambda: (told := local.get("/api/v1/status").json()["traces"])["error"] and told,
        "the failure is told",
    )
    assert traces["counts"]["failed"] >= 1
    collector.status = 200
    assert engine.get("after") == 0
    wait_until(lambda: collector.trace("after"), "traces come again")
    wait_until(  # the collector has them before the sidecar has its answer
        lambda: local.get("/api/v1/status").json()["traces"]["error"] == "",
        "the sidecar knows that they are taken",
    )
    assert collector.trace("lost") == {}


def test_what_ended_before_the_stop_is_sent(collector):
    settings = {"traces.endpoint": collector.endpoint, "traces.sample_percent": 100}
    with running_sidecar(pool_bytes=8 << 20, flags=set_flags(settings)) as running:
        with raw_engine(running.run_dir, LIFE) as engine:
            assert engine.get("at the end") == 0
        running.process.stop()
    assert collector.trace("at the end")


def test_without_the_extra_serve_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from kvferry_sidecar.observe.traces import open_sink\n"
        "from kvferry_sidecar.errors import ConfigError\n"
        "try: open_sink('http://x/v1/traces', {})\n"
        "except ConfigError as error: print(error.remedy)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'kvferry[otel]'" in told.stdout


def test_nothing_of_it_is_imported_where_traces_are_off():
    code = (
        "import sys, kvferry_sidecar.app\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what is kept -------------------------------------------------------------------------------


def record(number=1, *, status="done", seconds=0.01, trace="", ended=True):
    one = Record(("e", "i"), f"r{number}", (b"l", number), 100.0, 64)
    one.trace = trace
    one.hint, one.load_s = (48, 100.001), 100.1
    reason = Reason.CHECKSUM if status == "failed" else Reason.NONE
    stages = (0.0, 0.0, seconds)
    one.settled(JobEnd("load", status, reason, 48, 4096, 100.1, 100.1 + seconds, stages))
    one.ended_s = 100.2 + seconds if ended else 0.0
    return one


@pytest.mark.parametrize(
    ("percent", "case", "kept"),
    [
        (0, {}, False),
        (100, {}, True),
        (0, {"status": "failed"}, True),
        (0, {"seconds": 2.0}, True),
        (0, {"trace": f"00-{TRACE}-{PARENT}-01"}, True),
        (100, {"trace": f"00-{TRACE}-{PARENT}-00"}, False),
        (0, {"trace": f"00-{TRACE}-{PARENT}-00", "status": "failed"}, True),
        (100, {"trace": f"00-{'0' * 32}-{PARENT}-00"}, True),  # no context: as if there were none
    ],
)
def test_slow_and_failed_ones_are_always_kept(percent, case, kept):
    assert spans.keeps(record(**case), Keep(percent, 1000)) is kept


def test_of_the_others_the_share_is_kept():
    kept = sum(spans.keeps(record(number), Keep(10, 1000)) for number in range(4000))
    assert 300 < kept < 500


def test_a_failure_is_an_error_of_its_spans():
    root = spans.spans_of(record(status="failed"))
    (_, load) = root.children
    assert (root.error, load.error, load.children[-1].error) == ("checksum",) * 3


class Kept:
    def __init__(self):
        self.sent = []

    def export(self, records, wall_ns):
        self.sent += records
        return True

    def close(self):
        pass


def test_each_is_sent_once_and_what_the_ring_lost_too():
    sink = Kept()
    traces = Traces(sink, Keep(100, 1000), "http://x", tuple, get_logger())
    ended, under_way = record(1), record(2, ended=False)
    now_s = 100.3 + settle_s
    traces.look((ended, under_way), 100.3)
    assert sink.sent == []  # a late save may come
    traces.look((ended, under_way), now_s)
    traces.look((ended, under_way), now_s)
    assert sink.sent == [ended]
    traces.look((ended,), now_s)
    assert sink.sent == [ended, under_way]
    assert traces.reading().counts["sent"] == 2

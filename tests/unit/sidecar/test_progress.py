"""Long work tells how far it is; and the actions that pause saves and flush what waits."""

from __future__ import annotations

import json

import pytest
from kvferry_connector.wire.hot import Outcome
from kvferry_sidecar.cli import main
from kvferry_sidecar.observe.progress import Progress, countdown, ended_max, log_s
from kvferry_sidecar.tiers.runner import Find, Put
from structlog import get_logger
from structlog.testing import capture_logs
from support.hot_engine import HotEngine
from support.http import Http
from support.pipeline_bed import Bed, make_engine
from support.raw_half import KvMemory, attach_pair
from support.sidecar import running_sidecar, set_flags
from support.waiting import wait_until

LIFE = b"P" * 16


def test_progress_is_measured_when_somebody_looks():
    now = [100.0]
    with capture_logs() as lines:
        progress = Progress(get_logger(), lambda: now[0])
        left = [10]
        progress.begin("write-behind", "objects", countdown(10, lambda: left[0]))
        (work,) = progress.reading()
        assert (work.done, work.total, work.left_s) == (0, 10, None)
        now[0], left[0] = 100.0 + log_s, 6
        (work,) = progress.reading()
        assert (work.done, work.seconds, work.left_s) == (4, log_s, log_s / 4 * 6)
        progress.tick(now[0])
        progress.tick(now[0] + 1)
        left[0] = 0
        progress.tick(now[0] + 2)
    assert progress.reading() == []
    (ended,) = progress.ended()
    assert (ended.name, ended.done, ended.total) == ("write-behind", 10, 10)
    assert progress.tick(now[0] + 3) == float("inf")
    assert [(line["event"], line["done"]) for line in lines] == [("progress", 4), ("done", 10)]


def test_of_what_ended_the_last_is_remembered_and_how():
    with capture_logs() as lines:
        progress = Progress(get_logger())
        for number in range(ended_max + 1):
            progress.took(f"scan {number}", "keys", 7, 0.25)
        progress.begin("drain", "jobs", lambda: (1, 3))
        progress.end("drain")
        progress.end("drain")
    ended = progress.ended()
    assert [one.name for one in ended] == [*(f"scan {n}" for n in range(2, ended_max + 1)), "drain"]
    assert (ended[0].total, ended[0].seconds) == (7, 0.25)
    assert [line["event"] for line in lines] == ["done"] * (ended_max + 1) + ["ended early"]


def test_what_comes_meanwhile_is_work_too():
    left = [4]
    measure = countdown(4, lambda: left[0])
    left[0] = 7
    assert measure() == (0, 7)


def test_saves_are_refused_while_paused_and_open_ones_go_on():
    bed, engine = Bed(), make_engine()
    job, raw = bed.save_job(engine, 1, [1, 2])
    bed.submit(engine.workers[0], job, raw)
    bed.pipeline.pause_saves(paused=True)
    refused, raw = bed.save_job(engine, 2, [3, 4])
    bed.submit(engine.workers[0], refused, raw)
    bed.run_copies()
    ends = {one.job: (one.status, one.reason) for one in bed.take(Outcome, engine.workers[0])}
    assert ends == {job.job: ("done", ""), refused.job: ("failed", "paused")}
    assert bed.pipeline.snapshot().saves_paused
    bed.pipeline.pause_saves(paused=False)
    again, raw = bed.save_job(engine, 2, [3, 4])
    bed.submit(engine.workers[0], again, raw)
    bed.run_copies()
    assert bed.take(Outcome, engine.workers[0])[-1].status == "done"


def test_a_flush_counts_what_waits_and_tries_a_paused_tier_at_once():
    bed, engine = Bed(sources=("disk",)), make_engine()
    bed.stored(engine, 1, 4)
    name = bed.slow[0].name
    bed.pass_s(0)
    assert bed.pipeline.flush(bed.now_s, count_only=True) == {name: 4}
    assert bed.slow[0].of_kind(Put), "the first are being written, which counts too"
    bed.slow[0].answering = False
    bed.run_stores()
    bed.stored(engine, 2, 4)
    (tier,) = bed.pipeline.snapshot(bed.now_s).tiers
    assert tier.state == "paused"
    bed.slow[0].answering = True
    bed.pass_s(0)
    assert not bed.slow[0].open, "the trial has its time"
    assert bed.pipeline.flush(bed.now_s, count_only=False) == {name: bed.pipeline.backlog()}
    bed.pass_s(0)
    assert bed.slow[0].of_kind(Find)
    bed.run_stores()
    bed.pass_s(0)
    bed.run_stores()
    assert bed.pipeline.backlog() == 0


# --- of a real sidecar ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory):
    settings = {
        "tiers.disk.paths": tmp_path_factory.mktemp("disk"),
        "tiers.disk.bytes": 32 << 20,
        "limits.store_ms_max": 20_000,  # the machine of a test may be slow
    }
    with running_sidecar(pool_bytes=8 << 20, flags=set_flags(settings)) as running:
        yield running


@pytest.fixture(scope="module")
def engine(sidecar):
    memory = KvMemory()
    halves = attach_pair(sidecar.run_dir, memory, LIFE)
    yield HotEngine(*halves, memory, LIFE)
    for half in halves:
        half.close()
    memory.close()


def act(sidecar, *words):
    return main(["act", *words, "--run-dir", str(sidecar.run_dir)])


def wait_written(sidecar, objects):
    wait_until(
        lambda: sidecar.status()["pipeline"]["tiers"][0]["counts"].get("put_objects") == objects,
        "what waited was written",
    )


def test_actions_are_planned_done_and_told(sidecar, engine, capsys):
    http = Http(sidecar.run_dir / "http.sock")
    assert act(sidecar, "pause-saves", "--dry-run") == 0
    assert http.get("/api/v1/status").json()["state"] == "ready"
    assert act(sidecar, "pause-saves") == 0
    status = http.get("/api/v1/status").json()
    assert (status["state"], status["pipeline"]["saves_paused"]) == ("degraded", True)
    assert "resume-saves" in status["degraded"]["saves"]
    refused = engine.ended(engine.submit(engine.save_job("paused", [1, 2])))
    assert (refused.status, refused.reason) == ("failed", "paused")
    assert act(sidecar, "resume-saves") == 0
    engine.put("saved")
    assert http.get("/api/v1/status").json()["state"] == "ready"
    capsys.readouterr()
    assert act(sidecar, "flush") == 0
    (tier,) = json.loads(capsys.readouterr().out)["waiting"]
    assert tier.startswith("disk ")
    wait_written(sidecar, 3)
    wait_until(lambda: not sidecar.status()["progress"], "nothing is under way")


def test_a_drain_says_what_it_waits_for(sidecar, engine, capsys):
    """A lease that the engine neither loads nor releases holds a drain up until its bound."""
    engine.put("held")
    wait_written(sidecar, 6)  # or the drain would wait for more than the lease
    engine.lease("held", 3)
    http = Http(sidecar.run_dir / "http.sock")
    assert http.post("/api/v1/actions/drain").json()["leases"] == 1
    (work,) = wait_until(lambda: sidecar.status()["progress"], "the drain is told")
    assert work["name"] == "drain"
    assert main(["status", "--run-dir", str(sidecar.run_dir)]) == 0
    assert (
        f"drain: {work['done']} of {work['total']} jobs, leases and writes in "
        in capsys.readouterr().out
    )
    assert 1 <= work["total"] - work["done"] <= work["total"]
    engine.scheduler.leave()
    process = sidecar.process.process
    wait_until(lambda: process.poll() is not None, "it has ended")
    assert process.returncode == 0

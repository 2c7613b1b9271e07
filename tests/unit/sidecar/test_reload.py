"""Settings that change while the sidecar runs."""

from __future__ import annotations

import signal

import pytest
from kvferry_connector.wire.attach import Group, Placement
from kvferry_sidecar import config
from kvferry_sidecar.reload import DEGRADED, Drift, Reloader, file_check_s
from support.http import Http
from support.pipeline_bed import NullLog
from support.raw_half import KvMemory, RawHalf, engine_registration
from support.sidecar import running_sidecar
from support.waiting import wait_until


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kvferry.toml"
    path.write_text("[limits]\njobs_max = 5\n")
    return path


class Bench:
    def __init__(self, file):
        self.file, self.applied, self.degraded, self.log = file, [], {}, NullLog()
        self.reloader = Reloader(
            self.read(), self.read, self.applied.append, self.degraded, self.log
        )

    def read(self):
        return config.load(self.file, environment={})


def test_a_change_of_the_file_is_noticed_and_hot_settings_count(file):
    bench = Bench(file)
    assert bench.reloader.tick(0.0) == file_check_s
    assert bench.applied == []
    file.write_text("[limits]\njobs_max = 50\nranks_max = 2\n[log]\nlevel = 'debug'\n")
    assert bench.reloader.tick(file_check_s - 0.5) == 0.5
    assert bench.applied == []
    bench.reloader.tick(file_check_s)
    (applied,) = bench.applied
    assert (applied.limits.jobs_max, applied.log.level) == (50, "debug")
    assert applied.limits.ranks_max == config.load(environment={}).config.limits.ranks_max
    assert bench.reloader.loaded.origins["limits.jobs_max"] == f"file {file}"
    assert bench.reloader.loaded.origins["limits.ranks_max"] == "default"
    file.write_text("[limits]\njobs_max = 51\n")
    bench.reloader.reload()  # as by a signal
    bench.reloader.tick(2 * file_check_s)
    assert len(bench.applied) == 2, "one change is read once"


def test_what_is_not_as_on_disk_is_told(file):
    bench = Bench(file)
    assert bench.reloader.drift() == Drift(str(file))
    file.write_text("[limits]\njobs_max = 50\nranks_max = 2\n")
    waiting = {one.key: (one.on_disk, one.needs_restart) for one in bench.reloader.drift().settings}
    assert waiting == {"limits.jobs_max": ("50", False), "limits.ranks_max": ("2", True)}
    bench.reloader.reload()
    (left,) = bench.reloader.drift().settings
    default = str(config.load(environment={}).config.limits.ranks_max)
    assert (left.key, left.running, left.origin) == ("limits.ranks_max", default, f"file {file}")
    file.write_text("[limits]\njobs_max = 'lots'\n")
    assert "jobs_max" in bench.reloader.drift().error
    assert bench.degraded == {}, "a question changes nothing"


def test_a_bad_file_keeps_the_last_good_one_and_says_so(file):
    bench = Bench(file)
    file.write_text("[limits]\njobs_max = 'lots'\n")
    told = bench.reloader.reload()
    assert "jobs_max" in told["error"]
    assert told["remedy"]
    assert bench.applied == []
    assert bench.reloader.loaded.config.limits.jobs_max == 5
    assert "jobs_max" in bench.degraded[DEGRADED]
    assert len(bench.log.errors) == 1
    file.write_text("[limits]\njobs_max = 6\n")
    assert bench.reloader.reload() == {"changed": ["limits.jobs_max"], "needs_restart": []}
    assert bench.degraded == {}


def test_a_dry_run_changes_nothing(file):
    bench = Bench(file)
    file.write_text("[limits]\njobs_max = 7\n[tiers.host]\nbytes = '1GiB'\n")
    told = bench.reloader.reload(dry_run=True)
    assert told["changed"] == ["limits.jobs_max"]
    assert "tiers.host.bytes" in told["needs_restart"]
    assert bench.applied == []


def test_hot_keys_exist_and_are_documented():
    assert set(config.KNOWN) >= config.HOT


def test_sighup_reloads_and_the_sidecar_goes_on(file):
    with running_sidecar(pool_bytes=8 << 20, flags=["--config", str(file)]) as sidecar:
        local = Http(sidecar.run_dir / "http.sock")
        file.write_text("[limits]\njobs_max = 77\nkeys_max = 1\n")
        sidecar.process.process.send_signal(signal.SIGHUP)
        kept = 'kvferry_degraded{what="configuration"} 1.0'
        wait_until(lambda: kept in local.get("/metrics").text, "the mistake is told")
        assert sidecar.status()["config"]["limits"]["jobs_max"] == 5
        drift = local.get("/api/v1/config/drift").json()
        assert (drift["file"], drift["settings"]) == (str(file), [])
        assert "keys_max" in drift["error"]
        file.write_text("[limits]\njobs_max = 77\nranks_max = 2\n[loads]\nbreaker = false\n")
        sidecar.process.process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: sidecar.status()["config"]["limits"]["jobs_max"] == 77, "the limit is read"
        )
        assert kept not in local.get("/metrics").text
        (left,) = local.get("/api/v1/config/drift").json()["settings"]
        assert (left["key"], left["on_disk"]) == ("limits.ranks_max", "2")
        assert left["needs_restart"] is True


def save_rules(sidecar, name):
    """What a new engine with full attention and sliding windows is told to save of each."""
    memory = KvMemory()
    stride = memory.blocks * memory.page_bytes
    groups = [
        Group(0, "full", 16, {"class": "full"}, ["a"]),
        Group(1, "swa", 16, {"class": "swa"}, ["b"], window_tokens=40),
    ]
    places = [
        Placement(one.group, one.layers, 0, 0, stride, memory.page_bytes, memory.page_bytes)
        for one in groups
    ]
    scheduler = RawHalf(sidecar.run_dir, engine_id=name)
    worker = RawHalf(sidecar.run_dir, 0, engine_id=name, memory=memory)
    for half in (scheduler, worker):
        half.attach()
    scheduler.register(engine_registration([0], name.encode() * 16, retention_tokens=0))
    told = worker.register(memory.registration(0, 1, groups=groups, placements=places))
    for half in (worker, scheduler):
        half.leave()
    memory.close()
    return told.save_rules


def test_another_retention_counts_for_the_engines_that_register_from_then_on(file):
    with running_sidecar(pool_bytes=8 << 20, flags=["--config", str(file)]) as sidecar:
        assert save_rules(sidecar, "a") == ["all", "tail:3"]
        for name, kept, rule in (("b", "dense", "held"), ("c", "engine", "tail:3")):
            file.write_text(f'retention = "{kept}"\n')
            sidecar.process.process.send_signal(signal.SIGHUP)
            wait_until(
                lambda kept=kept: sidecar.status()["config"]["retention"] == kept, "it is read"
            )
            assert save_rules(sidecar, name) == ["all", rule]

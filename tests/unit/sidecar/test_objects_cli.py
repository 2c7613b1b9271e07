"""`kvferry objects` against a real sidecar: counted, listed, pinned over a restart, dropped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from kvferry_sidecar.cli import main
from kvferry_sidecar.cli import objects as cli
from kvferry_sidecar.cli.objects import read_list
from kvferry_sidecar.errors import RequestError
from support.client_half import client_engine
from support.http import Http
from support.sidecar import running_sidecar, set_flags
from support.waiting import wait_until


@pytest.fixture
def told(capsys):
    """Run `kvferry objects`; return (exit code, output)."""

    def run(sidecar, *arguments):
        capsys.readouterr()
        code = main(["objects", *arguments, "--run-dir", str(sidecar.run_dir)])
        found = capsys.readouterr()
        return code, found.out + found.err

    return run


def test_objects_are_listed_pinned_over_a_restart_and_dropped(told, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "_page_objects", 2)
    flags = [*set_flags({"limits.scan_places_max": 2}), "--keys-max", "64"]  # several pages
    with (
        running_sidecar(pool_bytes=8 << 20, flags=flags) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        assert told(sidecar, "count") == (0, "the pool has no objects\n")
        engine.put("kept")
        _, listed = told(sidecar, "list")
        lines = listed.splitlines()
        assert len(lines) == 3
        namespace, group, key, _age, _bytes, pin = lines[0].split()
        assert (len(namespace), group, len(key), pin) == (32, "0", 32, "none")
        counted = json.loads(told(sidecar, "count", "--json")[1])
        assert counted["namespaces"][0]["namespace"] == namespace
        assert counted["namespaces"][0]["objects"] == 3
        some = tmp_path / "some"
        some.write_text("\n".join(lines[1:]) + "\n# a remark\n")
        assert "2 objects" in told(sidecar, "pin", "--keys-file", str(some), "--dry-run")[1]
        assert told(sidecar, "pin", "--keys-file", str(some))[0] == 0
        epoch = engine.wait_ready()
        sidecar.restart()
        engine.wait_ready(beyond_epoch=epoch)
        rows = [json.loads(line) for line in told(sidecar, "list", "--json")[1].splitlines()]
        assert sorted(row["pin"] for row in rows) == ["hard", "hard", "none"]
        assert {row["namespace"] for row in rows} == {namespace}
        assert main(["act", "clear-pool", "--run-dir", str(sidecar.run_dir)]) == 0
        assert engine.get("kept") in (0, 16, 32), "what is left of a prefix is a hit"
        assert len(told(sidecar, "list")[1].splitlines()) == 2
        assert "2 objects" in told(sidecar, "pin", "--soft")[1], "a hard pin made a soft one"
        rows = [json.loads(line) for line in told(sidecar, "list", "--json")[1].splitlines()]
        assert [row["pin"] for row in rows] == ["soft", "soft"]
        assert "2 objects" in told(sidecar, "unpin", "--pinned", "soft")[1]
        assert "0 objects" in told(sidecar, "drop", "--older", "1h")[1]
        done = json.loads(told(sidecar, "drop", "--namespace", namespace[:6], "--json")[1])
        assert (done["objects"], done["dry_run"]) == (2, False)
        assert engine.get("kept") == 0
        engine.put("cold")
        lines = told(sidecar, "list")[1].splitlines()
        some.write_text(lines[0])
        told(sidecar, "pin", "--keys-file", str(some))
        assert "would go" in told(sidecar, "evict", "--to-percent", "0", "--dry-run")[1]
        assert len(told(sidecar, "list")[1].splitlines()) == len(lines) == 3
        assert told(sidecar, "evict", "--to-percent", "100") == (0, "0 B: going\n")
        assert told(sidecar, "evict", "--to-percent", "0")[0] == 0
        kept = lines[0].split()[2]
        wait_until(
            lambda: told(sidecar, "list")[1].split()[2::6] == [kept], "the pinned one is left"
        )
        assert told(sidecar, "evict", "--to-percent", "101")[0] == 2
        assert told(sidecar, "list", "--tenant", "nobody")[0] == 1
        (tmp_path / "bad").write_text("no list at all\n")
        code, text = told(sidecar, "pin", "--keys-file", str(tmp_path / "bad"))
        assert (code, "line 1 is no object" in text) == (1, True)
        local = Http(sidecar.run_dir / "http.sock")
        assert local.get("/api/v1/objects?namespace=xyz").status == 400
        assert local.get("/api/v1/objects?older_s=-1").status == 400


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b"\0" * 99,
        b"a" * 5000,
        b'{"a":' * 3000,
        b"ab 9 ",
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path, text):
    file = tmp_path / "list"
    file.write_bytes(b"ab 0 cd 1 1 none\n" + text)
    with pytest.raises(RequestError, match="line 2") as refused:
        list(read_list(file))
    assert "kvferry objects list" in refused.value.remedy


@pytest.mark.parametrize("what", ["/", "/proc/self/mem"])
def test_a_list_that_cannot_be_read_is_refused(what):
    with pytest.raises(RequestError, match="cannot be read"):
        list(read_list(Path(what)))


def test_a_tenant_means_all_its_namespaces(monkeypatch, tmp_path):
    known = [{"namespace": name, "tenant": tenant} for name, tenant in ("a1", "b2", "c1")]
    monkeypatch.setattr(cli.Api, "get", lambda _self, _path: known)
    nothing = dict.fromkeys(("namespace", "older", "younger", "pinned", "keys_file"))
    given = {**nothing, "tenant": "1", "file": None, "assignments": (), "run_dir": str(tmp_path)}
    _, fits = cli._selected(given)
    assert [one["namespace"] for one in fits] == ["a", "c"]


def test_rules_change_by_sighup(tmp_path):
    file = tmp_path / "kvferry.toml"
    file.write_text("")
    with (
        running_sidecar(pool_bytes=8 << 20, flags=["--config", str(file)]) as sidecar,
        client_engine(sidecar.run_dir, page_bytes=16 << 10) as engine,
    ):
        local = Http(sidecar.run_dir / "http.sock")
        engine.put("first")
        (before,) = local.get("/api/v1/namespaces").json()
        assert (before["objects"], before["quota_bytes"]) == (3, 0)
        quota = before["total_bytes"] * 4 // 3
        file.write_text(f"[namespaces]\nrules = 'any bytes={quota}'\n")
        sidecar.process.process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: local.get("/api/v1/namespaces").json()[0]["quota_bytes"] == quota,
            "the rule is read",
        )
        engine.put("second")
        (after,) = local.get("/api/v1/namespaces").json()
        assert after["objects"] == 4
        assert engine.get("second") == 48
        assert sidecar.status()["pool"]["quota_evictions"] == 2

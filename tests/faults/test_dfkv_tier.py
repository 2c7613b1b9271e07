"""dfkv beside real sidecars, by its stand-in: what the real one does wrong costs a miss."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.books import wait_settled
from support.client_half import client_engine
from support.dfkv_ring import DfkvRing
from support.sidecar import SidecarUnderTest, set_flags
from support.slow_tiers import (
    is_on,
    refusal_of,
    settings_of,
    sidecar_over,
    tier,
    wait_stored,
)
from support.waiting import wait_until


@pytest.fixture
def ring(tmp_path: Path) -> DfkvRing:
    return DfkvRing(tmp_path)


def over(ring: DfkvRing, **changes: object) -> AbstractContextManager[SidecarUnderTest]:
    return sidecar_over(ring.url, tiers__remote__library=ring.library, **changes)


def test_two_sidecars_share_and_a_bad_value_is_repaired(ring: DfkvRing) -> None:
    with (
        over(ring) as first,
        over(ring) as second,
        client_engine(first.run_dir, engine_id="a") as writer,
        client_engine(second.run_dir, engine_id="b") as reader,
    ):
        writer.put("shared")
        writer.put("bad")
        wait_stored(first, 6)
        assert reader.get("shared") == 48
        lost = reader.content("bad", 1)
        (path,) = [one for one in ring.store.iterdir() if lost in one.read_bytes()]
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert reader.get("bad") == 16, "the chunk before it is good"
        assert not path.exists(), "written once, it must be removed before it can be right again"
        reader.put("bad")
        wait_until(lambda: path.exists() and lost in path.read_bytes(), "it is written anew")
        assert tier(second)["facts"]["transport"] == "tcp"
        for sidecar in (first, second):
            wait_settled(sidecar.run_dir)


def test_servers_that_fail_come_back_with_a_fresh_handle(ring: DfkvRing) -> None:
    with over(ring) as sidecar, client_engine(sidecar.run_dir) as engine:
        engine.put("before")
        wait_stored(sidecar, 3)
        ring.say("down")
        assert engine.lease("elsewhere", 3)[1].hit_tokens == 0
        wait_until(lambda: not is_on(sidecar), "it is noticed")
        assert "no server" in tier(sidecar)["reason"]
        assert engine.get("before") == 48, "the pool serves"
        ring.unsay("down")
        wait_until(lambda: is_on(sidecar), "it is used again")
        assert tier(sidecar)["facts"]["handles_opened"] > 1
        engine.put("after")
        wait_stored(sidecar, 6)


def test_a_call_that_hangs_keeps_its_slots_and_ends_nothing(ring: DfkvRing) -> None:
    changes = {"limits__stage_ms_max": 200, "limits__store_ms_max": 3000}
    with over(ring, **changes) as sidecar, client_engine(sidecar.run_dir) as engine:
        engine.put("known")
        wait_stored(sidecar, 3)
        ring.say("hung")
        assert engine.lease("elsewhere", 3)[1].hit_tokens == 0
        for number in range(6):
            engine.put(f"meanwhile {number}")
            assert engine.get(f"meanwhile {number}") == 48
        off = wait_until(lambda: _late(sidecar), "calls are abandoned")
        assert off["state"] != "on"
        ring.unsay("hung")
        wait_until(lambda: is_on(sidecar), "it is used again when they have returned")
        assert tier(sidecar)["calls_late"] == 0
        wait_settled(sidecar.run_dir)


def test_sigterm_during_a_hung_call_ends_in_time(ring: DfkvRing) -> None:
    with (
        over(ring, limits__drain_ms_max=1000) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        epoch = engine.wait_ready()
        ring.say("hung")
        engine.put("kept in the pool")
        sidecar.process.process.terminate()
        assert sidecar.process.process.wait(60) == 0
        assert "hangs" in sidecar.process.tail()
        ring.unsay("hung")
        sidecar.restart()
        engine.wait_ready(beyond_epoch=epoch)
        assert engine.get("kept in the pool") == 48


def test_the_transport_that_was_asked_for_or_none(ring: DfkvRing) -> None:
    with over(ring, tiers__remote__protocol="rdma") as sidecar:
        with client_engine(sidecar.run_dir) as engine:
            engine.put("served")
            wait_until(lambda: tier(sidecar)["state"] == "off", "it is off")
            assert engine.get("served") == 48
        assert "uses 'tcp'" in tier(sidecar)["reason"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tiers.remote.library": "/nowhere/libdfkv.so"}, "cannot be loaded"),
        ({"tiers.remote.library": "libm.so.6"}, "no libdfkv of version 2"),
        ({"tiers.remote.url": "dfkv://one=cache.example:1"}, "no member of a ring"),
        ({"old": ""}, "libdfkv 1.39.0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(ring, changes, text, capsys) -> None:
    if "old" in changes:
        ring.say("old")
        changes = {}
    settings = settings_of(ring.url, {"tiers.remote.library": ring.library, **changes})
    assert text in refusal_of(set_flags(settings), capsys)


def _late(sidecar: SidecarUnderTest) -> dict[str, Any] | None:
    found = tier(sidecar)
    return found if found["calls_late"] else None

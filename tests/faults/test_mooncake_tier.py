"""Mooncake beside real sidecars: two nodes, an owner that dies, a master that hangs or is away."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from kvferry_connector.wire.hot import Release
from kvferry_sidecar.cli.api import Api
from support.books import wait_settled
from support.client_half import ClientEngine, client_engine
from support.elsewhere import started
from support.mooncake_master import MooncakeMaster
from support.net import two_nodes
from support.server import serving
from support.sidecar import SidecarUnderTest, set_flags
from support.slow_tiers import (
    check_hung,
    is_on,
    refusal_of,
    settings_of,
    tier,
    wait_stored,
)
from support.waiting import wait_until


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with serving(MooncakeMaster(tmp_path)) as found:
        yield found


def shares(writer: ClientEngine, reader: ClientEngine, first: SidecarUnderTest) -> None:
    """One engine saves, another one on another node loads: every byte is compared."""
    before = tier(first)["counts"].get("put_objects", 0)
    prompts = [f"shared {before} {number}" for number in range(6)]
    for prompt in prompts:
        writer.put(prompt)
    wait_stored(first, before + 18)
    admission, answer = reader.lease(prompts[0], 3)
    assert answer.sources == {"external": 48}
    reader.scheduler.send(Release([admission]))
    assert [reader.get(prompt) for prompt in prompts[1:]] == [48] * 5


def test_two_nodes_share_one_master(tmp_path: Path) -> None:
    with (
        two_nodes() as (here, there),
        serving(MooncakeMaster(tmp_path, here.address, here.prefix)) as master,
        started(master.url, prefix=here.prefix, tiers__remote__segment_bytes="64MiB") as first,
        started(master.url, prefix=there.prefix) as second,
        client_engine(first.run_dir, engine_id="a") as writer,
        client_engine(second.run_dir, engine_id="b") as reader,
    ):
        for sidecar in (first, second):
            wait_until(lambda one=sidecar: is_on(one), "the store is there")
        shares(writer, reader, first)
        hosts = [tier(sidecar)["facts"]["host"] for sidecar in (first, second)]
        assert hosts == [here.address, there.address]
        assert tier(second)["facts"]["transport"] == "tcp"
        for sidecar in (first, second):
            wait_settled(sidecar.run_dir)


def test_an_owner_that_dies_is_a_miss(master: MooncakeMaster) -> None:
    with started(master.url) as second, client_engine(second.run_dir, engine_id="b") as reader:
        with (
            started(master.url, tiers__remote__segment_bytes="64MiB") as first,
            client_engine(first.run_dir, engine_id="a") as writer,
        ):
            shares(writer, reader, first)
            writer.put("lost")
            wait_stored(first, 21)
            first.kill()
        assert reader.lease("lost", 3)[1].hit_tokens == 0
        assert is_on(second)
        reader.put("goes on")
        assert reader.get("goes on") == 48
        wait_settled(second.run_dir)


def test_a_master_that_hangs_or_dies_costs_a_miss(master: MooncakeMaster) -> None:
    changes = {"limits__stage_ms_max": 200, "limits__store_ms_max": 3000}
    with (
        started(master.url, tiers__remote__segment_bytes="64MiB", **changes) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        noticed = check_hung(sidecar, engine, lambda: master.signal(signal.SIGSTOP))
        assert noticed["calls_late"] > 0
        master.kill()
        master.start()
        wait_until(lambda: is_on(sidecar), "it is used again")
        # The new master knows nothing of what was stored, and of this node's segment only later.
        Api(sidecar.run_dir).act("clear-pool")
        assert engine.lease("before", 3)[1].hit_tokens == 0
        numbers = count()
        wait_until(lambda: stores(sidecar, engine, f"again {next(numbers)}"), "it stores again")
        Api(sidecar.run_dir).act("clear-pool")
        prompt = f"again {next(numbers) - 1}"
        assert engine.lease(prompt, 3)[1].sources == {"external": 48}
        wait_settled(sidecar.run_dir)


def stores(sidecar: SidecarUnderTest, engine: ClientEngine, prompt: str) -> bool:
    """Save a prompt; say whether the store took all of it."""
    before = Counter(tier(sidecar)["counts"])
    engine.put(prompt)

    def told() -> Counter[str]:
        return Counter(tier(sidecar)["counts"]) - before

    ended = ("put_objects", "put_failed")
    wait_until(lambda: sum(told()[name] for name in ended) >= 3, "its puts have returned")
    return told()["put_objects"] == 3


def test_a_master_that_is_away_at_the_start(master: MooncakeMaster) -> None:
    master.kill()
    with started(master.url) as sidecar, client_engine(sidecar.run_dir) as engine:
        engine.put("served")
        assert engine.get("served") == 48
        assert tier(sidecar)["facts"]["transport"] == "not connected"
        master.start()
        wait_until(lambda: is_on(sidecar), "it is found")
        assert tier(sidecar)["facts"]["transport"] == "tcp"


def test_sigterm_while_the_master_hangs_ends_in_time(master: MooncakeMaster) -> None:
    changes = {"limits__drain_ms_max": 1000, "limits__stage_ms_max": 200}
    with (
        started(master.url, tiers__remote__segment_bytes="64MiB", **changes) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        master.signal(signal.SIGSTOP)
        engine.put("unwritten")
        sidecar.process.process.terminate()
        assert sidecar.process.process.wait(60) == 0
        assert "hangs" in sidecar.process.tail()


def test_a_device_that_is_not_there_is_refused(capsys) -> None:
    settings = {"tiers.remote.protocol": "rdma", "tiers.remote.device": "mlx5_77"}
    flags = set_flags(settings_of("mooncake://127.0.0.1:1", settings))
    assert "'mlx5_77' is not there" in refusal_of(flags, capsys)

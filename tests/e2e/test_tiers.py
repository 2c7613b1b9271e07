"""Real engines over slower tiers: what one saved, another loads after the pool is gone."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvferry_demo.processes import unlink_pool
from support.engine import BLOCK_TOKENS, EngineUnderTest, Texts, hit_of
from support.redis_server import RedisServer
from support.server import serving
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags
from support.waiting import wait_until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RedisServer]:
    with serving(RedisServer(folder)) as found:
        yield found


@pytest.fixture(scope="module")
def sidecar(folder: Path, server: RedisServer) -> Iterator[SidecarUnderTest]:
    settings = {
        "tiers.disk.paths": folder,
        "tiers.disk.bytes": "64MiB",
        "tiers.disk.free_bytes_min": 0,
        "tiers.remote.url": server.url,
        "limits.stage_ms_max": 20_000,  # the machine of a test may be slow
        "limits.store_ms_max": 20_000,
    }
    with running_sidecar(flags=set_flags(settings)) as found:
        yield found


def tier_counts(sidecar: SidecarUnderTest) -> dict[str, Counter[str]]:
    tiers = sidecar.status()["pipeline"]["tiers"]
    return {tier["source"]: Counter(tier["counts"]) for tier in tiers}


def lose_the_pool(sidecar: SidecarUnderTest, *engines: EngineUnderTest) -> None:
    sidecar.kill()
    unlink_pool(sidecar.pool_name)
    sidecar.restart()
    for engine in engines:
        engine.wait_attached()


@pytest.mark.parametrize("source", ["disk", "external"])
def test_a_new_engine_loads_what_only_a_slower_tier_has(
    source: str,
    sidecar: SidecarUnderTest,
    writer: EngineUnderTest,
    reader: EngineUnderTest,
    texts: Texts,
    folder: Path,
) -> None:
    tokens = texts.take(2000)
    cold = writer.run(tokens)
    assert cold.hit_tokens == 0
    writer.settle()
    sidecar.wait_idle()
    objects = len(tokens) // BLOCK_TOKENS
    for name in ("disk", "external"):
        wait_until(
            lambda name=name: tier_counts(sidecar)[name]["put_objects"] >= objects, "it is written"
        )
    if source == "external":
        sidecar.kill()
        shutil.rmtree(folder / "kvferry")
        sidecar.restart()
    lose_the_pool(sidecar, writer, reader)
    warm = reader.run(tokens)
    assert warm.hit_tokens == hit_of(tokens)
    assert warm.output == cold.output
    assert sidecar.wait_idle()["pipeline"]["journal"]["hit_tokens"] == {source: hit_of(tokens)}
    assert tier_counts(sidecar)[source]["get_objects"] > 0
    reader.settle()

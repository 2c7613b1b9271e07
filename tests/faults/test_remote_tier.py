"""A remote store beside real sidecars: shared by two of them, away, hung, full, and back again."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from kvferry_connector.wire.hot import Release
from support.books import wait_settled
from support.client_half import client_engine
from support.http import Http
from support.redis_server import RedisServer
from support.server import serving
from support.sidecar import set_flags
from support.slow_tiers import check_hung, is_on, refusal_of, sidecar_over, tier, wait_stored
from support.waiting import wait_until

CALL_MS = 3000  # what shall be stored is stored within it on a busy machine too


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with serving(RedisServer(tmp_path)) as found:
        yield found


def test_one_node_saves_and_another_loads(server: RedisServer) -> None:
    with (
        sidecar_over(server.url) as first,
        sidecar_over(server.url) as second,
        client_engine(first.run_dir, engine_id="a") as writer,
        client_engine(second.run_dir, engine_id="b") as reader,
    ):
        prompts = [f"shared {number}" for number in range(6)]
        for prompt in prompts:
            writer.put(prompt)
        wait_stored(first, 18)
        admission, answer = reader.lease(prompts[0], 3)
        assert (answer.hit_tokens, answer.sources) == (48, {"external": 48})
        assert reader.ended(reader.submit(reader.load_job(admission, (7, 8, 9)))).status == "done"
        assert reader.holds(prompts[0], (7, 8, 9))
        assert [reader.get(prompt) for prompt in prompts[1:]] == [48] * 5
        assert tier(second)["facts"]["transport"] == "tcp"
        metrics = Http(second.run_dir / "http.sock").get("/metrics").body.decode()
        assert re.search(r'^kvferry_tier_transport\{.*transport="tcp"\} 1', metrics, re.MULTILINE)
        for sidecar in (first, second):
            wait_settled(sidecar.run_dir)


def test_a_hung_store_costs_a_miss_and_comes_back(server: RedisServer) -> None:
    with (
        sidecar_over(server.url, limits__store_ms_max=CALL_MS, limits__stage_ms_max=200) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        reason = check_hung(sidecar, engine, lambda: server.signal(signal.SIGSTOP))["reason"]
        assert "imeout" in reason or "did not return" in reason
        server.signal(signal.SIGCONT)
        wait_until(lambda: is_on(sidecar), "it is used again")
        wait_stored(sidecar, 6)
        wait_settled(sidecar.run_dir)


def test_an_object_that_fails_after_the_lookup_shortens_what_is_offered(
    server: RedisServer,
) -> None:
    """A remote error is never a failed load: blocks are offered only for what has come."""
    with (
        sidecar_over(server.url) as first,
        sidecar_over(server.url) as second,
        client_engine(first.run_dir, engine_id="a") as writer,
        client_engine(second.run_dir, engine_id="b") as reader,
        redis.Redis(port=server.port, protocol=2) as client,
    ):
        known: set[bytes] = set()
        for number, spoil in enumerate((client.delete, lambda key: client.set(key, b"junk"))):
            prompt = f"lost {number}"
            writer.put(prompt)
            wait_stored(first, 3 * (number + 1))
            admission = reader.next_admission()
            reader.probe(admission, prompt, 3)
            assert reader.hint(admission, 3).hit_tokens == 48, "the lookup found all of it"
            keys = {key: client.get(key) for key in set(client.keys()) - known}
            known.update(keys)
            (middle,) = (key for key, value in keys.items() if writer.content(prompt, 1) in value)
            spoil(middle)
            seq = reader.ask(admission, 48)
            assert reader.answer(seq).hit_tokens == 16, "the chunk before the lost one"
            load = reader.submit(reader.load_job(admission, (7,)))
            assert reader.ended(load).status == "done"
            assert reader.holds(prompt, (7,))
            reader.scheduler.send(Release([admission]))
        books = wait_settled(second.run_dir)["pipeline"]["ledger"]
        assert (books["failed"], books["done"]) == (0, 2)


def test_a_store_that_dies_after_the_lookup_costs_a_miss_not_a_failed_load(
    server: RedisServer,
) -> None:
    with (
        sidecar_over(server.url) as first,
        sidecar_over(server.url) as second,
        client_engine(first.run_dir, engine_id="a") as writer,
        client_engine(second.run_dir, engine_id="b") as reader,
    ):
        writer.put("prompt")
        wait_stored(first, 3)
        waiting = [reader.next_admission() for _ in range(2)]
        for admission in waiting:
            reader.probe(admission, "prompt", 3)
            assert reader.hint(admission, 3).hit_tokens == 48
        server.kill()
        for admission in waiting:
            assert reader.answer(reader.ask(admission, 48)).hit_tokens == 0
            reader.scheduler.send(Release([admission]))
        wait_until(lambda: not is_on(second), "it is noticed")
        reader.put("prompt")
        assert reader.get("prompt") == 48, "computed, saved and hit without the store"
        assert wait_settled(second.run_dir)["pipeline"]["ledger"]["failed"] == 0


def test_a_store_that_dies_and_comes_back_empty(server: RedisServer) -> None:
    with sidecar_over(server.url) as sidecar, client_engine(sidecar.run_dir) as engine:
        server.kill()
        engine.put("while it was away")
        wait_until(lambda: not is_on(sidecar), "it is noticed")
        assert engine.get("while it was away") == 48
        assert engine.lease("elsewhere", 3)[1].hit_tokens == 0
        server.start()
        wait_until(lambda: is_on(sidecar), "it is used again")
        engine.put("later")
        wait_stored(sidecar, 3)


def test_a_store_that_is_away_at_the_start(server: RedisServer) -> None:
    server.kill()
    with sidecar_over(server.url) as sidecar, client_engine(sidecar.run_dir) as engine:
        engine.put("served")
        assert engine.get("served") == 48
        server.start()
        wait_until(lambda: is_on(sidecar), "it is found")


def test_sigterm_while_the_store_hangs_ends_in_time(server: RedisServer) -> None:
    with (
        sidecar_over(server.url, limits__drain_ms_max=1000) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        epoch = engine.wait_ready()
        server.signal(signal.SIGSTOP)
        engine.put("unwritten")
        sidecar.process.process.terminate()
        assert sidecar.process.process.wait(60) == 0
        server.signal(signal.SIGCONT)
        sidecar.restart()
        engine.wait_ready(beyond_epoch=epoch)
        assert engine.get("unwritten") == 48


def test_sizes_and_times_are_bounded(server: RedisServer) -> None:
    with (
        sidecar_over(server.url, tiers__remote__value_bytes_max=4096) as sidecar,
        client_engine(sidecar.run_dir, page_bytes=8192) as engine,
    ):
        engine.put("too large")
        wait_until(lambda: tier(sidecar)["counts"].get("put_too_large") == 3, "it is counted")
    with (
        sidecar_over(server.url, tiers__remote__ttl_s=3600) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        engine.put("kept for an hour")
        wait_stored(sidecar, 3)
        with redis.Redis(port=server.port, protocol=2) as client:
            ttls = [client.ttl(key) for key in client.scan_iter()]
        assert len(ttls) == 3
        assert all(3500 < ttl <= 3600 for ttl in ttls)


def test_a_full_store_refuses_puts_and_nothing_else(tmp_path: Path) -> None:
    limit = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    with (
        serving(RedisServer(tmp_path, *limit)) as server,
        sidecar_over(server.url) as sidecar,
        client_engine(sidecar.run_dir, page_bytes=256 << 10) as engine,
    ):
        for number in range(4):
            engine.put(f"large {number}")
        wait_until(lambda: tier(sidecar)["counts"].get("put_failed", 0) > 0, "puts are refused")
        assert is_on(sidecar)
        assert engine.get("large 3") == 48


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("memcached://127.0.0.1", "names no store that is known"),
        ("redis://:secret@127.0.0.1", "password_file"),
        ("redis://127.0.0.1/one", "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_by_name(url, text, capsys) -> None:
    told = refusal_of(set_flags({"tiers.remote.url": url}), capsys)
    assert text in told
    assert "secret" not in told

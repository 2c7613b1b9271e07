"""The Redis store against a real server that refuses, forgets, answers wrongly and hangs up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from kvferry_sidecar.tiers.remote import open_remote
from kvferry_sidecar.tiers.remote.redis_store import PREFIX
from kvferry_sidecar.tiers.store import Item, Store, StoreError
from kvferry_sidecar.tiers.store import Memory as Pool
from support.redis_server import RedisServer
from support.server import serving
from support.store_rigs import Memory, get, put, remote_config, verify_memory


@pytest.fixture
def memory() -> Iterator[Memory]:
    found = Memory()
    yield found
    found.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    socket = ("--unixsocket", str(tmp_path / "redis.sock"))
    with serving(RedisServer(tmp_path, *socket)) as found:
        yield found


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, protocol=2) as found:
        yield found


def opened(url: str, memory: Memory, **changes: object) -> Store:
    return open_remote(remote_config(url, **changes), 5.0, Pool(memory.address, memory.total_bytes))


def filled(memory: Memory, count: int, *shards: int) -> list[Item]:
    return [memory.item(number, *(shards or (4096,)), content=b"x") for number in range(count)]


def blank(memory: Memory, items: list[Item]) -> list[Item]:
    return [memory.item(item.key[0], *item.form.shard_bytes) for item in items]


@pytest.mark.parametrize("ttl_s", [0, 3600])
def test_a_unix_socket_and_a_time_to_live(server, client, memory, tmp_path, ttl_s) -> None:
    store = opened(f"redis+unix://{tmp_path}/redis.sock", memory, ttl_s=ttl_s)
    items = [memory.item(n, *shards, content=b"x") for n, shards in enumerate([(1,), (9, 70_000)])]
    assert put(store, items) == [True, True]
    wanted = blank(memory, items)
    assert get(store, wanted) == [True, True]
    assert all(verify_memory(item) for item in wanted)
    assert store.facts()["transport"] == "unix"
    lives = [client.ttl(PREFIX + item.key) for item in items]
    assert lives == [-1, -1] if not ttl_s else all(3500 < left <= ttl_s for left in lives)
    store.close()


def test_refused_puts_stand_beside_good_ones(client, server, memory) -> None:
    """A server without memory refuses each SET by itself; answers stay with their objects."""
    store = opened(server.url, memory)
    items = filled(memory, 8, 64 << 10)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", client.info()["used_memory"] + 4 * (64 << 10))
    stored = put(store, items)
    assert stored[0]
    assert not stored[-1]
    assert store.facts()["puts_refused"] == stored.count(False)
    assert get(store, blank(memory, items)) == stored
    client.config_set("maxmemory", 0)
    assert put(store, items) == [True] * 8
    assert get(store, blank(memory, items)) == [True] * 8
    store.close()


def test_values_that_are_none_of_ours_are_misses(client, server, memory) -> None:
    store = opened(server.url, memory)
    items = filled(memory, 7)
    assert all(put(store, items))
    names = [PREFIX + item.key for item in items]
    good = client.get(names[0])
    client.set(names[1], b"")
    client.set(names[2], good[:-1])
    client.set(names[3], good + b"more")
    client.set(names[4], good)  # another key's
    client.delete(names[5])
    client.rpush(names[5], b"a list")
    assert get(store, blank(memory, items)) == [True, *(False,) * 5, True]
    assert all(put(store, items)), "what is there is replaced, of whatever kind"
    assert get(store, blank(memory, items)) == [True] * 7
    store.close()


def test_a_huge_value_is_not_read(client, server, memory) -> None:
    store = opened(server.url, memory)
    items = filled(memory, 2)
    assert all(put(store, items))
    client.set(PREFIX + items[0].key, bytes(64 << 20))
    before = client.info()["total_net_output_bytes"]
    assert get(store, blank(memory, items)) == [False, True]
    assert client.info()["total_net_output_bytes"] - before < 1 << 20
    store.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400\r\n\r\n", b"$-7\r\n", b"*1\r\n", b""], ids=repr)
def test_who_speaks_another_protocol_is_away(memory, answer) -> None:
    """Whatever comes instead of an answer fails the call with the reason, and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):  # the listener is closed
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        peer.recv(1 << 20)
                        peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        store = opened(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", memory)
        items = filled(memory, 2)
        try:
            for call in (
                lambda: get(store, items),
                lambda: put(store, items),
                lambda: store.exists([item.key for item in items]),
                lambda: store.remove([b"k" * 16]),
            ):
                with pytest.raises(StoreError):
                    call()
        finally:
            store.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_what_the_server_forgot_after_it_was_found(client, server, memory) -> None:
    store = opened(server.url, memory)
    items = filled(memory, 4)
    assert all(put(store, items))
    assert store.exists([item.key for item in items]) == [True] * 4
    client.flushall()
    assert get(store, blank(memory, items)) == [False] * 4
    assert store.exists([item.key for item in items]) == [False] * 4
    store.close()


def test_cut_connections_fail_one_call_at_most(client, server, memory) -> None:
    """A connection that failed is not used again: the next answers are those of the next calls."""
    store = opened(server.url, memory)
    items = filled(memory, 4)
    assert all(put(store, items))
    server.kill()
    for call in (
        lambda: put(store, items),
        lambda: get(store, items),
        lambda: store.exists([b"k"]),
    ):
        with pytest.raises(StoreError, match="ConnectionError"):
            call()
    server.start()
    assert get(store, blank(memory, items)) == [False] * 4
    assert all(put(store, items))
    client.client_kill_filter(_type="normal", skipme=True)
    assert get(store, blank(memory, items)) == [True] * 4, "found closed, and opened anew"
    store.close()


def test_a_put_that_is_cut_off_leaves_no_half_answer(server, memory) -> None:
    """The server ends a client that sends more than it takes; what follows is not mixed up."""
    store = opened(server.url, memory)
    items = filled(memory, 4, 256 << 10)
    with redis.Redis(port=server.port, protocol=2) as client:
        client.config_set("proto-max-bulk-len", "1mb")
        large = [memory.item(50, 2 << 20, content=b"x")]
        with pytest.raises(StoreError):
            put(store, [*items[:2], *large, *items[2:]])
        wanted = blank(memory, items)
        hits = get(store, wanted)
        assert all(verify_memory(item) for item, hit in zip(wanted, hits, strict=True) if hit)
        assert all(put(store, items))
        assert get(store, blank(memory, items)) == [True] * 4
    store.close()

"""The dfkv store over its stand-in: whom it asks for servers, and how large a value may be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kvferry_sidecar.tiers.remote import open_remote
from kvferry_sidecar.tiers.store import Memory as Pool
from kvferry_sidecar.tiers.store import Store, StoreError
from kvferry_sidecar.tiers.value import HEADER_BYTES
from support.dfkv_ring import DfkvRing
from support.store_rigs import Memory, get, put, remote_config, verify_memory

SERVERS = "10.0.0.1:9000,10.0.0.2:9000/group"
LIMIT_BYTES = 64 << 20  # of a server


@pytest.fixture
def ring(tmp_path: Path) -> DfkvRing:
    return DfkvRing(tmp_path)


@pytest.fixture
def memory() -> Iterator[Memory]:
    with closing(Memory(4 * LIMIT_BYTES)) as found:
        yield found


def opened(ring: DfkvRing, url: str, memory: Memory, **changes: int) -> closing[Store]:
    config = remote_config(url, library=ring.library, **changes)
    return closing(open_remote(config, 5.0, Pool(memory.address, memory.total_bytes)))


def test_an_mds_is_asked_for_the_servers(ring: DfkvRing, memory: Memory) -> None:
    (ring.store / "mds").write_text(SERVERS)
    items = [memory.item(number, 4096, content=b"x") for number in range(4)]
    with opened(ring, "dfkv+mds://10.0.0.1:9000/group", memory) as elsewhere:
        assert put(elsewhere, items) == [False] * 4, "a ring without servers"
    with opened(ring, f"dfkv+mds://{SERVERS}", memory) as store:
        assert put(store, items) == [True] * 4
        wanted = [memory.item(number, 4096) for number in range(4)]
        assert get(store, wanted) == [True] * 4
        assert all(verify_memory(item) for item in wanted)


def test_no_value_is_larger_than_a_server_takes(ring: DfkvRing, memory: Memory) -> None:
    """Whatever is configured: one byte more fails the call, and innocent ones after it."""
    with opened(ring, ring.url, memory, value_bytes_max=1 << 30) as store:
        most = store.value_bytes_max
        assert most + HEADER_BYTES == LIMIT_BYTES
        assert put(store, [memory.item(0, most, content=b"x")]) == [True]
        largest = memory.item(0, most)
        assert get(store, [largest]) == [True]
        assert verify_memory(largest)
        with pytest.raises(StoreError):
            put(store, [memory.item(1, most + 1, content=b"x")])

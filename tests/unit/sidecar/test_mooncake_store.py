"""The Mooncake store over a real master: replicas that are missing, leases that run out."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

from kvferry_sidecar.tiers.remote import open_remote
from kvferry_sidecar.tiers.store import Memory as Pool
from kvferry_sidecar.tiers.store import Store
from support.mooncake_master import MooncakeMaster
from support.server import serving
from support.store_rigs import Memory, get, put, remote_config, verify_memory
from support.waiting import wait_until

SEGMENT_BYTES = 32 << 20


def opened(master: MooncakeMaster, memory: Memory, **changes: int) -> closing[Store]:
    config = remote_config(master.url, segment_bytes=SEGMENT_BYTES, **changes)
    return closing(open_remote(config, 5.0, Pool(memory.address, memory.total_bytes)))


def test_objects_with_fewer_replicas_than_asked_for_are_counted(tmp_path: Path) -> None:
    """With one segment the library stores one, and calls it a success."""
    with (
        serving(MooncakeMaster(tmp_path)) as master,
        closing(Memory()) as memory,
        opened(master, memory, replicas=2) as store,
    ):
        items = [memory.item(number, 4096, content=b"x") for number in range(5)]
        assert put(store, items) == [True] * 5
        assert store.facts()["objects_short_of_replicas"] == 5
        numbers = itertools.count(5)

        def whole() -> bool:
            """Store one more; return whether it has both replicas.

            While the machine stands still the master forgets a segment, until it is heard of again.
            """
            before = store.facts()["objects_short_of_replicas"]
            stored = put(store, [memory.item(next(numbers), 4096, content=b"x")])
            return stored == [True] and store.facts()["objects_short_of_replicas"] == before

        with opened(master, memory):  # a second segment
            wait_until(whole, "an object has both replicas", every_s=0.5)


def test_a_read_that_outlasts_its_lease_is_a_miss(tmp_path: Path) -> None:
    """After the lease the room may be another object's; the library looks, and so do checksums."""
    options = ("-default_kv_lease_ttl", "0")
    with (
        serving(MooncakeMaster(tmp_path, options=options)) as master,
        closing(Memory()) as memory,
        opened(master, memory) as store,
    ):
        items = [memory.item(number, 128 << 10, content=b"x") for number in range(16)]
        assert all(put(store, items))
        wanted = [memory.item(number, 128 << 10) for number in range(16)]
        rounds = [get(store, wanted) for _ in range(8)]
        assert any(not all(found) for found in rounds)
        hits = [item for found in rounds for item, hit in zip(wanted, found, strict=True) if hit]
        assert all(verify_memory(item) for item in hits)
        assert all(store.exists([item.key for item in items])), "they are there all the time"

"""The Mooncake store over a real master: whether there are as many replicas as were asked for."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from kvferry_sidecar.tiers.remote import open_remote
from kvferry_sidecar.tiers.store import Memory as Pool
from kvferry_sidecar.tiers.store import Store
from support.mooncake_master import MooncakeMaster
from support.server import serving
from support.store_rigs import Memory, put, remote_config

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
        items = [memory.item(number, 4096, content=b"x") for number in range(8)]
        assert put(store, items[:5]) == [True] * 5
        assert store.facts()["objects_short_of_replicas"] == 5
        with opened(master, memory):  # a second segment
            assert put(store, items[5:]) == [True] * 3
            assert store.facts()["objects_short_of_replicas"] == 5

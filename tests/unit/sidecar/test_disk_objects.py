"""What lies on disks: named page by page, listed and dropped by namespace and age."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from kvferry_sidecar.cli import main
from kvferry_sidecar.errors import RequestError
from kvferry_sidecar.stages.objects import Filter, disk_page
from kvferry_sidecar.tiers.runner import List
from kvferry_sidecar.tiers.store import NOBODYS, Listed, Whose
from support.books import read_status
from support.client_half import client_engine
from support.pipeline_bed import Bed, make_engine
from support.sidecar import running_sidecar, set_flags
from support.slow_tiers import disk_settings
from support.store_rigs import DiskRig, key_of, opened, put
from support.waiting import wait_until

MIB = 1 << 20
RED, BLUE = Whose(b"r" * 16, 0), Whose(b"b" * 16, 3)


def test_a_disk_names_its_objects_in_pages_also_after_a_restart(tmp_path) -> None:
    with opened(DiskRig(tmp_path, 16 * MIB)) as rig:
        items = [rig.memory.item(n, 4096 + n, content=b"x") for n in range(7)]
        owners = [RED, RED, BLUE, NOBODYS, BLUE, RED, RED]
        put(rig.store, [replace(one, whose=who) for one, who in zip(items, owners, strict=True)])
        rig.store.remove([key_of(5)])
        whole = rig.store.listed(b"", 1000)
        assert [one.key for one in whole] == sorted(key_of(n) for n in (0, 1, 2, 3, 4, 6))
        told = {one.key: (one.whose, one.payload_bytes) for one in whole}
        assert told == {key_of(n): (owners[n], 4096 + n) for n in (0, 1, 2, 3, 4, 6)}
        first = rig.store.listed(b"", 4)
        assert first + rig.store.listed(first[-1].key, 4) == whole
        assert rig.store.listed(whole[-1].key, 4) == []
        rig.reopen()
        assert rig.store.listed(b"", 1000) == whole


def test_pages_are_chosen_from_by_namespace_and_age() -> None:
    found = [
        Listed(key_of(n), who, stored_s, 4096)
        for n, (who, stored_s) in enumerate([(RED, 900), (RED, 100), (BLUE, 900), (RED, 2000)])
    ]

    def fits(**wanted: object) -> list[str]:
        return [one.key for one in disk_page(found, Filter(**wanted), 4, 1000.0).objects]

    keys = [one.key.hex() for one in found]
    assert fits() == keys
    assert fits(namespace=RED.namespace.hex()[:6]) == [keys[0], keys[1], keys[3]]
    assert fits(older_s=100) == [keys[0], keys[1], keys[2]], "a clock that was set back: age 0"
    assert fits(namespace=RED.namespace.hex(), younger_s=101) == [keys[0], keys[3]]
    assert disk_page(found, Filter(), 4, 0.0).next == keys[3]
    assert disk_page(found, Filter(), 5, 0.0).next is None
    with pytest.raises(RequestError, match="no pins"):
        fits(pin="hard")


def test_who_asks_a_disk_is_told_what_becomes_of_it() -> None:
    bed, _engine = Bed(sources=("disk", "external")), make_engine()
    objects, disk = bed.pipeline.objects, bed.slow[0]
    for name in (bed.slow[1].name, "elsewhere"):
        with pytest.raises(RequestError, match="is no disk"):
            objects.on_disk(name, b"", 10, bed.now_s)
    asked = objects.on_disk(disk.name, b"", 10, bed.now_s)
    left = objects.on_disk(disk.name, b"", 10, bed.now_s)
    left.cancel()
    for ticket in disk.of_kind(List):
        disk.finish(ticket, error="it broke")
    bed.pipeline.on_stores(bed.now_s)
    with pytest.raises(RequestError, match="it broke"):
        asked.result(0)
    with pytest.raises(RequestError, match="is paused: it broke"):
        objects.on_disk(disk.name, b"", 10, bed.now_s)


def test_what_is_dropped_from_disks_stays_elsewhere() -> None:
    bed = Bed(sources=("disk", "external"))
    keys = [key_of(n) for n in range(3)]
    for slow in bed.slow:
        slow.stored.update(dict.fromkeys(keys, ((), ())))
    wanted = Filter(keys=[key.hex() for key in keys[:2]])
    bed.pipeline.objects.drop(wanted, "disk", 0, bed.now_s, dry_run=False)
    bed.run_stores()
    assert [list(slow.stored) for slow in bed.slow] == [keys[2:], keys]


def test_the_command_line_lists_and_drops_what_disks_have(tmp_path, capsys) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()

    def told(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words), "--run-dir", str(sidecar.run_dir)]) == 0
        return capsys.readouterr().out

    def on_disks() -> int:
        tiers = read_status(sidecar.run_dir)["pipeline"]["tiers"]
        return sum(one["facts"]["objects"] for one in tiers)

    with (
        running_sidecar(pool_bytes=8 * MIB, flags=set_flags(disk_settings(*paths))) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        for number in range(4):
            engine.put(f"prompt {number}")
        wait_until(lambda: on_disks() == 12, "all is written on")
        here = {one.split()[0] for one in told("objects", "list").splitlines()}
        told("act", "clear-pool")
        assert told("objects", "list") == ""
        rows = [
            json.loads(one)
            for one in told("objects", "list", "--tier", "disk", "--json").splitlines()
        ]
        assert len({one["key"] for one in rows}) == 12
        (namespace,) = here
        assert {one["namespace"] for one in rows} == here
        assert {(one["group"], one["pin"]) for one in rows} == {(0, "none")}
        mine = ("--tier", "disk", "--namespace", namespace[:8])
        assert len(told("objects", "list", *mine, "--limit", "5").splitlines()) == 5
        assert told("objects", "list", "--tier", "disk", "--namespace", "0" * 32) == ""
        assert told("objects", "list", "--tier", "disk", "--older", "1h") == ""
        file = tmp_path / "list"
        file.write_text(told("objects", "list", *mine))
        assert "12 fetched" in told("warm", file)
        assert "12 objects" in told("objects", "drop", *mine, "--dry-run")
        assert "0 objects" in told("objects", "drop", "--tier", "disk", "--older", "1h")
        assert "12 objects" in told("objects", "drop", *mine)
        wait_until(lambda: on_disks() == 0, "the disks have forgotten them")
        assert len(told("objects", "list").splitlines()) == 12, "the pool has not"

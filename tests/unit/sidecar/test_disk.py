"""The disk store by itself: room, restarts, and media that fail."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kvferry_sidecar.tiers import disk, disk_index
from kvferry_sidecar.tiers.disk_index import read_through
from kvferry_sidecar.tiers.store import StoreError
from support.mounts import NEEDS_ROOT, tmpfs
from support.store_rigs import DiskRig, get, key_of, open_disk, opened, put

MIB = 1 << 20


@pytest.fixture
def rig(tmp_path):
    with opened(DiskRig(tmp_path, 16 * MIB)) as rig:
        yield rig


def items(rig: DiskRig, first: int, count: int, size: int = 256 << 10):
    return [rig.memory.item(first + n, size, content=b"x") for n in range(count)]


def fill(rig: DiskRig) -> None:
    """Store many small objects: the index grows."""
    for first in range(0, 4000, 256):
        put(rig.store, items(rig, first, 256, 512))


def test_the_file_is_preallocated_and_passes_the_page_cache(rig):
    """Whole sectors do; an object of another length does not, which shows that it is seen."""
    data = rig.path / "kvferry" / "objects"
    assert data.stat().st_blocks * 512 >= 16 * MIB
    if not rig.store.facts()["direct"].startswith("sectors of "):
        pytest.skip(f"the file system of {rig.path} has no direct I/O")
    stored = items(rig, 0, 8)
    assert put(rig.store, stored) == get(rig.store, stored) == [True] * 8
    assert cached_bytes(data) == 0
    assert put(rig.store, items(rig, 8, 1, 5001)) == [True]
    assert cached_bytes(data) > 0


def cached_bytes(path: Path) -> int:
    """Return how much of a file the page cache holds."""
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)


def test_the_region_used_least_recently_is_given_up(rig):
    """16 regions of 1 MiB, 4 objects each: what is read stays, what nobody reads goes."""
    kept = items(rig, 0, 4)
    put(rig.store, kept)
    for first in range(100, 200, 4):
        assert all(put(rig.store, items(rig, first, 4)))
        assert all(get(rig.store, kept))
    facts = rig.store.facts()
    assert facts["regions_given_up"] == 10
    assert facts["objects"] == 16 * 4
    assert not any(rig.store.exists([key_of(n) for n in range(100, 104)]))
    assert all(rig.store.exists([key_of(n) for n in range(196, 200)]))


def test_order_of_use_survives_a_restart(rig):
    for first in range(0, 64, 4):
        put(rig.store, items(rig, first, 4))
    rig.reopen()
    put(rig.store, items(rig, 200, 4))
    assert not any(rig.store.exists([key_of(n) for n in range(4)]))
    assert all(rig.store.exists([key_of(n) for n in range(4, 64)]))


def test_nothing_is_given_up_while_it_is_read(rig):
    pinned = items(rig, 0, 60)
    put(rig.store, pinned)
    rows = rig.store._index.pin([item.key for item in pinned])
    assert put(rig.store, items(rig, 100, 8)) == [True] * 4 + [False] * 4  # the last region
    rig.store._index.unpin([row.place for row in rows])
    assert put(rig.store, items(rig, 200, 1)) == [True]


def test_readers_and_a_region_that_is_given_up(rig):
    """Objects vanish under readers all the time: each read is a miss or has the right bytes."""
    stop = threading.Event()
    hits: list[bool] = []

    def read() -> None:
        while not stop.is_set():
            hits.extend(get(rig.store, [rig.memory.item(n, 256 << 10) for n in range(8)]))

    reader = threading.Thread(target=read)
    reader.start()
    for round_ in range(30):
        put(rig.store, items(rig, 8 * (round_ % 10), 8))
        rig.store.remove([key_of(n) for n in range(8 * (round_ % 10), 8 * (round_ % 10) + 8, 3)])
    stop.set()
    reader.join()
    assert hits


def test_objects_too_small_for_the_index_make_room_among_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_index, "_index_bytes_min", 0)
    with opened(DiskRig(tmp_path, 16 * MIB)) as rig:
        for first in range(0, 4096, 256):
            last = items(rig, first, 256, 4096)
            assert all(put(rig.store, last))
        facts = rig.store.facts()
        assert facts["objects"] == rig.store._index.objects_max == 512
        assert facts["regions_given_up"] == 14, "of 4096 objects in 16 regions"
        assert all(get(rig.store, last))
        index = rig.path / "kvferry" / "index" / "data.mdb"
        assert index.stat().st_size < 16 * MIB // 32


def test_another_size_starts_empty(rig):
    put(rig.store, items(rig, 0, 4))
    rig.total_bytes = 32 * MIB
    rig.reopen()
    assert rig.store.facts()["objects"] == 0
    assert put(rig.store, items(rig, 0, 4)) == [True] * 4
    assert (rig.path / "kvferry" / "objects").stat().st_size == 32 * MIB


@pytest.mark.parametrize("damage", ["noise", "cut off"])
def test_a_damaged_index_starts_empty(rig, damage):
    put(rig.store, items(rig, 0, 4))
    rig.store.close()
    index = rig.path / "kvferry" / "index" / "data.mdb"
    if damage == "noise":
        index.write_bytes(os.urandom(65536))
    else:
        os.truncate(index, 12288)
    rig.store = open_disk(rig.path, rig.total_bytes)
    assert rig.store.facts()["objects"] == 0
    assert put(rig.store, items(rig, 0, 4)) == [True] * 4


def test_an_index_that_cannot_be_read_is_found_out_by_reading(rig):
    """Mapped pages that the disk does not give would end the process, and the next one."""
    put(rig.store, items(rig, 0, 4))
    rig.store.close()
    index = rig.path / "kvferry" / "index"
    read_through(index / "data.mdb", 4096)
    with pytest.raises(OSError, match="Input/output error"):
        read_through(Path("/proc/self/mem"), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_index, "read_through", _no_sector)
        with pytest.raises(StoreError, match=r"cannot be used: .*Input/output error") as caught:
            open_disk(rig.path, rig.total_bytes)
    assert caught.value.final
    rig.store = open_disk(rig.path, rig.total_bytes)
    assert rig.store.facts()["objects"] == 4, "it was left as it is"


def _no_sector(path: Path, _count: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def test_a_folder_that_vanishes_serves_on_and_the_next_starts_empty(rig):
    """Open files outlive their names; nothing is written elsewhere, and closing is no error."""
    put(rig.store, items(rig, 0, 4))
    shutil.rmtree(rig.path / "kvferry")
    assert all(rig.store.exists([key_of(n) for n in range(4)]))
    assert put(rig.store, items(rig, 4, 4)) == [True] * 4
    assert get(rig.store, items(rig, 0, 8)) == [True] * 8
    rig.store.close()
    assert not (rig.path / "kvferry").exists()
    rig.store = open_disk(rig.path, rig.total_bytes)
    assert rig.store.facts()["objects"] == 0


def test_a_machine_that_went_down_starts_empty(rig):
    """The index is not flushed: only this boot, or a closed one, can be trusted."""
    put(rig.store, items(rig, 0, 4))
    session = rig.path / "kvferry" / "session"
    assert session.read_text() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    rig.reopen()
    assert rig.store.facts()["objects"] == 4
    rig.store.close()
    assert session.read_text() == disk.CLOSED
    session.write_text("another boot")
    rig.store = open_disk(rig.path, rig.total_bytes)
    assert rig.store.facts()["objects"] == 0
    assert put(rig.store, items(rig, 0, 4)) == [True] * 4


def test_one_sidecar_at_a_time(rig):
    script = (
        "import sys; from support.store_rigs import open_disk; from pathlib import Path\n"
        "open_disk(Path(sys.argv[1]), 16 << 20)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(rig.path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert "held by another sidecar" in done.stderr
    with pytest.raises(StoreError, match="held by another sidecar"):
        open_disk(rig.path, rig.total_bytes)
    assert all(put(rig.store, items(rig, 0, 2)))  # and the refused attempt took no lock away


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "kvferry").mkdir(mode=0o755)
    (tmp_path / "kvferry").chmod(0o755)
    with pytest.raises(StoreError, match="only its owner can enter"):
        open_disk(tmp_path, 16 * MIB)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(StoreError, match=r"cannot be used: .*No such file"):
        open_disk(tmp_path / "missing", 16 * MIB)


def test_the_free_space_guard(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(StoreError, match=r"lower tiers.disk.bytes"):
        open_disk(tmp_path, 16 * MIB, free_bytes_min=free)
    assert not (tmp_path / "kvferry" / "objects").exists()
    open_disk(tmp_path, 16 * MIB, free_bytes_min=MIB).close()


def test_reads_that_fail_are_misses_and_many_of_them_the_end(rig, monkeypatch):
    stored = items(rig, 0, 24)
    put(rig.store, stored)
    os.truncate(rig.path / "kvferry" / "objects", 4096)  # what the disk says is gone
    assert get(rig.store, stored[:1]) == [False]
    assert rig.store.exists([stored[0].key]) == [False]
    misses = disk.read_errors_max - 2
    assert not any(get(rig.store, [item]) == [True] for item in stored[1 : 1 + misses])
    with pytest.raises(StoreError, match="reads failed") as caught:
        get(rig.store, stored[-1:])
    assert caught.value.final
    rig.store._file.close = lambda: None  # closed by close()


def test_a_write_that_fails_is_the_end(rig):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a full disk: no byte more
    try:
        with pytest.raises(StoreError, match=r"the disk failed: .*") as caught:
            put(rig.store, items(rig, 0, 8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.final
    assert not any(rig.store.exists([key_of(n) for n in range(8)]))


@NEEDS_ROOT
def test_a_disk_that_is_too_small_or_read_only(tmp_path):
    with (
        tmpfs(tmp_path / "small", "8m") as small,
        pytest.raises(StoreError, match=r"lower tiers.disk.bytes"),
    ):
        open_disk(small, 16 * MIB)
    with (
        tmpfs(tmp_path / "fixed", "64m", "ro") as fixed,
        pytest.raises(StoreError, match="Read-only file system"),
    ):
        open_disk(fixed, 16 * MIB)


@NEEDS_ROOT
def test_an_index_that_finds_no_space_is_the_end(tmp_path):
    with tmpfs(tmp_path / "disk", "20m") as path, opened(DiskRig(path, 16 * MIB)) as rig:
        (path / "other").write_bytes(b"x" * (shutil.disk_usage(path).free - 8192))
        with pytest.raises(StoreError) as caught:
            fill(rig)
        assert caught.value.final


def test_regions_fit_the_objects_of_the_pool():
    assert disk.region_bytes_for(16 * MIB, MIB) == MIB
    assert disk.region_bytes_for(1 << 40, 64 * MIB) == 64 * MIB
    assert disk.region_bytes_for(16 * MIB, 64 * MIB) == 2 * MIB  # larger objects are not written

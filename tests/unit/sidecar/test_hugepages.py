"""A pool in a hugetlbfs mount: with pages that the test reserves, or the refusal without."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog
from kvferry_sidecar.config import load
from kvferry_sidecar.doctor import machine
from kvferry_sidecar.doctor.finding import Finding, Machine
from kvferry_sidecar.errors import PoolSegmentError
from kvferry_sidecar.settings import Setting
from kvferry_sidecar.tiers import hugepages
from kvferry_sidecar.tiers.segment import PoolSegment, open_pool
from support.pools import keys_of
from support.reserved import huge_pages

NAME = "kvferry-test"
PAGE = 2 << 20
ARENA_BYTES, SLAB_BYTES, KEYS_MAX = 5 << 20, 1 << 20, 4096
PAGES = 4  # the arena's five slabs, and the index in two more MiB


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A hugetlbfs; it says nothing of how many pages there are."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "pages"
    folder.mkdir()
    if libc.mount(b"none", bytes(folder), b"hugetlbfs", 0, b"pagesize=2M"):
        pytest.skip(f"no hugetlbfs can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield folder
    assert libc.umount2(bytes(folder), 0) == 0


@pytest.fixture
def alone() -> Iterator[None]:
    """No other test reserves pages meanwhile."""
    with huge_pages(0):
        yield


@pytest.fixture
def reserve() -> Iterator[None]:
    """Pages for one pool."""
    with huge_pages(PAGES):
        yield


def opened(folder: Path) -> PoolSegment:
    return open_pool(
        NAME,
        arena_bytes=ARENA_BYTES,
        slab_bytes=SLAB_BYTES,
        keys_max=KEYS_MAX,
        epoch=1,
        threads=2,
        log=structlog.get_logger(),
        hugepages_dir=str(folder),
    )


@pytest.mark.usefixtures("reserve")
def test_a_pool_on_huge_pages_outlives_its_sidecar(mount: Path) -> None:
    free_bytes = hugepages.free_bytes(mount, PAGE)
    first = opened(mount)
    assert first.segment_bytes == PAGES * PAGE == (mount / NAME).stat().st_size
    assert f"{mount}/{NAME}" in Path("/proc/self/maps").read_text()
    assert first.pool.stats().total_bytes >= ARENA_BYTES
    assert hugepages.free_bytes(mount, PAGE) == free_bytes - first.segment_bytes
    entries = first.pool.reserve(keys_of(1, 2), 3000, 1).astype(np.uint32)
    first.pool.commit(entries)
    first.close()
    again = opened(mount)
    assert again.warm
    assert again.pool.prefix(keys_of(1, 2, 3)) == 2
    again.close()
    (mount / NAME).unlink()


@pytest.mark.usefixtures("alone")
def test_too_few_pages(mount: Path) -> None:
    free_bytes = hugepages.free_bytes(mount, PAGE)
    if free_bytes:
        pytest.skip("this machine has free huge pages")
    with pytest.raises(PoolSegmentError, match=f"reserve {PAGES} more .*nr_hugepages"):
        opened(mount)
    assert not (mount / NAME).exists()
    assert doctor_says(mount).verdict == "fail"


def test_no_such_mount(tmp_path: Path) -> None:
    with pytest.raises(PoolSegmentError, match="is no mount, not hugetlbfs; mount -t hugetlbfs"):
        opened(tmp_path)
    with pytest.raises(PoolSegmentError, match="is tmpfs, not hugetlbfs"):
        opened(Path("/dev/shm"))
    assert "mount -t hugetlbfs" in doctor_says(tmp_path).remedy


def test_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "hugepages-2048kB"
    counts.mkdir()
    (counts / "free_hugepages").write_text("7\n")
    (counts / "resv_hugepages").write_text("2\n")
    monkeypatch.setattr(hugepages, "_SIZES", tmp_path)
    assert hugepages.free_bytes(Path("/proc"), PAGE) == 5 * PAGE, "a mount without a bound"


def doctor_says(folder: Path) -> Finding:
    settings = {"tiers.host.hugepages_dir": str(folder), "tiers.host.bytes": "8MiB"}
    given = {key: Setting(value, "flag") for key, value in settings.items()}
    return machine.check_pages(Machine(), load(None, given, {}).config)

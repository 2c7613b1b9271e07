"""The pool segment: made, kept warm, replaced when it is not ours, and one sidecar's at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from kvferry_sidecar.errors import PoolSegmentError
from kvferry_sidecar.tiers import segment
from kvferry_sidecar.tiers.segment import PoolSegment, open_pool
from structlog.testing import capture_logs
from support.memory import open_descriptors

ARENA_BYTES = 8 << 20
SLAB_BYTES = 1 << 20
KEYS_MAX = 4096

HOLDER = """
import sys, structlog
from kvferry_sidecar.tiers.segment import open_pool
held = open_pool(sys.argv[1], arena_bytes=8 << 20, slab_bytes=1 << 20, keys_max=4096, epoch=1,
                 threads=1, log=structlog.get_logger())
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> Iterator[str]:
    made = f"kvferry-test-{os.urandom(6).hex()}"
    yield made
    (segment.SHM_DIR / made).unlink(missing_ok=True)


@contextmanager
def opened(name: str, **changes: int) -> Iterator[tuple[PoolSegment, list[str]]]:
    """Open the pool; yields it with the reasons of replacements that were logged."""
    import structlog

    sizes = {
        "arena_bytes": ARENA_BYTES,
        "slab_bytes": SLAB_BYTES,
        "keys_max": KEYS_MAX,
        "epoch": 1,
        "threads": 1,
    } | changes
    with capture_logs() as logged:
        made = open_pool(name, log=structlog.get_logger(), **sizes)
    try:
        yield made, [entry["reason"] for entry in logged]
    finally:
        made.close()


def store(made: PoolSegment, number: int) -> np.ndarray:
    keys = np.full((1, 16), number, dtype=np.uint8)
    (entry,) = made.pool.reserve(keys, 4096, 1)
    made.pool.commit(np.array([entry], dtype=np.uint32))
    return keys


def test_a_new_segment_has_all_its_bytes_and_is_private(name: str) -> None:
    with opened(name) as (made, replaced):
        assert not made.warm
        assert not replaced
        status = (segment.SHM_DIR / name).stat()
        assert status.st_size == made.segment_bytes
        assert status.st_blocks * 512 >= made.segment_bytes
        assert status.st_mode & 0o777 == 0o600


def test_a_segment_of_a_former_sidecar_is_kept(name: str) -> None:
    with opened(name) as (made, _):
        keys = store(made, 7)
    before = open_descriptors()
    with opened(name, epoch=2) as (made, replaced):
        assert made.warm
        assert not replaced
        assert made.pool.prefix(keys) == 1
    assert open_descriptors().keys() == before.keys()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arena_bytes": 2 * ARENA_BYTES}, "bytes, configured are"),
        ({"slab_bytes": SLAB_BYTES // 2}, "configured are"),
    ],
)
def test_another_size_is_a_logged_clean_start(
    name: str, changes: dict[str, int], reason: str
) -> None:
    with opened(name) as (made, _):
        keys = store(made, 7)
    with opened(name, epoch=2, **changes) as (made, replaced):
        assert not made.warm
        assert reason in replaced[0]
        assert made.pool.prefix(keys) == 0
        assert made.pool.check() == []


def test_a_damaged_or_foreign_segment_is_a_logged_clean_start(name: str) -> None:
    with opened(name) as (made, _):
        size = made.segment_bytes
    (segment.SHM_DIR / name).write_bytes(b"something else" + bytes(size - 14))
    with opened(name, epoch=2) as (made, replaced):
        assert not made.warm
        assert len(replaced) == 1
        assert made.pool.check() == []


def test_no_space_says_what_to_change_and_leaves_nothing(name: str) -> None:
    space = os.statvfs(segment.SHM_DIR)
    too_many = (space.f_bavail * space.f_frsize // SLAB_BYTES + 1024) * SLAB_BYTES
    before = open_descriptors()
    with (
        pytest.raises(PoolSegmentError, match=r"has no \d+ bytes.*tiers.host.bytes"),
        opened(name, arena_bytes=too_many),
    ):
        pass
    assert not (segment.SHM_DIR / name).exists()
    assert open_descriptors().keys() == before.keys()


@contextmanager
def holder(name: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_second_sidecar_is_refused_and_told_who_holds_it(name: str) -> None:
    with holder(name) as child:
        # Creating or attaching the pool must not have dropped the lock.
        with pytest.raises(PoolSegmentError, match=f"pid {child.pid}.*tiers.host.name"):
            open_pool_once(name)
        child.kill()
        child.wait()
        with opened(name, epoch=2) as (made, _):
            assert made.warm


def test_a_warm_pool_keeps_its_lock_too(name: str) -> None:
    with opened(name):
        pass
    with holder(name), pytest.raises(PoolSegmentError, match="in use by another sidecar"):
        open_pool_once(name)


def test_one_process_does_not_open_it_twice(name: str) -> None:
    with opened(name):
        with pytest.raises(PoolSegmentError, match="this process"):
            open_pool_once(name)
        refused = subprocess.run(
            [sys.executable, "-c", HOLDER, name],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert refused.returncode == 1
        assert f"pid {os.getpid()}" in refused.stderr, "the second try must not drop the lock"


def open_pool_once(name: str) -> None:
    with opened(name, epoch=9):
        pass


def test_what_cannot_be_opened_is_refused_with_a_remedy(name: str) -> None:
    folder = Path(segment.SHM_DIR / name)
    folder.mkdir()
    try:
        with pytest.raises(PoolSegmentError, match="cannot be opened"):
            open_pool_once(name)
    finally:
        folder.rmdir()

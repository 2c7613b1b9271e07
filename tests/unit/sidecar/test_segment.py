"""The pool segment: made, kept warm, replaced when it is not ours, and one sidecar's at a time."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
held = open_pool(sys.argv[1], arena_bytes=8 << 20, slab_bytes=1 << 20, keys_max=4096, epoch=1,
                 threads=1, log=structlog.get_logger())
print("held", flush=True)
sys.stdin.read()
"""


LOGGED: list[list[Any]] = []  # the entries of the latest opened()


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
        LOGGED[:] = [logged]
        made = open_pool(name, log=structlog.get_logger(), **sizes)
    try:
        yield made, [entry["reason"] for entry in logged if "reason" in entry]
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


def open_pool_once(name: str, **changes: int) -> None:
    with opened(name, **{"epoch": 9} | changes):
        pass


def test_what_cannot_be_opened_is_refused_with_a_remedy(name: str) -> None:
    folder = Path(segment.SHM_DIR / name)
    folder.mkdir()
    try:
        with pytest.raises(PoolSegmentError, match="cannot be opened"):
            open_pool_once(name)
    finally:
        folder.rmdir()


def test_a_new_segment_is_private_whatever_the_umask(name: str) -> None:
    before = os.umask(0)
    try:
        with opened(name):
            assert (segment.SHM_DIR / name).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o666, 0o640, 0o604, 0o601])
def test_a_segment_that_others_can_open_is_refused(name: str, mode: int) -> None:
    with opened(name) as (made, _):
        keys = store(made, 7)
    path = segment.SHM_DIR / name
    path.chmod(mode)
    before = open_descriptors()
    with pytest.raises(
        PoolSegmentError,
        match=rf"uid {os.geteuid()} with mode {mode:04o}.*remove it or choose .*tiers.host.name",
    ):
        open_pool_once(name)
    assert open_descriptors().keys() == before.keys()
    path.chmod(0o600)
    with opened(name, epoch=2) as (made, _):
        assert made.pool.prefix(keys) == 1, "the refusal changed nothing"


def test_a_segment_of_another_user_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    os.close(os.open(segment.SHM_DIR / name, os.O_CREAT | os.O_RDWR, 0o600))
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PoolSegmentError, match=f"uid {owner} with mode 0600"):
        open_pool_once(name)


def test_what_is_no_plain_file_is_refused(name: str) -> None:
    os.mkfifo(segment.SHM_DIR / name, 0o600)
    with pytest.raises(PoolSegmentError, match=r"special file|cannot be opened"):
        open_pool_once(name)


@contextmanager
def soft_limit(which: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def refused_growth_keeps_the_pool(name: str, match: str, arena_bytes: int) -> None:
    with opened(name) as (made, _):
        keys = store(made, 7)
    before = open_descriptors()
    with pytest.raises(PoolSegmentError, match=match):
        open_pool_once(name, arena_bytes=arena_bytes)
    assert open_descriptors().keys() == before.keys()
    with opened(name, epoch=2) as (made, replaced):
        assert made.warm
        assert not replaced
        assert made.pool.prefix(keys) == 1


def test_growing_without_space_keeps_the_old_pool(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Exactly the arena is left beside the old segment's bytes: its index does not fit any more.
    with opened(name) as (made, _):
        held = made.segment_bytes
    (segment.SHM_DIR / name).unlink()
    monkeypatch.setattr(segment, "_free_bytes", lambda _: 4 * ARENA_BYTES - held)
    refused_growth_keeps_the_pool(name, r"has no \d+ bytes.*would replace", 4 * ARENA_BYTES)


def test_the_old_segments_bytes_count_as_space(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(name):
        pass
    monkeypatch.setattr(segment, "_free_bytes", lambda _: ARENA_BYTES)
    with opened(name, epoch=2, arena_bytes=2 * ARENA_BYTES) as (made, replaced):
        assert not made.warm
        assert len(replaced) == 1


def test_growing_over_the_file_size_limit_says_so_and_keeps_the_old_pool(name: str) -> None:
    with soft_limit(resource.RLIMIT_FSIZE, 2 * ARENA_BYTES):
        refused_growth_keeps_the_pool(
            name, rf"limit of {2 * ARENA_BYTES} bytes \(ulimit -f\)", 4 * ARENA_BYTES
        )


def test_a_file_too_large_while_sizing_is_not_called_lack_of_space(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", too_large)
    with pytest.raises(PoolSegmentError, match=r"larger than a file may be.*ulimit -f"):
        open_pool_once(name)
    assert not (segment.SHM_DIR / name).exists()


def no_memory(*_: object) -> None:
    raise OSError(errno.ENOMEM, "mapping the pool segment")


def test_growing_without_addresses_keeps_the_old_pool(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, large = segment.mmap.mmap, 4 * ARENA_BYTES

    def bounded(fd: int, length: int, **more: int) -> object:
        return no_memory() if length > large else real(fd, length, **more)

    monkeypatch.setattr(segment.mmap, "mmap", bounded)
    refused_growth_keeps_the_pool(name, "cannot be mapped.*ulimit -v", large)


@pytest.mark.parametrize("call", ["create", "attach"])
def test_a_pool_that_cannot_be_mapped_is_an_error_with_a_remedy(
    name: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if call == "attach":
        with opened(name):
            pass
    fake = SimpleNamespace(
        segment_bytes_for=segment.Pool.segment_bytes_for, create=no_memory, attach=no_memory
    )
    monkeypatch.setattr(segment, "Pool", fake)
    before = open_descriptors()
    with pytest.raises(PoolSegmentError, match=r"cannot be mapped.*ulimit -v"):
        open_pool_once(name)
    assert open_descriptors().keys() == before.keys()
    assert (segment.SHM_DIR / name).exists() == (call == "attach"), "a pool is kept"


LIMITED = """
import resource, sys, structlog
from kvferry_sidecar.errors import PoolSegmentError
from kvferry_sidecar.tiers.segment import open_pool
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    open_pool(sys.argv[1], arena_bytes=2 << 30, slab_bytes=1 << 20, keys_max=4096, epoch=1,
              threads=1, log=structlog.get_logger())
except PoolSegmentError as error:
    print("refused:", error)
"""


def test_a_small_address_space_is_refused_before_anything_is_taken(name: str) -> None:
    space = os.statvfs(segment.SHM_DIR)
    if space.f_bavail * space.f_frsize < 3 << 30:
        pytest.skip("/dev/shm has less than 3 GiB free")
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, name], capture_output=True, text=True, check=False
    )
    assert re.search("refused: .*cannot be mapped.*ulimit -v", ended.stdout), ended.stderr
    assert not (segment.SHM_DIR / name).exists()


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/pod/box", "pod/box/memory.max"),
        ("0::/pod/box", "pod/memory.max"),
        ("0::/not/mounted/here", "memory.max"),
        ("4:cpu,memory:/pod/box\n0::/", "memory/pod/box/memory.limit_in_bytes"),
        ("4:memory:/docker/77", "memory/memory.limit_in_bytes"),
    ],
)
def test_a_pool_over_the_memory_limit_is_refused_and_the_old_one_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, file: str
) -> None:
    (tmp_path / "self").write_text(group + "\n")
    for folder in ("pod/box", "memory/pod/box"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "pod/box/memory.max").write_text("max\n")
    (tmp_path / file).write_text(f"{2 * ARENA_BYTES}\n")
    monkeypatch.setattr(segment, "_CGROUPS_OF_PROCESS", tmp_path / "self")
    monkeypatch.setattr(segment, "_CGROUP_DIR", tmp_path)
    refused_growth_keeps_the_pool(
        name, rf"memory limit of {2 * ARENA_BYTES} bytes.*resources.limits", 4 * ARENA_BYTES
    )


def test_no_memory_limit_is_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "_CGROUP_DIR", tmp_path)
    monkeypatch.setattr(segment, "_CGROUPS_OF_PROCESS", tmp_path / "self")
    open_pool_once(name)
    (segment.SHM_DIR / name).unlink()
    (tmp_path / "self").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("max\n")
    open_pool_once(name)


def test_the_bytes_are_logged_before_they_are_reserved(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "_check_fits", no_memory)
    with pytest.raises(OSError, match="mapping"):
        open_pool_once(name)
    assert re.fullmatch(r"reserving \d+ bytes", LOGGED[0][0]["event"])


def test_another_keys_max_of_a_warm_pool_is_a_warning(name: str) -> None:
    with opened(name):
        pass
    open_pool_once(name, keys_max=KEYS_MAX - 1)
    (warned,) = (line for line in LOGGED[0] if line["log_level"] == "warning")
    assert (warned["keys_max"], warned["keys_max_configured"]) == (KEYS_MAX, KEYS_MAX - 1)

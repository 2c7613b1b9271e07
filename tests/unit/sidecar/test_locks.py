"""Locks of the run directory: one holder, named in the refusal, gone with its process."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvferry_connector.wire.names import LOCK_FILE
from kvferry_sidecar import locks
from kvferry_sidecar.errors import RunDirError
from support.memory import open_descriptors

HOLDER = """
import sys
from pathlib import Path
from kvferry_sidecar import locks
from kvferry_sidecar.errors import RunDirError
run_dir = Path(sys.argv[1])
try:
    locks.prepare_run_dir(run_dir)
    lock = locks.lock_run_dir(run_dir)
except RunDirError as error:
    print("refused:", error, flush=True)
    sys.exit(4)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvf-"))
    yield folder / "run"
    shutil.rmtree(folder)


@contextmanager
def holder(run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process that locks the directory; yields it and its first line."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        yield child, child.stdout.readline()
    finally:
        child.kill()
        child.communicate()


def test_a_new_directory_is_private(run_dir: Path) -> None:
    locks.prepare_run_dir(run_dir)
    assert run_dir.stat().st_mode & 0o777 == 0o700
    locks.prepare_run_dir(run_dir)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777, 0o701])
def test_a_directory_open_to_others_is_refused(run_dir: Path, mode: int) -> None:
    run_dir.mkdir()
    run_dir.chmod(mode)
    with pytest.raises(RunDirError, match=f"mode {mode:04o}.*chmod 0700") as refused:
        locks.prepare_run_dir(run_dir)
    assert "group" not in refused.value.remedy, "the uid check admits no group"


def test_a_directory_for_a_group_is_accepted(run_dir: Path) -> None:
    run_dir.mkdir()
    run_dir.chmod(0o750)
    locks.prepare_run_dir(run_dir)


def test_a_foreign_directory_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir.mkdir(mode=0o700)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(RunDirError, match="belongs to uid"):
        locks.prepare_run_dir(run_dir)


def test_what_is_no_directory_of_its_own_is_refused(run_dir: Path) -> None:
    with pytest.raises(RunDirError, match="absolute"):
        locks.prepare_run_dir(Path("relative"))
    with pytest.raises(RunDirError, match="108 bytes"):
        locks.prepare_run_dir(Path("/tmp") / ("x" * 100))
    target = run_dir.with_name("target")
    target.mkdir(mode=0o700)
    run_dir.symlink_to(target)
    with pytest.raises(RunDirError, match="no directory"):
        locks.prepare_run_dir(run_dir)
    run_dir.unlink()
    run_dir.write_text("")
    with pytest.raises(RunDirError, match="cannot be made"):
        locks.prepare_run_dir(run_dir)


def test_a_second_sidecar_is_refused_and_told_who_holds_it(run_dir: Path) -> None:
    with holder(run_dir) as (first, line):
        assert line == "held\n"
        before = open_descriptors()
        with pytest.raises(RunDirError) as refused:
            locks.lock_run_dir(run_dir)
        text = str(refused.value)
        assert f"pid {first.pid}" in text
        assert "host " in text
        assert "boot_id " in text
        assert "started_at " in text
        assert "set another run_dir" in text
        assert open_descriptors().keys() == before.keys()
        # The refusal changed nothing for the holder.
        with holder(run_dir) as (_, again):
            assert again.startswith("refused:")


def test_the_lock_falls_with_its_process(run_dir: Path) -> None:
    with holder(run_dir) as (first, _):
        first.kill()
        first.wait()
        lock = locks.lock_run_dir(run_dir)
        assert f'"pid": {os.getpid()}' in (run_dir / LOCK_FILE).read_text()
        lock.release()


def test_a_forked_child_does_not_keep_the_lock(run_dir: Path) -> None:
    forking = HOLDER.replace(
        'print("held"',
        'import subprocess; subprocess.Popen(["sleep", "100"], close_fds=False)\nprint("held"',
    ).replace("sys.stdin.read()", "import os; os._exit(0)")
    child = subprocess.run(
        [sys.executable, "-c", forking, str(run_dir)],
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    assert child.returncode == 0
    locks.lock_run_dir(run_dir).release()


def test_one_process_refuses_itself_and_keeps_the_lock(run_dir: Path) -> None:
    locks.prepare_run_dir(run_dir)
    lock = locks.lock_run_dir(run_dir)
    with pytest.raises(RunDirError, match="this process"):
        locks.lock_run_dir(run_dir)
    with holder(run_dir) as (_, line):
        assert line.startswith("refused:"), "the second attempt must not have dropped the lock"
        assert f"pid {os.getpid()}" in line
    lock.release()
    lock.release()
    with holder(run_dir) as (_, line):
        assert line == "held\n"


def test_a_replaced_lock_file_is_noticed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks.prepare_run_dir(run_dir)
    path = run_dir / LOCK_FILE
    real, replaced = locks.fcntl.lockf, []

    def replace_first(fd: int, how: int) -> None:
        if not replaced:
            replaced.append(fd)
            path.unlink()
            path.write_text("")
        real(fd, how)

    monkeypatch.setattr(locks.fcntl, "lockf", replace_first)
    lock = locks.lock_run_dir(run_dir)
    assert lock.inode == locks.inode_of_path(path), "the lock is on the file that others will find"
    lock.release()


def test_sockets_of_former_epochs_are_removed(run_dir: Path) -> None:
    locks.prepare_run_dir(run_dir)
    for name in ("attach.sock", "ctl-00ff.sock", "ctl-aa.sock", "other.sock"):
        (run_dir / name).write_text("")
    assert locks.remove_stale_sockets(run_dir) == ["attach.sock", "ctl-00ff.sock", "ctl-aa.sock"]
    assert [path.name for path in run_dir.iterdir()] == ["other.sock"]
    assert locks.remove_stale_sockets(run_dir) == []


@pytest.mark.parametrize("kind", ["link", "loop", "directory"])
def test_a_lock_file_that_is_none_is_refused_with_a_remedy(run_dir: Path, kind: str) -> None:
    locks.prepare_run_dir(run_dir)
    path = run_dir / LOCK_FILE
    if kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else run_dir / "elsewhere")
    before = open_descriptors()
    with pytest.raises(RunDirError, match=f"lock file {path} cannot be used.*set another run_dir"):
        locks.lock_run_dir(run_dir)
    assert open_descriptors().keys() == before.keys()


@pytest.mark.parametrize(
    ("call", "number"),
    [("open", errno.EROFS), ("open", errno.ENOSPC), ("pwrite", errno.ENOSPC)],
)
def test_a_directory_that_takes_no_bytes_is_refused_with_a_remedy(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    locks.prepare_run_dir(run_dir)
    before = open_descriptors()

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(locks.os, call, refuse)
        with pytest.raises(RunDirError, match=f"{os.strerror(number)}.*has space"):
            locks.lock_run_dir(run_dir)
    assert open_descriptors().keys() == before.keys()
    locks.lock_run_dir(run_dir).release()


def test_a_file_system_without_locks_is_refused_with_a_remedy(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks.prepare_run_dir(run_dir)
    before = open_descriptors()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "lockf", refuse)
    with pytest.raises(RunDirError, match=os.strerror(errno.ENOLCK)):
        locks.lock_run_dir(run_dir)
    assert open_descriptors().keys() == before.keys()


def test_a_directory_in_a_sockets_place_is_refused_with_a_remedy(run_dir: Path) -> None:
    locks.prepare_run_dir(run_dir)
    (run_dir / "attach.sock").mkdir()
    with pytest.raises(RunDirError, match=r"attach\.sock is in the way.*remove it by hand"):
        locks.remove_stale_sockets(run_dir)

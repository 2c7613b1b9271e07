"""One writer: the run directory and the pool segment are locked before anything is bound or mapped.

POSIX record locks (``F_SETLK``), because they belong to the process: a forked child never keeps
them, as it would keep a ``flock`` or an open-file-description lock, so getting the lock proves
that the former holder's threads have ended. Their price: **the lock falls when this process closes
any descriptor of that file**, not only the one that was locked. Therefore

* a locked file is opened once, here, and its descriptor is kept until the process ends;
* nothing else in the process opens the same file (a second attempt in one process is refused by
  the table below, before it opens);
* a duplicate of a locked descriptor is never closed while the lock is needed (the native pool
  maps the descriptor it is given and neither duplicates nor closes it).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from kvferry_connector.wire.names import ATTACH_SOCKET, LOCK_FILE, run_dir_bytes_max

from kvferry_sidecar.errors import RunDirError

lock_attempts_max = 16  # the file may be replaced between open and lock; then it is opened again
holder_bytes_max = 4096
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# (device, inode) of every file this process holds a lock on: F_SETLK never conflicts with its own
# process, and the refused attempt's close() would drop the lock that is held.
_held: set[tuple[int, int]] = set()


@dataclass(slots=True, eq=False)
class FileLock:
    """A locked descriptor. ``release`` closes it, which is what drops the lock."""

    fd: int
    path: Path
    inode: tuple[int, int]

    def release(self) -> None:
        """Drop the lock; the file stays. Calling it again does nothing."""
        if self.inode in _held:
            _held.discard(self.inode)
            os.close(self.fd)


def http_path(run_dir: Path) -> Path:
    """Return the Unix socket of the operators' HTTP."""
    return run_dir / "http.sock"


def describe_self() -> dict[str, str | int]:
    """Return who holds a lock, as written into the lock file."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": _BOOT_ID.read_text().strip(),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def try_lock(fd: int, path: Path) -> FileLock | None:
    """Lock ``fd``, opened from ``path``; None when another process holds it.

    Raises StaleFileError when ``path`` has meanwhile become another file: the lock would be on a
    file nobody else will ever look at. The descriptor stays the caller's unless a lock is returned.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES: both mean "held"
        return None
    inode = inode_of_fd(fd)
    if inode_of_path(path) != inode:
        raise StaleFileError(path)
    _held.add(inode)
    return FileLock(fd, path, inode)


class StaleFileError(Exception):
    """The file was replaced between opening and locking it; open it again."""


def held_by_this_process(path: Path) -> bool:
    """Whether this process already locked the file; asked before opening it (see the top)."""
    return inode_of_path(path) in _held


def inode_of_fd(fd: int) -> tuple[int, int]:
    """Return (device, inode) of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def inode_of_path(path: Path) -> tuple[int, int] | None:
    """Return (device, inode) of the file at ``path``; None when there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def still_at(path: Path, inode: tuple[int, int] | None) -> bool:
    """Whether ``path`` is still the file of this (device, inode)."""
    try:
        return inode_of_path(path) == inode
    except OSError:
        return False


def holder_pid(fd: int) -> int | None:
    """Return the process that holds the lock, as this PID namespace sees it (None: it cannot)."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


# --- the run directory -----------------------------------------------------------------------


def prepare_run_dir(run_dir: Path) -> None:
    """Create the run directory (0700) or check that it is private and ours. Raises RunDirError."""
    if not run_dir.is_absolute() or len(os.fsencode(run_dir)) > run_dir_bytes_max:
        raise RunDirError(
            f"run directory {run_dir} is not an absolute path of at most {run_dir_bytes_max} bytes",
            "choose a shorter run_dir: AF_UNIX socket paths end at 108 bytes",
        )
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = run_dir.lstat()
    except OSError as error:
        raise RunDirError(
            f"run directory {run_dir} cannot be made: {error.strerror}",
            "set run_dir to a directory this user may create",
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise RunDirError(
            f"run directory {run_dir} is no directory", "set run_dir to the directory itself"
        )
    if status.st_uid != os.geteuid():
        raise RunDirError(
            f"run directory {run_dir} belongs to uid {status.st_uid}, this process is uid "
            f"{os.geteuid()}",
            "run as its owner or choose another run_dir: its owner could replace our sockets",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o027:
        raise RunDirError(
            f"run directory {run_dir} has mode {mode:04o}; others could reach or replace our "
            "sockets",
            f"chmod 0700 {run_dir}",
        )


def lock_run_dir(run_dir: Path) -> FileLock:
    """Take the run directory's lock and write this process into it.

    Raises RunDirError: it names the holder, or says why the file cannot be used.
    """
    try:
        return _lock_file(run_dir, run_dir / LOCK_FILE)
    except OSError as error:
        raise RunDirError(
            f"lock file {run_dir / LOCK_FILE} cannot be used: {error.strerror}",
            "remove it if it is not a plain file of this user, make sure that the directory can "
            "be written and has space, or set another run_dir",
        ) from error


def sidecar_of(run_dir: Path) -> str:
    """Say who serves a run directory, "" for nobody; takes no lock.

    Its own file is never opened: closing it would drop this process's lock.
    """
    path = run_dir / LOCK_FILE
    if held_by_this_process(path):
        return "this process"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        return _read_holder(fd) if holder_pid(fd) is not None else ""
    finally:
        os.close(fd)


def _lock_file(run_dir: Path, path: Path) -> FileLock:
    for _ in range(lock_attempts_max):
        if held_by_this_process(path):
            raise _held_error(run_dir, "this process")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            lock = try_lock(fd, path)
        except StaleFileError:
            os.close(fd)
            continue
        except OSError:
            os.close(fd)
            raise
        if lock is None:
            holder = _read_holder(fd)
            os.close(fd)
            raise _held_error(run_dir, holder)
        try:
            _write_holder(fd)
        except OSError:
            lock.release()
            raise
        return lock
    raise RunDirError(
        f"{path} is replaced again and again", "stop whatever deletes files in the run directory"
    )


def remove_stale_sockets(run_dir: Path) -> list[str]:
    """Remove sockets that former epochs left; only the lock's holder may call it.

    Raises RunDirError: something under a socket's name cannot be removed.
    """
    removed: list[str] = []
    fixed = [run_dir / ATTACH_SOCKET, http_path(run_dir)]
    for path in [*fixed, *sorted(run_dir.glob("ctl-*.sock"))]:
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise RunDirError(
                f"{path} is in the way of a socket and cannot be removed: {error.strerror}",
                "remove it by hand or set another run_dir",
            ) from error
        removed.append(path.name)
    return removed


def _held_error(run_dir: Path, holder: str) -> RunDirError:
    return RunDirError(
        f"run directory {run_dir} is in use by another sidecar ({holder})",
        "stop that one or set another run_dir",
    )


def _write_holder(fd: int) -> None:
    body = json.dumps(describe_self()).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, body + b"\n", 0)


def _read_holder(fd: int) -> str:
    """Return the holder's line from the lock file; it may be mid-write, then what there is."""
    text = os.pread(fd, holder_bytes_max, 0).decode(errors="replace").strip()
    try:
        facts = json.loads(text)
    except ValueError:
        return f"pid {holder_pid(fd) or 'unknown'}"
    if not isinstance(facts, dict):
        return f"pid {holder_pid(fd) or 'unknown'}"
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def remove_socket(path: Path) -> None:
    """Remove a socket that is served no more; where that fails, the next start removes it.

    (The run directory's file system may be read-only by now: no reason to end badly.)
    """
    with contextlib.suppress(OSError):
        path.unlink()

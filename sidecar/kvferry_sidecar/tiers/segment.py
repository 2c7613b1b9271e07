"""The pool's shared-memory segment: opened once, locked, sized, and attached warm or made new.

Order matters: the lock proves that the former sidecar's writes have ended, so it comes before
anything is mapped. The descriptor stays open until the process ends (locks.py says why).
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

import posix_ipc
from kvferry_native import Pool, PoolFormatError
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar import locks
from kvferry_sidecar.errors import PoolSegmentError

SHM_DIR = Path("/dev/shm")  # noqa: S108 - where shm_open(3) puts segments on Linux
_REMEDY_SPACE = (
    "lower tiers.host.bytes, or enlarge the file system (mount -o remount,size=..., docker "
    "--shm-size, or an emptyDir of medium Memory) and the container's memory limit"
)


@dataclass(slots=True, eq=False)
class PoolSegment:
    """The locked segment and the pool in it. ``warm``: committed objects were kept."""

    pool: Pool
    lock: locks.FileLock
    segment_bytes: int
    warm: bool

    def close(self) -> None:
        """Unmap, then drop the lock; the segment stays for the next sidecar."""
        self.pool.close()
        self.lock.release()


def open_pool(
    name: str,
    *,
    arena_bytes: int,
    slab_bytes: int,
    keys_max: int,
    epoch: int,
    threads: int,
    log: Log,
) -> PoolSegment:
    """Open the segment ``/dev/shm/<name>`` and the pool in it, warm when it fits.

    ``threads`` touch the pages of a new pool. Raises PoolSegmentError: held by another sidecar,
    no space, or not ours.
    """
    segment_bytes = Pool.segment_bytes_for(arena_bytes, slab_bytes, keys_max)
    lock = _lock(name)
    try:
        pool = _attach_warm(lock, segment_bytes, slab_bytes, epoch, log)
        warm = pool is not None
        if pool is None:
            _size(lock, segment_bytes)
            pool = Pool.create(lock.fd, segment_bytes, slab_bytes, keys_max, epoch, threads)
    except BaseException:
        lock.release()
        raise
    return PoolSegment(pool, lock, segment_bytes, warm)


def _lock(name: str) -> locks.FileLock:
    path = SHM_DIR / name
    for _ in range(locks.lock_attempts_max):
        if locks.held_by_this_process(path):
            raise _held(path, "this process")
        try:
            fd = posix_ipc.SharedMemory(f"/{name}", posix_ipc.O_CREAT, mode=0o600).fd
        except (OSError, ValueError, posix_ipc.Error) as error:
            raise PoolSegmentError(
                f"the pool segment {path} cannot be opened: {error}",
                "choose another tiers.host.name, or remove the file if it is nobody's",
            ) from error
        try:
            lock = locks.try_lock(fd, path)
        except locks.StaleFileError:
            os.close(fd)
            continue
        if lock is None:
            pid = locks.holder_pid(fd)
            os.close(fd)
            raise _held(path, f"pid {pid}" if pid else "a process of another PID namespace")
        return lock
    raise PoolSegmentError(
        f"{path} is replaced again and again", "stop whatever deletes files there"
    )


def _held(path: Path, holder: str) -> PoolSegmentError:
    return PoolSegmentError(
        f"the pool segment {path} is in use by another sidecar ({holder})",
        "stop that one or give this one its own tiers.host.name",
    )


def _attach_warm(
    lock: locks.FileLock, segment_bytes: int, slab_bytes: int, epoch: int, log: Log
) -> Pool | None:
    """Return the pool that a former sidecar left, or None when there is none to keep."""
    found_bytes = os.fstat(lock.fd).st_size
    if found_bytes == 0:
        return None
    if found_bytes != segment_bytes:
        _log_replaced(log, lock, f"it has {found_bytes} bytes, configured are {segment_bytes}")
        return None
    try:
        pool = Pool.attach(lock.fd, epoch)
    except PoolFormatError as error:
        _log_replaced(log, lock, str(error))
        return None
    if pool.slab_bytes != slab_bytes:
        reason = f"its slabs have {pool.slab_bytes} bytes, configured are {slab_bytes}"
        pool.close()
        _log_replaced(log, lock, reason)
        return None
    return pool


def _log_replaced(log: Log, lock: locks.FileLock, reason: str) -> None:
    log.warning("pool replaced: its objects are lost", segment=str(lock.path), reason=reason)


def _size(lock: locks.FileLock, segment_bytes: int) -> None:
    """Give the segment its bytes now: a page that is missing later would be SIGBUS."""
    try:
        os.ftruncate(lock.fd, 0)
        os.posix_fallocate(lock.fd, 0, segment_bytes)
    except OSError as error:
        with contextlib.suppress(OSError):  # what was taken so far is given back
            os.ftruncate(lock.fd, 0)
        with contextlib.suppress(FileNotFoundError):
            lock.path.unlink()
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise PoolSegmentError(
                f"the pool segment {lock.path} cannot be sized: {error.strerror}",
                "check the file system of /dev/shm",
            ) from error
        space = os.statvfs(SHM_DIR)
        free_bytes = space.f_bavail * space.f_frsize
        raise PoolSegmentError(
            f"{SHM_DIR} has no {segment_bytes} bytes for the pool ({free_bytes} are free)",
            _REMEDY_SPACE,
        ) from error

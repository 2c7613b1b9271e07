"""The pool's shared-memory segment: opened once, locked, sized, and attached warm or made new.

Order matters: the lock proves that the former sidecar's writes have ended, so it comes before
anything is mapped. The descriptor stays open until the process ends (locks.py says why).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import posix_ipc
from kvferry_native import Pool, PoolFormatError
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar import locks
from kvferry_sidecar.errors import PoolSegmentError
from kvferry_sidecar.tiers import hugepages

SHM_DIR = Path("/dev/shm")  # noqa: S108 - where shm_open(3) puts segments on Linux
_REMEDY_SPACE = (
    "lower tiers.host.bytes, or enlarge the file system (mount -o remount,size=..., docker "
    "--shm-size, or an emptyDir of medium Memory) and the container's memory limit"
)
_REMEDY_FILE_LIMIT = "raise ulimit -f (LimitFSIZE= of a systemd unit) or lower tiers.host.bytes"
_REMEDY_MAPPING = "raise ulimit -v (LimitAS= of a systemd unit) or lower tiers.host.bytes"
_CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
_CGROUP_DIR = Path("/sys/fs/cgroup")


@dataclass(slots=True, eq=False)
class PoolSegment:
    """The locked segment and the pool in it.

    ``warm``: committed objects were kept; to find them took ``scan_s``.
    """

    pool: Pool
    lock: locks.FileLock
    segment_bytes: int
    warm: bool
    scan_s: float = 0.0

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
    hugepages_dir: str = "",
) -> PoolSegment:
    """Open the segment ``/dev/shm/<name>`` and the pool in it, warm when it fits.

    ``threads`` touch the pages of a new pool. ``hugepages_dir``: a hugetlbfs mount that has the
    segment instead. Raises PoolSegmentError: held by another sidecar, no space, or not ours.
    """
    segment_bytes = Pool.segment_bytes_for(arena_bytes, slab_bytes, keys_max)
    path = segment_path(name, hugepages_dir)
    if hugepages_dir:
        page = hugepages.page_bytes(path.parent)
        segment_bytes = -(-segment_bytes // page) * page
    lock = _lock(path)
    try:
        began_s = time.monotonic()
        pool, unfit = _attach_warm(lock, segment_bytes, slab_bytes, epoch, log)
        scan_s = time.monotonic() - began_s
        warm = pool is not None
        if pool is None:
            log.info(f"reserving {segment_bytes} bytes", segment=str(lock.path))
            _check_fits(lock, segment_bytes)
            if unfit:
                log.warning(
                    "pool replaced: its objects are lost", segment=str(lock.path), reason=unfit
                )
            _size(lock, segment_bytes)
            try:
                pool = Pool.create(lock.fd, segment_bytes, slab_bytes, keys_max, epoch, threads)
            except (OSError, MemoryError) as error:
                _drop(lock)
                raise _unmappable(lock, segment_bytes, error) from error
        elif (kept := pool.stats().keys_max) != keys_max:
            log.warning(
                "the kept pool has another keys_max than configured: remove the segment to change",
                segment=str(lock.path),
                keys_max=kept,
                keys_max_configured=keys_max,
            )
    except BaseException:
        lock.release()
        raise
    return PoolSegment(pool, lock, segment_bytes, warm, scan_s)


def segment_path(name: str, hugepages_dir: str = "") -> Path:
    """Return the file of a segment."""
    return (Path(hugepages_dir) if hugepages_dir else SHM_DIR) / name


def held_bytes(path: Path) -> int:
    """Return the memory that a segment has by now; 0 for none."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _open(path: Path) -> int:
    if path.parent == SHM_DIR:
        fd: int = posix_ipc.SharedMemory(f"/{path.name}", posix_ipc.O_CREAT, mode=0o600).fd
        return fd
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _lock(path: Path) -> locks.FileLock:
    for _ in range(locks.lock_attempts_max):
        if locks.held_by_this_process(path):
            raise _held(path, "this process")
        try:
            fd = _open(path)
        except (OSError, ValueError, posix_ipc.Error) as error:
            raise PoolSegmentError(
                f"the pool segment {path} cannot be opened: {error}",
                "choose another tiers.host.name, or remove the file if it is nobody's",
            ) from error
        try:
            _check_private(fd, path)
            lock = locks.try_lock(fd, path)
        except locks.StaleFileError:
            os.close(fd)
            continue
        except BaseException:
            os.close(fd)
            raise
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


def _check_private(fd: int, path: Path) -> None:
    """Refuse a file that another user made or can open: the cache would be theirs to alter."""
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not mode & 0o077:
        return
    kind = "file" if stat.S_ISREG(status.st_mode) else "special file"
    raise PoolSegmentError(
        f"the pool segment {path} is a {kind} of uid {status.st_uid} with mode {mode:04o}; it must "
        f"be a plain file of uid {os.geteuid()} that only its owner can open",
        "remove it or choose another tiers.host.name",
    )


def _attach_warm(
    lock: locks.FileLock, segment_bytes: int, slab_bytes: int, epoch: int, log: Log
) -> tuple[Pool | None, str]:
    """Return the pool that a former sidecar left, or None and why what is there cannot be kept."""
    found_bytes = os.fstat(lock.fd).st_size
    if found_bytes == 0:
        return None, ""
    if found_bytes != segment_bytes:
        return None, f"it has {found_bytes} bytes, configured are {segment_bytes}"
    # Ten million keys take a second or so, in one call.
    log.info("scanning the pool that a former sidecar left", segment=str(lock.path))
    try:
        pool = Pool.attach(lock.fd, epoch)
    except PoolFormatError as error:
        return None, str(error)
    except (OSError, MemoryError) as error:
        raise _unmappable(lock, segment_bytes, error) from error
    if pool.slab_bytes != slab_bytes:
        reason = f"its slabs have {pool.slab_bytes} bytes, configured are {slab_bytes}"
        pool.close()
        return None, reason
    return pool, ""


def _check_fits(lock: locks.FileLock, segment_bytes: int) -> None:
    """Raise PoolSegmentError when the bytes cannot be had; what the segment holds is untouched."""
    found = os.fstat(lock.fd)
    try:
        _check_limits(segment_bytes, pages_of_memory=lock.path.parent == SHM_DIR)
        if segment_bytes > _free_bytes(lock.path) + found.st_blocks * 512:
            raise _no_space(lock.path, segment_bytes, found.st_blocks * 512)
        try:  # takes addresses, but no memory
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            mmap.mmap(-1, segment_bytes, flags=flags, prot=mmap.PROT_READ).close()
        except OSError as error:
            raise _unmappable(lock, segment_bytes, error) from error
    except PoolSegmentError:
        if found.st_size == 0:
            _drop(lock)
        raise


def _check_limits(segment_bytes: int, *, pages_of_memory: bool) -> None:
    file_bytes_max, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_bytes_max != resource.RLIM_INFINITY and segment_bytes > file_bytes_max:
        raise PoolSegmentError(
            f"the pool's segment of {segment_bytes} bytes is over this process's file size limit "
            f"of {file_bytes_max} bytes (ulimit -f)",
            _REMEDY_FILE_LIMIT,
        )
    memory = _cgroup_memory_max() if pages_of_memory else None  # huge ones are counted apart
    if memory is not None and segment_bytes > memory[0]:
        raise PoolSegmentError(
            f"the pool's segment of {segment_bytes} bytes is over the memory limit of "
            f"{memory[0]} bytes ({memory[1]}): the kernel would kill this process",
            "raise the container's memory limit (docker --memory, resources.limits.memory, "
            "MemoryMax= of a systemd unit) or lower tiers.host.bytes",
        )


def _cgroup_memory_max() -> tuple[int, Path] | None:
    """Return the least memory limit of this process's cgroup and those above it, and its file.

    A container without a cgroup namespace reads its host's path there; the walk up ends at the
    mount's root, which then is the container's own.
    """
    try:
        lines = _CGROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:
        return None
    found: list[tuple[int, Path]] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            root, name = _CGROUP_DIR, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = _CGROUP_DIR / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = Path(group.lstrip("/"))
        for one in (folder, *folder.parents):
            file = root / one / name
            with contextlib.suppress(OSError, ValueError):  # not there; "max"
                found.append((int(file.read_text()), file))
    return min(found, default=None)


def _size(lock: locks.FileLock, segment_bytes: int) -> None:
    """Give the segment its bytes now: a page that is missing later would be SIGBUS."""
    try:
        os.ftruncate(lock.fd, 0)
        os.posix_fallocate(lock.fd, 0, segment_bytes)
    except OSError as error:
        _drop(lock)
        if error.errno == errno.EFBIG:
            raise PoolSegmentError(
                f"the pool segment {lock.path} of {segment_bytes} bytes is larger than a file may "
                "be here (ulimit -f, or the file system's own limit)",
                _REMEDY_FILE_LIMIT,
            ) from error
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise PoolSegmentError(
                f"the pool segment {lock.path} cannot be sized: {error.strerror}",
                f"check the file system of {lock.path.parent}",
            ) from error
        raise _no_space(lock.path, segment_bytes, 0) from error


def _drop(lock: locks.FileLock) -> None:
    """Give back what the segment took, and remove it: it holds no pool."""
    with contextlib.suppress(OSError):
        os.ftruncate(lock.fd, 0)
    with contextlib.suppress(FileNotFoundError):
        lock.path.unlink()


def _free_bytes(path: Path) -> int:
    folder = path.parent
    if folder != SHM_DIR:
        return hugepages.free_bytes(folder, hugepages.page_bytes(folder))
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def _no_space(path: Path, segment_bytes: int, held_bytes: int) -> PoolSegmentError:
    held = f", {held_bytes} are in the segment that it would replace" if held_bytes else ""
    folder, free_bytes = path.parent, _free_bytes(path)
    remedy = _REMEDY_SPACE
    if folder != SHM_DIR:
        missing_bytes = segment_bytes - free_bytes - held_bytes
        remedy = hugepages.remedy(missing_bytes, hugepages.page_bytes(folder))
    return PoolSegmentError(
        f"{folder} has no {segment_bytes} bytes for the pool ({free_bytes} are free{held})",
        remedy,
    )


def _unmappable(lock: locks.FileLock, segment_bytes: int, error: Exception) -> PoolSegmentError:
    why = error.strerror if isinstance(error, OSError) else "out of memory"
    return PoolSegmentError(
        f"the pool segment {lock.path} of {segment_bytes} bytes cannot be mapped: {why}",
        _REMEDY_MAPPING,
    )

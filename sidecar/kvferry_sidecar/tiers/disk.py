"""One disk path as a store: a data file, its index, and what to do when either fails.

A read that fails is a miss, and its key is forgotten; a write that fails, or too many failed
reads, mean that the disk is full, read-only or broken: the tier is switched off and says so. What
is on the disk outlives the process; another size or format makes a clean start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import lmdb
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar import locks
from kvferry_sidecar.tiers.disk_files import BLOCK_BYTES, DataFile
from kvferry_sidecar.tiers.disk_index import DAMAGED, DiskIndex, Place, Row
from kvferry_sidecar.tiers.store import Item, Listed, Source, StoreError
from kvferry_sidecar.tiers.value import payload_bytes_of

FOLDER = "kvferry"  # within the configured path
REGIONS_MIN = 8
REGION_BYTES_MIN = 1 << 20
REGION_BYTES_MAX = 64 << 20
CLOSED = "closed"  # in the file ``session``, else the boot that the index belongs to
read_errors_max = 16


class DiskStore:
    """Objects on one path. Raises StoreError when the path cannot be used."""

    source: Source = "disk"
    batch_max = 512

    def __init__(
        self, path: Path, *, total_bytes: int, object_bytes: int, free_bytes_min: int, log: Log
    ) -> None:
        self.name = f"disk {path}"
        region_bytes = region_bytes_for(total_bytes, object_bytes)
        self.value_bytes_max = region_bytes
        self._region_bytes = region_bytes
        self._read_errors = count(1)
        regions = total_bytes // region_bytes
        with contextlib.ExitStack() as stack, _told(path):
            folder = path / FOLDER
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_private(folder)
            stack.callback(_lock(folder / "lock").release)
            data = folder / "objects"
            _check_free(data, total_bytes, free_bytes_min)
            self._file = DataFile(data, regions * region_bytes)
            stack.callback(self._file.close)
            self._index = _open_index(folder, region_bytes // BLOCK_BYTES, regions, log)
            self._session = folder / "session"
            if not self._index.warm:
                log.info("disk tier starts empty", path=str(path))
            self._stack = stack.pop_all()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See Store."""
        with _told_later():
            return self._index.has(keys)

    def get(self, items: Sequence[Item]) -> list[bytes | None]:
        """See Store. Neighbours on the disk are read by one system call."""
        with _told_later():
            rows = self._index.pin([item.key for item in items])
            held = [row.place for row in rows if row is not None]
            try:
                return self._read(items, rows)
            finally:
                self._index.unpin(held)

    def put(self, items: Sequence[Item], headers: Sequence[bytes]) -> list[bool]:
        """See Store."""
        with _told_later():
            places = self._index.allocate([_blocks(item) for item in items])
            held = [place for place in places if place is not None]
            try:
                for first, last in _runs(items, places):
                    payloads = [item.payload() for item in items[first:last]]
                    self._file.write(payloads, self._offset(places[first]))
                self._commit(items, places, headers)
            finally:
                self._index.unpin(held)
        return [place is not None for place in places]

    def remove(self, keys: Sequence[bytes]) -> None:
        """See Store."""
        with _told_later():
            self._index.remove(keys)

    def listed(self, after: bytes, most: int) -> list[Listed]:
        """See Lists."""
        with _told_later():
            return [
                Listed(key, row.whose, row.stored_s, payload_bytes_of(row.header))
                for key, row in self._index.rows_after(after, most)
            ]

    def facts(self) -> dict[str, str | int]:
        """See Store."""
        sector = self._file.sector_bytes
        return {
            "direct": f"sectors of {sector} bytes" if sector else "no, through the page cache",
            "total_bytes": self._index.regions * self._region_bytes,
            "region_bytes": self._region_bytes,
            "regions_free": self._index.regions_free(),
            "regions_given_up": self._index.given_up,
            "objects": self._index.objects(),
        }

    def close(self) -> None:
        """See Store."""
        with contextlib.suppress(lmdb.Error, OSError), self._stack:  # the disk may have failed
            self._index.close()
            _write(self._session, CLOSED)

    def _read(self, items: Sequence[Item], rows: list[Row | None]) -> list[bytes | None]:
        places = [None if row is None else row.place for row in rows]
        headers = [None if row is None else row.header for row in rows]
        for first, last in _runs(items, places):
            payloads = [item.payload() for item in items[first:last]]
            try:
                self._file.read(payloads, self._offset(places[first]))
            except OSError as error:
                headers[first:last] = [None] * (last - first)
                self._index.remove([item.key for item in items[first:last]])
                if next(self._read_errors) >= read_errors_max:
                    text = f"{read_errors_max} reads failed, the last with: {error}"
                    raise StoreError(text, final=True) from error
        return headers

    def _commit(
        self, items: Sequence[Item], places: Sequence[Place | None], headers: Sequence[bytes]
    ) -> None:
        now_s = int(time.time())
        rows = [
            (item.key, Row(place, header, item.whose, now_s))
            for item, place, header in zip(items, places, headers, strict=True)
            if place is not None
        ]
        if rows:
            self._index.commit(rows)

    def _offset(self, place: Place | None) -> int:
        assert place is not None, "runs consist of objects that have a place"
        return place.region * self._region_bytes + place.block * BLOCK_BYTES


def region_bytes_for(total_bytes: int, object_bytes: int) -> int:
    """Return the size of a region: an object of the pool fits where the path has room for 8."""
    wanted = min(max(total_bytes // (2 * REGIONS_MIN), REGION_BYTES_MIN), REGION_BYTES_MAX)
    fits = min(max(wanted, object_bytes), total_bytes // REGIONS_MIN)
    return fits // BLOCK_BYTES * BLOCK_BYTES


def _blocks(item: Item) -> int:
    return -(-item.form.payload_bytes // BLOCK_BYTES)


def _runs(items: Sequence[Item], places: Sequence[Place | None]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of the stretches that follow one another on the disk."""
    first = 0
    while first < len(places):
        last = first
        at = places[first]
        while at is not None and last < len(places) and places[last] == at:
            at = Place(at.region, at.block + _blocks(items[last]))
            last += 1
        if last > first:
            yield first, last
        first = max(last, first + 1)


def _open_index(folder: Path, region_blocks: int, regions: int, log: Log) -> DiskIndex:
    """Open the index; one that may be damaged is replaced, which forgets what was stored."""
    index, session = folder / "index", folder / "session"
    if index.exists() and _read(session) not in (CLOSED, _boot_id()):
        _replace(index, "the machine went down without closing it", log)
    _write(session, _boot_id())
    try:
        return DiskIndex(index, region_blocks, regions)
    except DAMAGED as error:
        _replace(index, str(error), log)
        return DiskIndex(index, region_blocks, regions)


def _replace(index: Path, reason: str, log: Log) -> None:
    log.warning("disk index replaced: its objects are lost", index=str(index), reason=reason)
    shutil.rmtree(index)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _write(path: Path, text: str) -> None:
    """Replace a small file, on the disk when this returns."""
    fresh = path.with_suffix(".new")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise StoreError(
            f"{folder} is of uid {status.st_uid} with mode {mode:04o}; it must be a directory of "
            f"uid {os.geteuid()} that only its owner can enter",
            final=True,
        )


def _lock(path: Path) -> locks.FileLock:
    held = StoreError(f"{path} is held by another sidecar", final=True)
    if locks.held_by_this_process(path):
        raise held
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    lock = locks.try_lock(fd, path)
    if lock is None:
        os.close(fd)
        raise held
    return lock


def _check_free(data: Path, total_bytes: int, free_bytes_min: int) -> None:
    space = os.statvfs(data.parent)
    has_bytes = data.stat().st_blocks * 512 if data.exists() else 0
    left_bytes = space.f_bavail * space.f_frsize + has_bytes - total_bytes
    if left_bytes < free_bytes_min:
        raise StoreError(
            f"{total_bytes} bytes there would leave {max(left_bytes, 0)} bytes free, at least "
            f"{free_bytes_min} are wanted: lower tiers.disk.bytes or tiers.disk.free_bytes_min",
            final=True,
        )


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, lmdb.Error, locks.StaleFileError) as error:
        raise StoreError(f"{path} cannot be used: {error}", final=True) from error


@contextlib.contextmanager
def _told_later() -> Iterator[None]:
    """Whatever fails here is a disk that is full, read-only or broken."""
    try:
        yield
    except (OSError, lmdb.Error) as error:
        raise StoreError(f"the disk failed: {error}", final=True) from error

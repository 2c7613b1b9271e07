"""What lies where on one disk path: LMDB on disk, and the regions in memory.

The data file is cut into regions. Objects are appended to the open region; when no region is
free, the one that was used least recently is given up with all its objects. So writes are
sequential, and there is nothing to fragment.

Crash rules. An object's row is committed after its bytes were written, and a region's rows are
deleted before its bytes are overwritten: whoever is killed between them leaves rows that are
right, or none. Commits are not flushed: a kill loses nothing of them, a machine that goes down
may leave a broken index. So ``session`` beside the index names the boot that it belongs to, or
says that it was closed and flushed; after any other end the index starts empty.

A reader pins the region that it reads; a region that is being given up is taken for empty.

The index has room for one object per 32 KiB of the path, and for 131,072 at least. Smaller objects
fill it before they fill the regions; then, too, a region is given up. LMDB itself must never be
full, or it could not even delete.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb

from kvferry_sidecar.tiers.disk_files import BLOCK_BYTES
from kvferry_sidecar.tiers.store import NOBODYS, Whose

INDEX_FORMAT = 2  # 1: rows without whose and since when
_PLACE = struct.Struct(">II")  # region, block within it: sorts by region
_WHOSE = struct.Struct(">16sII")  # namespace, group, seconds since 1970
_HEADER_AT = _PLACE.size + _WHOSE.size  # in a row
_REGION = struct.Struct(">I")
_AGE = struct.Struct(">Q")
_FORM = struct.Struct(">III")  # format, blocks per region, regions
# What opening a damaged index may raise.
DAMAGED = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, struct.error)
_index_bytes_min = 64 << 20
_object_bytes = 512  # of the index that one object takes at most
# LMDB copies the pages that it changes and keeps those that a reader still sees. Only addresses.
_map_slack = 4
_readers_max = 126
_read_bytes = 1 << 20


class Place(NamedTuple):
    """Where an object begins: a region, and a block of BLOCK_BYTES in it."""

    region: int
    block: int


class Row(NamedTuple):
    """One object: its place, its header as stored, and whose it is since when."""

    place: Place
    header: bytes
    whose: Whose = NOBODYS
    stored_s: int = 0


def read_through(path: Path, count: int) -> None:
    """Read so many bytes of a file. Raises OSError for what the medium does not give."""
    with path.open("rb", buffering=0) as file:
        while count > 0 and (part := file.read(min(count, _read_bytes))):
            count -= len(part)


class DiskIndex:
    """Index of one path. Every method may be called from several threads.

    Raises lmdb.Error, and OSError where the file cannot be read at the start.
    """

    def __init__(self, folder: Path, region_blocks: int, regions: int) -> None:
        self.region_blocks = region_blocks
        self.regions = regions
        self.given_up = 0
        index_bytes = max(_index_bytes_min, regions * region_blocks * BLOCK_BYTES // 64)
        self.objects_max = index_bytes // _object_bytes
        self._env = lmdb.open(
            str(folder),
            map_size=_map_slack * index_bytes,
            max_dbs=4,
            max_readers=_readers_max,
            sync=False,
        )
        try:
            self._env.reader_check()  # readers that were killed
            self._check_whole(folder)
            self._open(region_blocks, regions)
        except BaseException:
            self._env.close()
            raise
        self._lock = threading.Lock()  # pins, uses, open region
        self._growing = threading.Lock()  # one thread at a time gives regions up
        self._pins = [0] * regions
        self._dying: set[int] = set()
        self._current = -1
        self._next_block = region_blocks
        self._age = max(self._ages, default=0)
        self._free = [region for region in range(regions) if not self._ages[region]]

    def _check_whole(self, folder: Path) -> None:
        """LMDB maps its file: a page that is not there or cannot be read would end the process.

        That end (SIGBUS) would meet every process that is started instead of it, too.
        """
        pages = self._env.info()["last_pgno"] + 1
        file = folder / "data.mdb"
        file_bytes, used_bytes = file.stat().st_size, pages * self._env.stat()["psize"]
        if file_bytes < used_bytes:
            raise lmdb.CorruptedError(f"{file_bytes} bytes are fewer than its {pages} pages")
        read_through(file, used_bytes)

    def _open(self, region_blocks: int, regions: int) -> None:
        meta = self._env.open_db(b"meta")
        self._objects = self._env.open_db(b"objects")
        self._places = self._env.open_db(b"places")
        self._rows_of_regions = self._env.open_db(b"regions")
        form = _FORM.pack(INDEX_FORMAT, region_blocks, regions)
        self.warm = True
        self._ages = [0] * regions
        with self._env.begin(write=True) as txn:
            if txn.get(b"form", db=meta) != form:
                self.warm = False
                for table in (self._objects, self._places, self._rows_of_regions):
                    txn.drop(table, delete=False)
                txn.put(b"form", form, db=meta)
            for name, age in txn.cursor(self._rows_of_regions):
                region = _REGION.unpack(name)[0]
                if region >= regions:
                    raise lmdb.CorruptedError(f"region {region} of {regions}")
                self._ages[region] = _AGE.unpack(age)[0]

    # --- reading ----------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say which keys have a row."""
        with self._env.begin(db=self._objects, buffers=True) as txn:
            return [txn.get(key) is not None for key in keys]

    def pin(self, keys: Sequence[bytes]) -> list[Row | None]:
        """Look keys up; the regions of those found stay as they are until ``unpin``."""
        found: list[Row | None] = []
        with self._lock, self._env.begin(db=self._objects) as txn:
            for key in keys:
                raw = txn.get(key)
                place = Place(*_PLACE.unpack_from(raw)) if raw is not None else None
                if raw is None or place is None or place.region in self._dying:
                    found.append(None)
                    continue
                self._pins[place.region] += 1
                self._age += 1
                self._ages[place.region] = self._age
                found.append(Row(place, raw[_HEADER_AT:]))
        return found

    def rows_after(self, after: bytes, most: int) -> list[tuple[bytes, Row]]:
        """Return up to ``most`` keys and their rows, in the order of keys, behind ``after``."""
        found: list[tuple[bytes, Row]] = []
        with self._env.begin(db=self._objects) as txn:
            cursor = txn.cursor()
            more = cursor.set_range(after + b"\0")
            while more and len(found) < most:
                key, raw = cursor.item()
                namespace, group, stored_s = _WHOSE.unpack_from(raw, _PLACE.size)
                whose = Whose(namespace if any(namespace) else b"", group)
                place = Place(*_PLACE.unpack_from(raw))
                found.append((key, Row(place, raw[_HEADER_AT:], whose, stored_s)))
                more = cursor.next()
        return found

    def unpin(self, places: Iterable[Place]) -> None:
        """Undo one pin of each, or of what ``allocate`` returned."""
        with self._lock:
            for place in places:
                self._pins[place.region] -= 1

    # --- writing ----------------------------------------------------------------------------

    def allocate(self, blocks: Sequence[int]) -> list[Place | None]:
        """Take room for objects of so many blocks, in order and pinned; None: there is none.

        Objects of one call follow one another, except where a region ends.
        """
        places: list[Place | None] = []
        with self._growing:
            while self.objects() + len(blocks) > self.objects_max:
                if not self.give_up_coldest():
                    return [None] * len(blocks)
            for count in blocks:
                if self._next_block + count > self.region_blocks and not self._next_region():
                    places.append(None)
                    continue
                with self._lock:
                    places.append(Place(self._current, self._next_block))
                    self._next_block += count
                    self._pins[self._current] += 1
        return places

    def commit(self, rows: Sequence[tuple[bytes, Row]]) -> None:
        """Make objects findable whose bytes are in place."""
        with self._env.begin(write=True) as txn:
            for key, row in rows:
                place = _PLACE.pack(*row.place)
                whose = _WHOSE.pack(*row.whose, row.stored_s)
                txn.put(key, place + whose + row.header, db=self._objects)
                txn.put(place, key, db=self._places)
            for region in {row.place.region for _, row in rows}:
                age = _AGE.pack(max(1, self._ages[region]))
                txn.put(_REGION.pack(region), age, db=self._rows_of_regions)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget keys; their room is taken back with their region."""
        with self._env.begin(write=True, db=self._objects) as txn:
            for key in keys:
                txn.delete(key)

    def give_up_coldest(self) -> bool:
        """Forget the region used least recently, and whatever is in it; False: none can be."""
        with self._lock:
            idle = [
                region
                for region in range(self.regions)
                if self._ages[region]
                and not self._pins[region]
                and region != self._current
                and region not in self._dying
            ]
            if not idle:
                return False
            region = min(idle, key=self._ages.__getitem__)
            self._dying.add(region)
        try:
            self._forget(region)
        finally:
            with self._lock:
                self._dying.discard(region)
        with self._lock:
            self._ages[region] = 0
            self._free.append(region)
            self.given_up += 1
        return True

    def objects(self) -> int:
        """Number of objects."""
        with self._env.begin() as txn:
            return int(txn.stat(self._objects)["entries"])

    def regions_free(self) -> int:
        """Regions without objects."""
        return len(self._free)

    def close(self) -> None:
        """Write everything down and close."""
        self._env.sync(True)
        self._env.close()

    def _next_region(self) -> bool:
        if not self._free and not self.give_up_coldest():
            return False
        with self._lock:
            self._current = self._free.pop()
            self._next_block = 0
            self._age += 1
            self._ages[self._current] = self._age
        return True

    def _forget(self, region: int) -> None:
        prefix = _REGION.pack(region)
        with self._env.begin(write=True) as txn:
            cursor = txn.cursor(self._places)
            found = cursor.set_range(prefix)
            while found and cursor.key()[: len(prefix)] == prefix:
                place, key = cursor.item()
                row = txn.get(key, db=self._objects)
                if row is not None and row[: _PLACE.size] == place:
                    txn.delete(key, db=self._objects)
                found = cursor.delete()
            txn.delete(prefix, db=self._rows_of_regions)

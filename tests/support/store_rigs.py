"""What a store's tests need: memory like the pool's, items over it, and each store opened.

A rig opens one kind of store, can damage a stored value behind its back, and ends what it started.
"""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import redis
from kvferry_native import crc32c
from kvferry_sidecar.observe.log import get_logger
from kvferry_sidecar.slow_tiers import DEFAULTS, RemoteTierConfig
from kvferry_sidecar.tiers import value
from kvferry_sidecar.tiers.disk import DiskStore
from kvferry_sidecar.tiers.remote import open_remote
from kvferry_sidecar.tiers.remote.redis_store import PREFIX
from kvferry_sidecar.tiers.store import Form, Item, Store, memory_at
from kvferry_sidecar.tiers.store import Memory as Pool
from support.dfkv_ring import DfkvRing
from support.mooncake_master import MooncakeMaster
from support.redis_server import RedisServer

SLOT_BYTES = 512  # the pool's slots begin at multiples of this


class Memory:
    """Bytes with addresses: where a pool's payloads would lie."""

    def __init__(self, total_bytes: int = 64 << 20) -> None:
        self._map = mmap.mmap(-1, total_bytes)
        self._array = (ctypes.c_char * total_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._array)
        self.total_bytes = total_bytes
        self._next = 0

    def item(self, number: int, *shard_bytes: int, content: bytes | None = None) -> Item:
        """Return an item of its own place; with ``content`` (one byte) it is filled."""
        form = Form(shard_bytes)
        room_bytes = number % 2 * value.HEADER_BYTES  # slots of both kinds, side by side
        step = -(-(form.payload_bytes + room_bytes + 64) // SLOT_BYTES) * SLOT_BYTES
        if self._next + step > self.total_bytes:
            self._next = 0
        address = self.address + self._next
        self._next += step
        seed = number * 7 + 1
        item = Item(key_of(number), seed, address, form, room_bytes=room_bytes)
        if content is None:
            return item
        item.payload()[:] = pattern(number, form.payload_bytes, content)
        crcs, at = [], 0
        for size in shard_bytes:
            crcs.append(crc32c(item.payload()[at : at + size], seed))
            at += size
        return replace(item, crcs=tuple(crcs))

    def close(self) -> None:
        del self._array
        self._map.close()


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "little") + b"kvferry!"


def pattern(number: int, count: int, content: bytes = b"x") -> bytes:
    """Return bytes that differ from object to object and from place to place."""
    unit = number.to_bytes(6, "little") + content + b"\0"
    return (unit * (count // 8 + 1))[:count]


def put(store: Store, items: list[Item]) -> list[bool]:
    return store.put(items, [value.pack(item) for item in items])


def get(store: Store, items: list[Item]) -> list[bool]:
    """Read and verify, as the runner does; says which are hits."""
    return [crcs is not None for crcs in value.verify(store.get(items), items)]


@dataclass
class Rig(ABC):
    """One store under test."""

    store: Store
    persistent: bool = False
    memory: Memory = field(default_factory=Memory)
    slow: ClassVar[bool] = False  # starts and ends in seconds: shared by tests, and emptied

    def empty(self) -> None:
        """Forget everything that is stored; one that is made for each test has nothing."""
        assert not self.slow, "a rig that tests share says how it is emptied"

    def damage(self, item: Item) -> None:
        """Make what is stored under the item's key another object's bytes."""
        header = value.pack(item)
        number = int.from_bytes(item.key[:8], "little")
        wrong = self.memory.item(number, *item.form.shard_bytes, content=b"y")
        self.store.remove([item.key])
        assert self.store.put([Item(item.key, item.seed, wrong.address, item.form)], [header])

    @abstractmethod
    def reopen(self) -> None:
        """Open the store anew, as the next process would."""

    def close(self) -> None:
        self.store.close()
        self.memory.close()


class DiskRig(Rig):
    """The disk store in a directory."""

    def __init__(self, path: Path, total_bytes: int = 64 << 20, **fields: int) -> None:
        self.path = path
        self.total_bytes = total_bytes
        self.fields = fields
        super().__init__(open_disk(path, total_bytes, **fields), persistent=True)

    def reopen(self) -> None:
        self.store.close()
        self.store = open_disk(self.path, self.total_bytes, **self.fields)

    def damage(self, item: Item) -> None:
        with (self.path / "kvferry" / "objects").open("r+b") as file:
            data = file.read()
            at = data.index(pattern_of(item)[:4096])
            file.seek(at + len(pattern_of(item)) // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))


class RemoteRig(Rig):
    """A server of its own, and the store over it."""

    def __init__(self, server: RedisServer | MooncakeMaster, **changes: Any) -> None:
        self.server = server
        server.start()
        memory = Memory()
        config = remote_config(server.url, **changes)
        pool = Pool(memory.address, memory.total_bytes)
        self._open = lambda: open_remote(config, 5.0, pool)
        super().__init__(self._open(), persistent=True, memory=memory)

    def reopen(self) -> None:
        self.store.close()
        self.store = self._open()

    def close(self) -> None:
        super().close()
        self.server.kill()


class RedisRig(RemoteRig):
    """Redis."""

    def __init__(self, folder: Path) -> None:
        super().__init__(RedisServer(folder))

    def damage(self, item: Item) -> None:
        with redis.Redis(port=self.server.port, protocol=2) as client:
            name = PREFIX + item.key
            stored = bytearray(client.get(name))
            stored[-item.form.payload_bytes // 2] ^= 1
            client.set(name, bytes(stored))


class MooncakeRig(RemoteRig):
    """A Mooncake master, and a store that brings the only segment: it keeps nothing by itself."""

    slow = True

    def __init__(self, folder: Path) -> None:
        super().__init__(MooncakeMaster(folder), segment_bytes=64 << 20)
        self.persistent = False

    def empty(self) -> None:
        assert self.store._connected().remove_all(True) >= 0


class DfkvRig(Rig):
    """The stand-in library, compiled for the test, and the store over it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.ring = DfkvRing(folder)
        memory = Memory()
        config = remote_config(self.ring.url, library=self.ring.library, **changes)
        self._open = lambda: open_remote(config, 5.0, Pool(memory.address, memory.total_bytes))
        super().__init__(self._open(), persistent=True, memory=memory)

    def reopen(self) -> None:
        self.store.close()
        self.store = self._open()

    def damage(self, item: Item) -> None:
        path = self.ring.store / item.key.hex()
        stored = bytearray(path.read_bytes())
        stored[-item.form.payload_bytes // 2] ^= 1
        path.write_bytes(stored)


class RealDfkvRig(Rig):
    """A cluster of the operator's, given by options of pytest; what is stored there is removed."""

    library: ClassVar[str] = ""
    url: ClassVar[str] = ""
    slow = True

    def __init__(self, _folder: Path) -> None:
        memory = Memory()
        config = remote_config(self.url, library=self.library)
        self._open = lambda: open_remote(config, 5.0, Pool(memory.address, memory.total_bytes))
        super().__init__(self._open(), persistent=True, memory=memory)

    def reopen(self) -> None:
        self.store.close()
        self.store = self._open()

    def empty(self) -> None:
        for first in range(0, 1024, 256):
            self.store.remove([key_of(number) for number in range(first, first + 256)])


def remote_config(url: str, **changes: Any) -> RemoteTierConfig:
    """Return the settings of a remote tier, with some changed."""
    fields = {
        name.removeprefix("tiers.remote."): value
        for name, value in DEFAULTS.items()
        if name.startswith("tiers.remote.")
    }
    return RemoteTierConfig(**(fields | {"url": url} | changes))


def pattern_of(item: Item) -> bytes:
    """Return what ``Memory.item`` filled it with."""
    number = int.from_bytes(item.key[:8], "little")
    return pattern(number, item.form.payload_bytes)


def open_disk(
    path: Path, total_bytes: int, *, object_bytes: int = 1 << 20, free_bytes_min: int = 0
) -> DiskStore:
    return DiskStore(
        path,
        total_bytes=total_bytes,
        object_bytes=object_bytes,
        free_bytes_min=free_bytes_min,
        log=get_logger("test"),
    )


@contextmanager
def opened(rig: Rig) -> Iterator[Rig]:
    """Close the rig whatever happens."""
    try:
        yield rig
    finally:
        rig.close()


def verify_memory(item: Item) -> bool:
    """Whether the item's memory holds what was stored under its key."""
    return bytes(memory_at(item.address, item.form.payload_bytes)) == pattern_of(item)

"""Mooncake Store: objects go straight between the registered pool and the owners' segments.

What the library does, and what is done about it here:

* ``setup`` and ``close`` hold the GIL, up to 90 s when the master does not answer: everything in
  this process would stand still. So a child process tries the master first, and ``close`` is left
  out when the master failed at last (the process's end does the same).
* Other calls take seconds when the master is away (4 s) or hangs (30 s), without the GIL: the
  pipeline abandons them and tries again.
* ``exists`` stays true for about 10 s after an object's owner died; the get then misses.
* It leases what a get reads (10 s by the master's default), and says when that was not enough:
  a miss. Nothing of ours is asked for beyond it: every payload is verified once it is here.
* Fewer replicas than asked for are stored without an error: they are counted here.
* A device that does not exist is looked for 22 s; here it is refused by name, before.
* Each further piece of an object costs as much as a transfer of its own (130 us over TCP): so the
  header lies right behind the payload, in the room that a slot of the pool has there. A payload
  without that room takes its header from memory of the thread that is calling.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult

from kvferry_sidecar.errors import ConfigError, MissingExtraError
from kvferry_sidecar.slow_tiers import RemoteTierConfig
from kvferry_sidecar.tiers.store import Item, Memory, Source, StoreError, memory_at
from kvferry_sidecar.tiers.value import HEADER_BYTES, VALUE_FORMAT

try:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
except ImportError as error:
    raise MissingExtraError(
        f"tiers.remote.url names Mooncake, and its client cannot be loaded: {error}",
        "pip install 'kvferry[mooncake]', and the system's libibverbs1",
    ) from error

_PREFIX = f"kvferry/{VALUE_FORMAT}b/"  # a: the header before the payload
_METADATA = "P2PHANDSHAKE"  # clients tell each other: no further service
_RPC_ERRORS = (-900, -901)  # the master is away, or did not answer
_connect_s_max = 1.0
probe_s_max = 10.0  # for a child process: it imports the library
_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Place:
    """How to reach the master, and as whom. ``device`` is empty with protocol tcp."""

    master: str
    host: str
    protocol: str
    device: str


class MooncakeStore:
    """One master. Connects at its first call, and at the start if the master is there."""

    source: Source = "external"
    batch_max = 256  # two pieces each: half of what a peer takes at once

    def __init__(self, place: Place, remote: RemoteTierConfig, pool: Memory) -> None:
        self.name = f"mooncake {place.master}"
        self.value_bytes_max = remote.value_bytes_max
        self._place = place
        self._pool = pool
        self._segment_bytes = remote.segment_bytes
        self._replicas = remote.replicas
        self._lock = threading.Lock()
        self._store: MooncakeDistributedStore | None = None
        self._answering = True
        self._short_of_replicas = 0
        self._last_refusal = 0
        # Headers without room in the pool: one block per thread that is calling.
        block_bytes = self.batch_max * HEADER_BYTES
        self._headers = mmap.mmap(-1, remote.threads * block_bytes)
        self._headers_at = _address(self._headers)
        self._blocks: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(remote.threads):
            self._blocks.put(self._headers_at + number * block_bytes)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See Store."""
        if not keys:
            return []
        return [rc == 1 for rc in self._checked(self._connected().batch_is_exist(_names(keys)))]

    def get(self, items: Sequence[Item]) -> list[bytes | None]:
        """See Store."""
        if not items:
            return []
        store, block = self._connected(), self._blocks.get()
        try:
            places = _header_places(items, block)
            pointers, sizes = _pieces(items, places)
            keys = _names([item.key for item in items])
            codes = self._checked(store.batch_get_into_multi_buffers(keys, pointers, sizes))
            return [
                _header(place, code, item)
                for place, code, item in zip(places, codes, items, strict=True)
            ]
        finally:
            self._blocks.put(block)

    def put(self, items: Sequence[Item], headers: Sequence[bytes]) -> list[bool]:
        """See Store."""
        if not items:
            return []
        store, block = self._connected(), self._blocks.get()
        try:
            places = _header_places(items, block)
            for place, header in zip(places, headers, strict=True):
                ctypes.memmove(place, header, HEADER_BYTES)
            pointers, sizes = _pieces(items, places)
            keys, config = _names([item.key for item in items]), ReplicateConfig()
            config.replica_num = self._replicas
            codes = self._checked(store.batch_put_from_multi_buffers(keys, pointers, sizes, config))
        finally:
            self._blocks.put(block)
        stored = [code == 0 for code in codes]
        self._last_refusal = min((code for code in codes if code), default=self._last_refusal)
        if self._replicas > 1:
            self._count_replicas(store, [key for key, ok in zip(keys, stored, strict=True) if ok])
        return stored

    def remove(self, keys: Sequence[bytes]) -> None:
        """See Store."""
        if keys:
            # By force: a read has leased them, and they are known to be bad.
            self._checked(self._connected().batch_remove(_names(keys), True))

    def facts(self) -> dict[str, str | int]:
        """See Store."""
        return {
            "transport": self._place.protocol if self._store is not None else "not connected",
            "device": self._place.device,
            "host": self._place.host,
            "segment_bytes": self._segment_bytes,
            "replicas": self._replicas,
            "objects_short_of_replicas": self._short_of_replicas,
            "last_refusal": self._last_refusal,
        }

    def close(self) -> None:
        """See Store. Raises StoreError when closing would hang this process."""
        if self._store is None:
            return
        if not self._answering:
            raise StoreError("the master does not answer: the process's end closes the store")
        self._store.close()
        self._store = None

    def connect(self) -> None:
        """Connect and register the pool. Raises StoreError when the master does not answer."""
        with self._lock:
            if self._store is not None:
                return
            _try_master(self._place)
            store = MooncakeDistributedStore()
            place = self._place
            code = store.setup(
                place.host,
                _METADATA,
                self._segment_bytes,
                0,
                place.protocol,
                place.device,
                place.master,
            )
            if code:
                raise StoreError(f"setup at {place.master} over {place.protocol} ended with {code}")
            for address, count in (
                (self._pool.address, self._pool.total_bytes),
                (self._headers_at, len(self._headers)),
            ):
                if code := store.register_buffer(address, count):
                    raise StoreError(
                        f"{count} bytes cannot be registered with {place.protocol}: {code}; raise "
                        "the memory that may be locked (ulimit -l)"
                    )
            self._store = store

    def _connected(self) -> MooncakeDistributedStore:
        if self._store is None:
            self.connect()
        return self._store

    def _checked(self, codes: list[int]) -> list[int]:
        """Return the codes; raises StoreError when the master did not answer."""
        failed = [code for code in codes if code in _RPC_ERRORS]
        self._answering = not failed
        if failed:
            raise StoreError(f"the master {self._place.master} does not answer ({failed[0]})")
        return codes

    def _count_replicas(self, store: MooncakeDistributedStore, keys: list[str]) -> None:
        found = store.batch_get_replica_desc(keys) if keys else {}
        short = sum(len(found.get(key, ())) < self._replicas for key in keys)
        self._short_of_replicas += short


def open_mooncake(remote: RemoteTierConfig, parts: SplitResult, pool: Memory) -> MooncakeStore:
    """Return the store of mooncake://MASTER:PORT. A device that is not there is refused."""
    if not parts.hostname or not parts.port:
        raise ConfigError(
            f"tiers.remote.url {remote.url!r} names no master", "write mooncake://MASTER:PORT"
        )
    if remote.protocol == "rdma" and not (_DEVICES / (remote.device or "-")).is_dir():
        there = sorted(path.name for path in _DEVICES.glob("*"))
        raise ConfigError(
            f"tiers.remote.device {remote.device!r} is not there for protocol rdma",
            f"name one of {there}, or use tiers.remote.protocol = tcp",
        )
    host = remote.host or _own_address(parts.hostname, parts.port)
    device = remote.device if remote.protocol == "rdma" else ""
    place = Place(f"{parts.hostname}:{parts.port}", host, remote.protocol, device)
    return MooncakeStore(place, remote, pool)


def _try_master(place: Place) -> None:
    """Ask the master from another process: here a master that hangs would stop everything."""
    host, _, port = place.master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _connect_s_max).close()
        subprocess.run(
            [sys.executable, "-m", "kvferry_sidecar.tiers.remote.mooncake_probe", place.master],
            check=True,
            timeout=probe_s_max,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StoreError(f"the master {place.master} does not answer: {error}") from error


def _own_address(host: str, port: int) -> str:
    """Return the address that this node has towards the master."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"tiers.remote.url: there is no way to {host}: {error}",
            "correct the URL, or give this node's own address with tiers.remote.host",
        ) from error


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _names(keys: Sequence[bytes]) -> list[str]:
    return [_PREFIX + key.hex() for key in keys]


def _header_places(items: Sequence[Item], block: int) -> list[int]:
    """Return the address of each object's header: right behind its payload, or in ``block``."""
    return [
        item.address + item.form.payload_bytes
        if item.room_bytes >= HEADER_BYTES
        else block + number * HEADER_BYTES
        for number, item in enumerate(items)
    ]


def _pieces(
    items: Sequence[Item], places: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return addresses and sizes per object: payload and header, as one piece where they touch."""
    pointers, sizes = [], []
    for item, place in zip(items, places, strict=True):
        payload_bytes = item.form.payload_bytes
        if place == item.address + payload_bytes:
            pointers.append([item.address])
            sizes.append([payload_bytes + HEADER_BYTES])
        else:
            pointers.append([item.address, place])
            sizes.append([payload_bytes, HEADER_BYTES])
    return pointers, sizes


def _header(place: int, code: int, item: Item) -> bytes | None:
    if code < 0:
        return None
    if code != HEADER_BYTES + item.form.payload_bytes:
        return b""  # none of ours
    return bytes(memory_at(place, HEADER_BYTES))

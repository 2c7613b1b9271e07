"""dfkv (DingoCache) through the operator's own libdfkv.so, version 2 of its C interface.

What the library does, and what is done about it here:

* Every operation answers 0 or 1: a miss, a peer that is down and one that cools down look alike.
  Its counters tell them apart: a call has failed when they grew by one for each of its keys.
* A peer that failed is avoided for 2 to 30 s by the handle it failed on: after a failed call the
  next one opens a fresh handle.
* No call has a deadline; one blocks up to 20 s. The pipeline abandons it.
* Values are written once: another put of a key succeeds and keeps the old bytes. What does not
  verify is removed first (runner.py).
* A get that misses may have written to its destination: the slot is given back, never published.
* An oversize put fails the next innocent call: sizes are bounded before.
"""

from __future__ import annotations

import ctypes
import ipaddress
import mmap
import queue
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import SplitResult

from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.slow_tiers import RemoteTierConfig
from kvferry_sidecar.tiers.store import Item, Memory, Source, StoreError, memory_at
from kvferry_sidecar.tiers.value import HEADER_BYTES, VALUE_FORMAT

value_bytes_limit = 64 << 20  # what a server takes by default
_ABI_VERSION = 2
_NAMESPACE = b"kvferry/%d" % VALUE_FORMAT
_SEGMENTS = 2  # header and payload
_FAILURES = re.compile(
    rb"^dfkv_client_(?:io_errors|unhealthy_skips)_total(?:\{[^}]*\})? (\d+)", re.M
)
_MEMBER = re.compile(r"[^=,]+=([0-9.]+):(\d+)")
_stats_bytes_max = 1 << 20
_Words = ctypes.POINTER(ctypes.c_uint64)
_Pointers = ctypes.POINTER(ctypes.c_void_p)


class _Options(ctypes.Structure):
    """dfkv_open_v2's argument."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("members", ctypes.c_char_p),
        ("key_namespace", ctypes.c_char_p),
        ("key_namespace_len", ctypes.c_uint64),
        ("batch_concurrency", ctypes.c_uint64),
        ("mds_endpoints", ctypes.c_char_p),
        ("mds_group", ctypes.c_char_p),
        ("mds_poll_ms", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("client_id", ctypes.c_char_p),
        ("client_info", ctypes.c_char_p),
        ("client_heartbeat_ms", ctypes.c_int32),
        ("reserved0", ctypes.c_uint32),
    ]


assert ctypes.sizeof(_Options) == 88, "as the library has it on 64-bit Linux"


@dataclass(slots=True, eq=False)
class _Handle:
    """One client of the library; closed when no call uses it and it is not the current one."""

    pointer: int
    calls: int = 0
    failures: int = 0  # by the library's counters


class DfkvStore:
    """One ring of servers. Raises StoreError when none of them answers."""

    source: Source = "external"
    batch_max = 256

    def __init__(
        self, library: ctypes.CDLL, options: _Options, remote: RemoteTierConfig, pool: Memory
    ) -> None:
        self.name = "dfkv"
        self.value_bytes_max = min(remote.value_bytes_max, value_bytes_limit - HEADER_BYTES)
        self._library = library
        self._options = options
        self._protocol = remote.protocol
        self._pool = pool
        self._lock = threading.Lock()
        self._current: _Handle | None = None
        self._opened = 0
        self._transport = "not connected"
        block_bytes = self.batch_max * HEADER_BYTES
        self._headers = mmap.mmap(-1, remote.threads * block_bytes)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._headers))
        self._blocks: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(remote.threads):
            self._blocks.put(at + number * block_bytes)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See Store."""
        return self._call(self._library.dfkv_batch_exist, keys)

    def get(self, items: Sequence[Item]) -> list[bytes | None]:
        """See Store."""
        count = len(items)
        lengths = (ctypes.c_uint64 * count)()
        with self._block() as block:
            pieces = _Pieces(items, block)
            keys = [item.key for item in items]
            hits = self._call(
                self._library.dfkv_batch_get_auto_sg, keys, pieces.arguments(), (lengths,)
            )
            return [
                _header(block, number, hit, lengths[number], item)
                for number, (hit, item) in enumerate(zip(hits, items, strict=True))
            ]

    def put(self, items: Sequence[Item], headers: Sequence[bytes]) -> list[bool]:
        """See Store."""
        with self._block() as block:
            memory_at(block, len(items) * HEADER_BYTES)[:] = b"".join(headers)
            pieces = _Pieces(items, block)
            keys = [item.key for item in items]
            return self._call(self._library.dfkv_batch_put_sg, keys, pieces.arguments())

    def remove(self, keys: Sequence[bytes]) -> None:
        """See Store."""
        self._call(self._library.dfkv_batch_remove, keys)

    def facts(self) -> dict[str, str | int]:
        """See Store."""
        return {
            "transport": self._transport,
            "library": self._library.dfkv_version().decode(errors="replace"),
            "handles_opened": self._opened,
        }

    def close(self) -> None:
        """See Store."""
        with self._lock:
            self._retire()

    # --- calls ------------------------------------------------------------------------------

    def _call(
        self,
        function: ctypes._NamedFuncPointer,
        keys: Sequence[bytes],
        before: tuple[object, ...] = (),
        after: tuple[object, ...] = (),
    ) -> list[bool]:
        """Make one batch call; raises StoreError when nothing succeeded and peers failed."""
        count = len(keys)
        if not count:
            return []
        names = (ctypes.c_char_p * count)(*keys)
        lengths = (ctypes.c_uint64 * count)(*map(len, keys))
        out = (ctypes.c_int * count)()
        with self._handle() as handle:
            code = function(handle.pointer, names, lengths, *before, count, out, *after)
            if code != 0 or (not any(out) and self._failures(handle) >= count):
                self._leave(handle)
                raise StoreError("no server of the ring answers")
        return [one == 1 for one in out]

    def _failures(self, handle: _Handle) -> int:
        """Return how many failures of peers the library counted since it was asked last."""
        buffer = ctypes.create_string_buffer(_stats_bytes_max)
        self._library.dfkv_stats_snapshot(handle.pointer, buffer, _stats_bytes_max)
        failures = sum(int(number) for number in _FAILURES.findall(buffer.value))
        grown, handle.failures = failures - handle.failures, failures
        return grown

    @contextmanager
    def _block(self) -> Iterator[int]:
        block = self._blocks.get()
        try:
            yield block
        finally:
            self._blocks.put(block)

    # --- handles ----------------------------------------------------------------------------

    @contextmanager
    def _handle(self) -> Iterator[_Handle]:
        with self._lock:
            handle = self._current = self._current or self._open()
            handle.calls += 1
        try:
            yield handle
        finally:
            with self._lock:
                handle.calls -= 1
                if handle is not self._current and not handle.calls:
                    self._library.dfkv_close(handle.pointer)

    def _leave(self, handle: _Handle) -> None:
        """Use it no more: it avoids its peers for a while."""
        with self._lock:
            if self._current is handle:
                self._current = None

    def _retire(self) -> None:
        handle, self._current = self._current, None
        if handle is not None and not handle.calls:
            self._library.dfkv_close(handle.pointer)

    def _open(self) -> _Handle:
        pointer = self._library.dfkv_open_v2(ctypes.byref(self._options))
        if not pointer:
            raise StoreError("dfkv_open_v2 failed")
        self._opened += 1
        try:
            self._check(pointer)
        except BaseException:
            self._library.dfkv_close(pointer)
            raise
        return _Handle(pointer)

    def _check(self, pointer: int) -> None:
        """Assert the transport: a slower one than asked for is a failure, not a fall-back."""
        self._transport = self._library.dfkv_transport_mode(pointer).decode(errors="replace")
        if not self._transport.startswith(self._protocol):
            raise StoreError(
                f"the library uses {self._transport!r}, tiers.remote.protocol is "
                f"{self._protocol}: see DFKV_RDMA and DFKV_RDMA_DEV",
                final=True,
            )
        if self._library.dfkv_max_sg_segs(pointer) < _SEGMENTS:
            raise StoreError("the transport takes no value in two pieces", final=True)
        if self._protocol == "rdma" and self._library.dfkv_register_memory(
            pointer, self._pool.address, self._pool.total_bytes
        ):
            raise StoreError("the pool cannot be registered: raise ulimit -l", final=True)


class _Pieces:
    """Addresses and sizes per object: its header in ``block``, its payload in the pool."""

    def __init__(self, items: Sequence[Item], block: int) -> None:
        count = len(items)
        self._addresses = [
            (ctypes.c_void_p * _SEGMENTS)(block + number * HEADER_BYTES, item.address)
            for number, item in enumerate(items)
        ]
        self._sizes = [
            (ctypes.c_uint64 * _SEGMENTS)(HEADER_BYTES, item.form.payload_bytes) for item in items
        ]
        self._all_addresses = (_Pointers * count)(
            *(ctypes.cast(one, _Pointers) for one in self._addresses)
        )
        self._all_sizes = (_Words * count)(*(ctypes.cast(one, _Words) for one in self._sizes))
        self._counts = (ctypes.c_int * count)(*(_SEGMENTS,) * count)

    def arguments(self) -> tuple[object, ...]:
        """Return them as the library takes them."""
        return self._all_addresses, self._all_sizes, self._counts


def open_dfkv(remote: RemoteTierConfig, parts: SplitResult, pool: Memory) -> DfkvStore:
    """Return the store of dfkv://NAME=IP:PORT,... or dfkv+mds://IP:PORT,.../GROUP."""
    library = _load(remote.library)
    options = _Options(
        struct_size=ctypes.sizeof(_Options),
        abi_version=_ABI_VERSION,
        members=b"",
        key_namespace=_NAMESPACE,
        key_namespace_len=len(_NAMESPACE),
    )
    if parts.scheme == "dfkv+mds":
        options.mds_endpoints = parts.netloc.encode()
        options.mds_group = parts.path.strip("/").encode()
        options.mds_poll_ms = 1000
        return DfkvStore(library, options, remote, pool)
    for member in parts.netloc.split(","):
        found = _MEMBER.fullmatch(member)
        if found is None or not _is_address(found[1]):
            raise ConfigError(
                f"tiers.remote.url: {member!r} is no member of a ring",
                "write dfkv://NAME=IPV4:PORT,... (a host name would fail every operation)",
            )
    options.members = parts.netloc.encode()
    return DfkvStore(library, options, remote, pool)


def _load(path: str) -> ctypes.CDLL:
    remedy = "name the cluster's own libdfkv.so, of version 2, with tiers.remote.library"
    if not path:
        raise ConfigError("tiers.remote.url names dfkv without its library", remedy)
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ConfigError(f"tiers.remote.library cannot be loaded: {error}", remedy) from error
    try:
        _declare(library)
    except AttributeError as error:
        raise ConfigError(f"{path} is no libdfkv of version 2: {error}", remedy) from error
    version = library.dfkv_version().decode(errors="replace")
    if not version.startswith("2."):
        raise ConfigError(f"{path} is libdfkv {version}", remedy)
    return library


def _declare(library: ctypes.CDLL) -> None:
    """Say what the functions take: without it ctypes would cut pointers to 32 bits."""
    handle, number = ctypes.c_void_p, ctypes.c_int
    batch = [handle, ctypes.POINTER(ctypes.c_char_p), _Words]
    pieces = [ctypes.POINTER(_Pointers), ctypes.POINTER(_Words), ctypes.POINTER(number)]
    ends = [number, ctypes.POINTER(number)]
    for name, result, arguments in (
        ("dfkv_version", ctypes.c_char_p, []),
        ("dfkv_open_v2", handle, [ctypes.POINTER(_Options)]),
        ("dfkv_close", None, [handle]),
        ("dfkv_max_sg_segs", ctypes.c_uint32, [handle]),
        ("dfkv_transport_mode", ctypes.c_char_p, [handle]),
        ("dfkv_register_memory", number, [handle, ctypes.c_void_p, ctypes.c_uint64]),
        ("dfkv_stats_snapshot", ctypes.c_uint64, [handle, ctypes.c_char_p, ctypes.c_uint64]),
        ("dfkv_batch_exist", number, [*batch, *ends]),
        ("dfkv_batch_remove", number, [*batch, *ends]),
        ("dfkv_batch_put_sg", number, [*batch, *pieces, *ends]),
        ("dfkv_batch_get_auto_sg", number, [*batch, *pieces, *ends, _Words]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def _is_address(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _header(block: int, number: int, hit: bool, length: int, item: Item) -> bytes | None:
    if not hit:
        return None
    if length != HEADER_BYTES + item.form.payload_bytes:
        return b""  # none of ours
    return bytes(memory_at(block + number * HEADER_BYTES, HEADER_BYTES))

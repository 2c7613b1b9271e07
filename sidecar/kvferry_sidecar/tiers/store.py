"""What a slower tier stores, and the interface that disk and remote stores implement.

An object is one stripe of the pool: the payload as it lies there, and a header of its own
(value.py). A store sees keys, headers and addresses; it never looks into a payload.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

Source = Literal["disk", "external"]  # as vLLM names where a hit came from


@dataclass(frozen=True, slots=True)
class Form:
    """What every object of one group looks like: bytes of each shard, in the stripe's order."""

    shard_bytes: tuple[int, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole stripe."""
        return sum(self.shard_bytes)


class Whose(NamedTuple):
    """Whose object it is: the namespace (16 bytes; empty: nobody's) and the cache group."""

    namespace: bytes
    group: int


NOBODYS = Whose(b"", 0)


class Listed(NamedTuple):
    """An object that a store can name. ``stored_s``: seconds since 1970."""

    key: bytes
    whose: Whose
    stored_s: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Item:
    """One object and the place of its payload in this process.

    The memory belongs to the call that has the item until that call has returned, and so do
    ``room_bytes`` behind it: what is written there means nothing to anybody else.
    """

    key: bytes
    seed: int  # of the checksums, from the key
    address: int
    form: Form
    crcs: tuple[int, ...] = ()  # per shard: what a put stores
    room_bytes: int = 0
    whose: Whose = NOBODYS  # of a put

    def payload(self) -> memoryview:
        """Return the payload's bytes, writable."""
        return memory_at(self.address, self.form.payload_bytes)


@dataclass(frozen=True, slots=True)
class Memory:
    """The pool, for stores that register it with their transport."""

    address: int
    total_bytes: int


class StoreError(Exception):
    """The whole call failed, and why: the store is away, or answered nonsense. Tried again later.

    ``final``: nothing but an operator can mend it; the tier is switched off.
    """

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class Store(Protocol):
    """A disk or a remote store. Every method may block, may be called from several threads.

    All raise StoreError when the call as a whole failed. ``exists`` is a hint: a get may still
    find nothing. A get that found nothing may have written to the payload all the same.
    """

    name: str
    source: Source
    value_bytes_max: int  # of one payload; larger ones never reach the store
    batch_max: int  # items of one call

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Say which keys are there."""

    def get(self, items: Sequence[Item]) -> list[bytes | None]:
        """Read payloads into place; return each one's header, None where it is not there."""

    def put(self, items: Sequence[Item], headers: Sequence[bytes]) -> list[bool]:
        """Store payloads under their keys; return which are stored now."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these keys."""

    def facts(self) -> dict[str, str | int]:
        """Return what an operator wants to know: transport in use, capacity, counters."""

    def close(self) -> None:
        """Let go of everything; no call is in flight."""


@runtime_checkable
class Lists(Protocol):
    """A store that can name what it holds, page by page. Remote ones have no order for that."""

    def listed(self, after: bytes, most: int) -> list[Listed]:
        """Return up to ``most`` objects behind the key ``after`` (b"": all), in the keys' order."""


def memory_at(address: int, count: int) -> memoryview:
    """Return ``count`` bytes of this process's memory, writable; its owner must outlive it."""
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")

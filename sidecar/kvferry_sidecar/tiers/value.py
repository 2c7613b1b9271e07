"""The header that every stored value carries, and the check of what comes back.

A store may answer with anything: another key's bytes, half a value, a value of a former format.
Only a payload whose header names this key and form, and whose shards match the checksums in it,
is a hit. The checksums start from the key, as in the pool, so no byte of the wrong key verifies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, islice

import numpy as np
from kvferry_native import crc32c, crc32c_at

from kvferry_sidecar.tiers.store import Form, Item

VALUE_FORMAT = 1
shards_max = 32  # as in the pool
_MAGIC = b"kvferry\0"
_FRONT = struct.Struct("<8sHH4x16sQ")  # magic, format, shards, key, payload bytes
_CRCS = [struct.Struct(f"<{shards}I") for shards in range(shards_max + 1)]  # CRC32C per shard
_CHECK = struct.Struct("<I")  # CRC32C of all before; unused places of shards are zeros
_CHECK_AT = _FRONT.size + _CRCS[shards_max].size
HEADER_BYTES = _CHECK_AT + _CHECK.size


def pack(item: Item) -> bytes:
    """Return the header (HEADER_BYTES) of an item that is going to be stored."""
    body = _front(item.key, item.form) + _CRCS[len(item.crcs)].pack(*item.crcs)
    body = body.ljust(_CHECK_AT, b"\0")
    return body + _CHECK.pack(crc32c(body))


def unpack(header: bytes, key: bytes, form: Form) -> tuple[int, ...] | None:
    """Return the checksums per shard; None when this is no header of that key and form."""
    if len(header) != HEADER_BYTES or not header.startswith(_front(key, form)):
        return None
    if _CHECK.unpack_from(header, _CHECK_AT)[0] != crc32c(header[:_CHECK_AT]):
        return None
    return _CRCS[len(form.shard_bytes)].unpack_from(header, _FRONT.size)


def payload_bytes_of(header: bytes) -> int:
    """Return the payload bytes that a header tells, of whatever key and form."""
    return int(_FRONT.unpack_from(header)[-1])


def _front(key: bytes, form: Form) -> bytes:
    return _FRONT.pack(_MAGIC, VALUE_FORMAT, len(form.shard_bytes), key, form.payload_bytes)


def verify(headers: Sequence[bytes | None], items: Sequence[Item]) -> list[tuple[int, ...] | None]:
    """Return the checksums per shard of each item whose payload in place is what its header says.

    None for a header that is missing or none of the item's, and for a payload that differs. All
    payloads are read in one call that does not hold the GIL.
    """
    told = [
        None if header is None else unpack(header, item.key, item.form)
        for header, item in zip(headers, items, strict=True)
    ]
    addresses: list[int] = []
    sizes: list[int] = []
    seeds: list[int] = []
    for item, crcs in zip(items, told, strict=True):
        if crcs is not None:
            starts = accumulate(item.form.shard_bytes[:-1], initial=item.address)
            addresses += starts
            sizes += item.form.shard_bytes
            seeds += [item.seed] * len(crcs)
    pieces = np.array(addresses, np.uint64), np.array(sizes, np.uint64), np.array(seeds, np.uint32)
    found = iter(crc32c_at(*pieces))
    return [
        crcs if crcs is not None and crcs == tuple(islice(found, len(crcs))) else None
        for crcs in told
    ]

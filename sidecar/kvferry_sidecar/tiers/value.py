"""The header that every stored value carries, and the check of what comes back.

A store may answer with anything: another key's bytes, half a value, a value of a former format.
Only a payload whose header names this key and form, and whose shards match the checksums in it,
is a hit. The checksums start from the key, as in the pool, so no byte of the wrong key verifies.
"""

from __future__ import annotations

import struct

from kvferry_native import crc32c

from kvferry_sidecar.tiers.store import Form, Item

VALUE_FORMAT = 1
shards_max = 32  # as in the pool
_MAGIC = b"kvferry\0"
# magic, format, shards, key, payload bytes, CRC32C per shard, CRC32C of all before
_HEADER = struct.Struct(f"<8sHH4x16sQ{shards_max}I")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size


def pack(item: Item) -> bytes:
    """Return the header (HEADER_BYTES) of an item that is going to be stored."""
    shards = len(item.form.shard_bytes)
    crcs = (*item.crcs, *(0,) * (shards_max - shards))
    payload_bytes = item.form.payload_bytes
    body = _HEADER.pack(_MAGIC, VALUE_FORMAT, shards, item.key, payload_bytes, *crcs)
    return body + _CHECK.pack(crc32c(body))


def unpack(header: bytes, key: bytes, form: Form) -> tuple[int, ...] | None:
    """Return the checksums per shard; None when this is no header of that key and form."""
    if len(header) != HEADER_BYTES:
        return None
    if _CHECK.unpack_from(header, _HEADER.size)[0] != crc32c(header[: _HEADER.size]):
        return None
    magic, version, shards, stored_key, payload_bytes, *crcs = _HEADER.unpack_from(header)
    found = (magic, version, shards, stored_key, payload_bytes)
    wanted = (_MAGIC, VALUE_FORMAT, len(form.shard_bytes), key, form.payload_bytes)
    return tuple(crcs[:shards]) if found == wanted else None


def verify(header: bytes, item: Item) -> tuple[int, ...] | None:
    """Return the checksums per shard when the payload in place is what the header says."""
    crcs = unpack(header, item.key, item.form)
    if crcs is None:
        return None
    payload = item.payload()
    at = 0
    for size, crc in zip(item.form.shard_bytes, crcs, strict=True):
        if crc32c(payload[at : at + size], item.seed) != crc:
            return None
        at += size
    return crcs

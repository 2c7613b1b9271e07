"""One byte string per value: what digests are computed over.

Every item carries its type and its length, so no two different values share an encoding however
their texts are cut; mappings are sorted by key, so the order of insertion does not count.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

Canonical = str | int | bool | bytes | Sequence["Canonical"] | Mapping[str, "Canonical"]

_LENGTH = struct.Struct("<cQ")


def encode(value: Canonical) -> bytes:
    """Return the canonical bytes of ``value``. Raises TypeError for any other type."""
    if isinstance(value, str):
        return _item(b"s", value.encode())
    if isinstance(value, bool):  # before int: bool is one
        return _item(b"b", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _item(b"i", str(value).encode())
    if isinstance(value, bytes):
        return _item(b"x", value)
    if isinstance(value, Mapping):
        pairs = (encode(key) + encode(value[key]) for key in sorted(value))
        return _item(b"m", b"".join(pairs))
    if isinstance(value, Sequence):
        return _item(b"l", b"".join(encode(entry) for entry in value))
    raise TypeError(f"no canonical form for {type(value).__name__}")


def _item(kind: bytes, body: bytes) -> bytes:
    return _LENGTH.pack(kind, len(body)) + body

"""Headers of stored values, and the check of many payloads at once."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from kvferry_native import crc32c
from kvferry_sidecar.tiers import value
from kvferry_sidecar.tiers.store import Form, Item

FORM = Form((300, 20, 5000))


def item_of(number: int, memory: np.ndarray) -> Item:
    starts = accumulate(FORM.shard_bytes, initial=0)
    crcs = [
        crc32c(memory[at : at + size], number)
        for at, size in zip(starts, FORM.shard_bytes, strict=False)
    ]
    key = number.to_bytes(16, "little")
    return Item(key, number, memory.ctypes.data, FORM, tuple(crcs))


def test_each_item_is_judged_by_its_own_header_and_bytes() -> None:
    memory = np.random.default_rng(1).integers(0, 256, (6, FORM.payload_bytes), np.uint8)
    items = [item_of(number, row) for number, row in enumerate(memory)]
    headers: list[bytes | None] = [value.pack(item) for item in items]
    assert value.verify(headers, items) == [item.crcs for item in items]
    headers[1] = None
    headers[2], headers[3] = headers[3], headers[2]
    memory[4, 300] ^= 1  # the second shard's first byte
    good = [items[0].crcs, None, None, None, None, items[5].crcs]
    assert value.verify(headers, items) == good
    assert value.verify([], []) == []


def test_headers_are_as_stores_have_them() -> None:
    item = item_of(7, np.zeros(FORM.payload_bytes, np.uint8))
    front = b"kvferry\0" + bytes([1, 0, 3, 0]) + bytes(4) + item.key
    front += FORM.payload_bytes.to_bytes(8, "little")
    body = front + b"".join(crc.to_bytes(4, "little") for crc in item.crcs) + bytes(29 * 4)
    header = body + crc32c(body).to_bytes(4, "little")
    assert value.pack(item) == header
    assert value.unpack(header, item.key, FORM) == item.crcs

"""Keys of objects from the prefix hashes a half sends.

An object's key is mixed from the prefix hash at its end token, which names that end exactly: the
end of a chunk, a state's boundary, or a hash boundary inside a chunk. Hash number k covers the
first k + 1 hash blocks of the request.
"""

from __future__ import annotations

import numpy as np
from kvferry_native import KEY_BYTES, mix_keys
from numpy.typing import NDArray

from kvferry_sidecar.plan.tables import Fault, least_most

_END_KIND = 0  # the hash tells ends apart: another kind would be another sort of hash


def new_keys(
    namespace: bytes,
    group: int,
    hashes: bytes,
    *,
    hashes_per_unit: int,
    hash_bytes: int,
    start: int,
) -> NDArray[np.uint8]:
    """Return the keys (n, 16) of the units that end within hashes ``start`` and on."""
    count = len(hashes) // hash_bytes
    first_unit = start // hashes_per_unit
    first = (first_unit + 1) * hashes_per_unit - 1 - start
    if first >= count:
        return np.empty((0, KEY_BYTES), dtype=np.uint8)
    return mix_keys(namespace, group, _END_KIND, hashes, hash_bytes, first, hashes_per_unit)


def keys_of_ends(
    namespace: bytes,
    group: int,
    hashes: bytes,
    numbers: NDArray[np.int64],
    *,
    hash_bytes: int,
    first_hash: int,
) -> NDArray[np.uint8] | Fault:
    """Return the keys (n, 16) of objects that end with hash ``numbers`` (n,); n is at least 1.

    ``hashes`` begin with number ``first_hash``. Fault when one is not among them.
    """
    count = len(hashes) // hash_bytes
    least, most = least_most(numbers)
    if least < first_hash or most >= first_hash + count:
        return Fault(
            f"group {group}: hashes {least}..{most} are needed, "
            f"{first_hash}..{first_hash + count - 1} came"
        )
    rows = np.frombuffer(hashes, dtype=np.uint8).reshape(count, hash_bytes)
    picked = rows[numbers - first_hash].tobytes()
    return mix_keys(namespace, group, _END_KIND, picked, hash_bytes, 0, 1)


def keys_of_run(
    namespace: bytes,
    group: int,
    hashes: bytes,
    chunks: tuple[int, int],
    hashes_per_chunk: int,
    *,
    hash_bytes: int,
    first_hash: int,
) -> NDArray[np.uint8] | Fault:
    """Return the keys (n, 16) of the whole chunks ``first <= i < last``; at least one.

    As `keys_of_ends`, without an array of numbers.
    """
    first, last = chunks
    begin = (first + 1) * hashes_per_chunk - 1 - first_hash
    end = last * hashes_per_chunk - first_hash
    if begin < 0 or end * hash_bytes > len(hashes):
        count = len(hashes) // hash_bytes
        return Fault(
            f"group {group}: hashes {begin + first_hash}..{end + first_hash - 1} are needed, "
            f"{first_hash}..{first_hash + count - 1} came"
        )
    named = hashes[: end * hash_bytes]
    return mix_keys(namespace, group, _END_KIND, named, hash_bytes, begin, hashes_per_chunk)

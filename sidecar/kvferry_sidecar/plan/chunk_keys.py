"""Keys of chunks from the prefix hashes a half sends.

The key of chunk i is mixed from the prefix hash at its end: hash number
``(i + 1) * hashes_per_block - 1`` of the request.
"""

from __future__ import annotations

import numpy as np
from kvferry_native import KEY_BYTES, mix_keys
from numpy.typing import NDArray

from kvferry_sidecar.plan.tables import Fault

_FULL_CHUNK = 0  # end kind of a whole chunk


def chunks_within(total_hashes: int, hashes_per_block: int) -> int:
    """Return how many whole chunks so many hashes cover."""
    return total_hashes // hashes_per_block


def new_keys(
    namespace: bytes,
    group: int,
    hashes: bytes,
    *,
    hashes_per_block: int,
    hash_bytes: int,
    start: int,
) -> NDArray[np.uint8]:
    """Return the keys (n, 16) of the chunks that end within hashes ``start`` and on."""
    count = len(hashes) // hash_bytes
    first_chunk = start // hashes_per_block
    first = (first_chunk + 1) * hashes_per_block - 1 - start
    if first >= count:
        return np.empty((0, KEY_BYTES), dtype=np.uint8)
    return mix_keys(namespace, group, _FULL_CHUNK, hashes, hash_bytes, first, hashes_per_block)


def keys_of_chunks(
    namespace: bytes,
    group: int,
    hashes: bytes,
    chunks: NDArray[np.int64],
    *,
    hashes_per_block: int,
    hash_bytes: int,
    first_hash: int,
) -> NDArray[np.uint8] | Fault:
    """Return the keys (n, 16) of these chunks (ascending); Fault when a hash is missing."""
    count = len(hashes) // hash_bytes
    first = (int(chunks[0]) + 1) * hashes_per_block - 1 - first_hash
    last = (int(chunks[-1]) + 1) * hashes_per_block - 1 - first_hash
    if first < 0 or last >= count:
        return Fault(
            f"group {group}: hashes {first + first_hash}..{last + first_hash} are needed, "
            f"{first_hash}..{first_hash + count - 1} came"
        )
    keys = mix_keys(namespace, group, _FULL_CHUNK, hashes, hash_bytes, first, hashes_per_block)
    picked: NDArray[np.uint8] = keys[chunks - chunks[0]]
    return picked

"""The namespace: what must agree before two engines may share a byte.

An object's key is mixed from the namespace, the group and the prefix hash (native
``mix_keys``). The prefix hash covers the tokens and nothing of the model, so everything else that
changes bytes has to be in here: identity and geometry of every local rank, which shards of the
model these ranks hold, and the version nonce of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvferry_sidecar.keys import canonical

if TYPE_CHECKING:
    from kvferry_sidecar.sessions.model import RankGeometry

NAMESPACE_BYTES = 16
# Raise it when the meaning of a payload's bytes changes: old objects are then misses.
PAYLOAD_FORMAT = 1


def namespace_digest(geometries: Sequence[RankGeometry], version: bytes) -> bytes:
    """Return the 16-byte namespace of a session.

    ``geometries``: those of all its local ranks, in any order. ``version``: the 16-byte nonce of
    the weights (wire.names.NO_VERSION as loaded). Raises ValueError without a rank or with a
    nonce of another length.
    """
    if not geometries:
        raise ValueError("a namespace needs the geometry of at least one rank")
    if len(version) != NAMESPACE_BYTES:
        raise ValueError(f"version of {len(version)} bytes; it has {NAMESPACE_BYTES}")
    ranks = sorted((geometry.position, geometry.digest) for geometry in geometries)
    body = canonical.encode(["kvferry namespace", PAYLOAD_FORMAT, version, ranks])
    return blake2b(body, digest_size=NAMESPACE_BYTES, person=b"kvferry-ns").digest()

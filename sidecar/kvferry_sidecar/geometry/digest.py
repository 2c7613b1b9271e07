"""The digest of one rank's geometry: every fact of it that decides what a payload's bytes mean.

Left out on purpose: base offsets, strides, ``num_blocks`` and the registration serial. They say
where an engine keeps its pages, differ between engines that may share objects, and never reach a
payload, which is packed. Left out too: the rank's own place among the shards, so that equal ranks
have equal digests; the namespace adds it back (keys/namespace.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from kvferry_connector.wire.attach import Group, Placement, RegisterRank

from kvferry_sidecar.keys import canonical

DIGEST_BYTES = 16


def geometry_digest(register: RegisterRank, placed: Mapping[tuple[int, str], Placement]) -> bytes:
    """Return the 16-byte digest. ``placed`` maps (group, layer) to the placement that holds it."""
    shard = register.shard
    body = canonical.encode(
        {
            "identity": register.identity,
            "hash_block_tokens": register.hash_block_tokens,
            "layout": register.layout,
            "shards": [shard.tp_size, shard.pp_size, shard.dcp_size],
            "groups": [_group_facts(group, placed) for group in register.groups],
        }
    )
    return blake2b(body, digest_size=DIGEST_BYTES, person=b"kvferry-geo").digest()


def _group_facts(group: Group, placed: Mapping[tuple[int, str], Placement]) -> canonical.Canonical:
    """Layers stand in payload order, with the shape of their pages."""
    pages: list[canonical.Canonical] = []
    for layer in group.layers:
        place = placed.get((group.group, layer))
        pages.append([layer, *((place.page_bytes, place.runs, run_bytes(place)) if place else ())])
    numbers = {
        "window_tokens": group.window_tokens,
        "window_extra_tokens": group.window_extra_tokens,
        "chunk_tokens": group.chunk_tokens,
        "tp_replicas": group.tp_replicas - 1,
    }
    return {
        "group": group.group,
        "kind": group.kind,
        "block_tokens": group.block_tokens,
        "cacheable": group.cacheable,
        "eagle": group.eagle,
        "spec": group.spec,
        "pages": pages,
        # Those that the kind has: a model without any keeps the digest it always had.
        **{name: number for name, number in numbers.items() if number},
    }


def run_bytes(place: Placement) -> int:
    """Return the bytes of one run: a single run may leave it 0 and is then the whole page."""
    return place.run_bytes or (place.page_bytes if place.runs == 1 else 0)

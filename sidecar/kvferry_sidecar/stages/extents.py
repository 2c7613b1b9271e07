"""What one rank's copy of one group touches: the same for loads and saves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.engines.base import Extents
from kvferry_sidecar.sessions.model import Peer
from kvferry_sidecar.stages.shape import GroupShape


def rank_extents(
    peer: Peer,
    rank_index: int,
    shape: GroupShape,
    *,
    blocks: NDArray[np.int32],
    offsets: NDArray[np.uint64],
    seeds: NDArray[np.uint32],
) -> Extents | None:
    """Return the rank's shard of these stripes, or None when it has nothing to copy.

    ``offsets`` are of the whole stripes; the rank's own place in them is added here.
    """
    assert peer.geometry is not None, "the session's shape needs every rank's geometry"
    layout = next((held.layout for held in peer.geometry.groups if held.group == shape.group), None)
    if layout is None or not len(blocks):
        return None
    at = shape.stripe.offsets[rank_index]
    return Extents(
        layout=layout,
        blocks=blocks,
        pool_offsets=offsets + np.uint64(at) if at else offsets,
        seeds=seeds,
        expected=None,
        crc=True,
    )

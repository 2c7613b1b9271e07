"""Bringing the pool to a watermark: the coldest go, and what is in use or pinned stays."""

from __future__ import annotations

import numpy as np
from kvferry_native import Pool
from support.pools import keys_of, segment

SLAB = 16384
SLOT = 4096
PAYLOAD = 3900  # of a slot


def test_the_coldest_go_first_and_nothing_that_is_held() -> None:
    with segment(8 * SLAB, SLAB, 64) as (fd, nbytes):
        pool = Pool.create(fd, nbytes, SLAB, 64, epoch=1, threads=1)
        ids = pool.reserve(keys_of(*range(1, 9)), PAYLOAD, 1).astype(np.uint32)
        for entry in ids:
            pool.commit(np.array([entry], np.uint32))
        leased = pool.lease(keys_of(1), use=False)
        pool.pin(ids[1:2], 1)
        pool.pin(ids[2:3], 2)
        written = pool.reserve(keys_of(9), PAYLOAD, 1).astype(np.uint32)
        assert pool.stats().used_bytes == 9 * SLOT
        pool.take_evicted()

        assert pool.evict_to(9 * SLOT, 100) == 0, "no more is used"
        assert pool.evict_to(0, 2) == 2, "no more at once than asked for"
        assert pool.take_evicted() == keys_of(4, 5).tobytes()
        assert pool.evict_to(6 * SLOT, 100) == 1, "no further than asked for"
        assert pool.evict_to(0, 100) == 2
        assert pool.take_evicted() == keys_of(6, 7, 8).tobytes()
        assert pool.present(keys_of(1, 2, 3)).all(), "leased, pinned softly, pinned hard"
        assert pool.check() == []
        pool.release(leased)
        pool.commit(written)
        assert pool.evict_to(0, 100) == 2
        assert pool.present(keys_of(1, 2, 3, 9)).tolist() == [False, True, True, False]
        assert pool.check() == []
        pool.close()

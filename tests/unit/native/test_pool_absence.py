"""Why a key is not in the pool: being written, evicted and when, or nothing known."""

from __future__ import annotations

import numpy as np
from kvferry_native import Pool
from support.pools import keys_of, segment

SLAB = 16384
PAYLOAD = 3900  # a slot of 4096


def put(pool: Pool, *numbers: int) -> None:
    pool.commit(pool.reserve(keys_of(*numbers), PAYLOAD, 1).astype(np.uint32))


def test_what_became_of_a_missing_key() -> None:
    with segment(8 * SLAB, SLAB, 64) as (fd, nbytes):
        examine(Pool.create(fd, nbytes, SLAB, 64, epoch=1, threads=2))


def examine(pool: Pool) -> None:
    writing = pool.reserve(keys_of(1), PAYLOAD, 1).astype(np.uint32)
    put(pool, 2)
    assert [pool.run(keys_of(n)) for n in (1, 2, 3)] == [(0, -2.0), (1, -1.0), (0, -1.0)]
    assert pool.run(keys_of(2, 1, 2)) == (1, -2.0)
    assert pool.run(keys_of()) == (0, -1.0)
    assert [pool.unheard_of(keys_of(*some)) for some in ((3, 2), (3,), ())] == [True, True, False]
    assert not any(pool.unheard_of(keys_of(n, 3)) for n in (1, 2))
    put(pool, *range(10, 40))  # the pool is full now
    put(pool, 50)
    assert not pool.present(keys_of(2))[0]
    assert not pool.unheard_of(keys_of(2)), "it was evicted"
    pool.commit(writing)
    run, seconds = pool.run(keys_of(1, 2))
    assert run == 1
    assert 0.0 <= seconds < 60.0

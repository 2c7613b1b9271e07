"""kill -9 of the pool's owner at random moments: what is ready afterwards has the right bytes."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from kvferry_native import Pool, crc32c
from support import pool_child
from support.pools import keys_of, pattern_of, segment

LIVES, LIVES_MAX = 8, 200
SLAB = 16384
KEYS_MAX = 120


@contextmanager
def owner(fd: int, seed: int) -> Iterator[IO[bytes]]:
    """A process that works on the pool, killed at the end whatever it is doing then."""
    child = subprocess.Popen(
        [sys.executable, str(Path(pool_child.__file__)), str(fd), str(seed)],
        pass_fds=[fd],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        yield child.stdout
        assert child.poll() is None, "the child ended by itself"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()


def live_and_die(fd: int, seed: int) -> None:
    """One owner from its start to its SIGKILL, somewhere behind a random number of steps."""
    draw = random.Random(seed)
    with owner(fd, seed) as progress:
        steps = draw.randint(1, 600)
        assert len(progress.read(steps)) == steps, "the child ended before it was killed"
        # The child ran on meanwhile; spread the kill over the length of a step as well.
        end = time.perf_counter() + draw.uniform(0, 0.0005)
        while time.perf_counter() < end:
            pass


def verify(pool: Pool) -> int:
    """Every ready entry has its key's bytes and checksum; returns how many there are."""
    assert pool.check() == []
    stats = pool.stats()
    assert (stats.writing, stats.doomed, stats.leased) == (0, 0, 0)
    numbers = range(pool_child.UNIVERSE)
    ready = [n for n, there in zip(numbers, pool.present(keys_of(*numbers)), strict=True) if there]
    assert len(ready) == stats.ready, "a key that nobody stored"
    if not ready:
        return 0
    ids = pool.lease(keys_of(*ready))
    assert len(ids) == len(ready)
    crcs, stored = pool.crcs(ids, 0)
    assert stored.all()
    offsets, seeds = pool.payload_offsets(ids), pool.seeds(ids)
    for i, number in enumerate(ready):
        size = pool_child.payload_bytes_of(number)
        payload = ctypes.string_at(pool.address + int(offsets[i]), size)
        assert payload == pattern_of(number, size), f"key {number} has other bytes"
        assert crc32c(payload, int(seeds[i])) == crcs[i]
    pool.release(ids)
    assert pool.check() == []
    return len(ready)


@pytest.mark.parametrize("seed", range(4))
def test_ready_survives_kill_intact(seed: int) -> None:
    with segment(24 * SLAB, SLAB, KEYS_MAX) as (fd, nbytes):
        Pool.create(fd, nbytes, SLAB, KEYS_MAX, epoch=0, threads=1).close()
        kept = interrupted = 0
        for life in count():  # where a kill strikes is up to the machine
            if life >= LIVES and kept and interrupted:
                break
            assert life < LIVES_MAX, f"kept {kept}, interrupted {interrupted}"
            live_and_die(fd, 1000 * seed + life)
            pool = Pool.attach(fd, life)
            assert not pool.was_clean
            assert pool.recovered[2] == 0, "a kill alone damages nothing"
            kept += verify(pool)
            interrupted += pool.recovered[1]
            # The pool still takes new work, and does not take it from under what it found.
            got = pool.reserve(keys_of(*range(5000, 5010)), 3000, 1)
            assert (got >= 0).all()
            pool.abort(got.astype(np.uint32))
            verify(pool)
            del pool
        assert os.fstat(fd).st_size == nbytes

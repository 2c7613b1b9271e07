"""A process that works on a pool without end, until it is killed: ``pool_child.py FD SEED``.

It prints one byte per step. The bytes it writes follow from the key alone, so whoever attaches
later can tell whether what is `ready` is right.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvferry_native import Pool, crc32c
from support.pools import keys_of, pattern_of

UNIVERSE = 150
PAYLOADS = (700, 3000, 7000)


def payload_bytes_of(number: int) -> int:
    """The stripe's size, fixed per key."""
    return PAYLOADS[number % len(PAYLOADS)]


class Worker:
    """Random reservations, commits, leases and dooms on an attached pool."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self.pool = pool
        self.random = random.Random(seed)
        self.patterns = {n: pattern_of(n, payload_bytes_of(n)) for n in range(UNIVERSE)}
        self.leases: list[np.ndarray] = []

    def step(self) -> None:
        first = self.random.randrange(UNIVERSE - 15)
        numbers = [first + 3 * i for i in range(self.random.randint(1, 5))]
        if self.random.random() < 0.6:
            self.save(numbers)
        else:
            self.use(numbers)

    def save(self, numbers: list[int]) -> None:
        got = self.pool.reserve(keys_of(*numbers), payload_bytes_of(numbers[0]), 1)
        taken = [(n, int(e)) for n, e in zip(numbers, got, strict=True) if e >= 0]
        ids = np.array([entry for _, entry in taken], np.uint32)
        offsets, seeds = self.pool.payload_offsets(ids), self.pool.seeds(ids)
        crcs = np.zeros(len(ids), np.uint32)
        for i, (number, _) in enumerate(taken):
            pattern = self.patterns[number]
            ctypes.memmove(self.pool.address + int(offsets[i]), pattern, len(pattern))
            crcs[i] = crc32c(pattern, int(seeds[i]))
        if self.random.random() < 0.1:
            self.pool.abort(ids)
            return
        self.pool.set_crcs(ids, 0, crcs)
        self.pool.commit(ids)

    def use(self, numbers: list[int]) -> None:
        ids = self.pool.lease(keys_of(*numbers))
        if len(ids) and self.random.random() < 0.2:
            self.pool.doom(ids[-1:])
        self.leases.append(ids)
        if len(self.leases) > 5:
            self.pool.release(self.leases.pop(self.random.randrange(len(self.leases))))


def main() -> None:
    """Attach and work until killed."""
    fd, seed = int(sys.argv[1]), int(sys.argv[2])
    worker = Worker(Pool.attach(fd, seed), seed)
    while True:
        worker.step()
        os.write(sys.stdout.fileno(), b".")


if __name__ == "__main__":
    main()

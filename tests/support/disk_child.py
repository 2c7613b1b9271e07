"""A process that stores, reads and forgets objects on a disk until it is killed.

Writes one byte to stdout per step. usage: disk_child.py PATH SEED
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does

from support.store_rigs import Memory, get, open_disk, put

TOTAL_BYTES = 16 << 20
UNIVERSE = 400


def size_of(number: int) -> int:
    """Return the payload's bytes of an object."""
    return random.Random(number).choice((512, 1000, 4096, 60_000, 200_000))


def main() -> None:
    """Go on for ever."""
    path, seed = Path(sys.argv[1]), int(sys.argv[2])
    draw, memory, store = random.Random(seed), Memory(16 << 20), open_disk(path, TOTAL_BYTES)
    while True:
        numbers = draw.sample(range(UNIVERSE), draw.randint(1, 12))
        luck = draw.random()
        if luck < 0.7:
            put(store, [memory.item(n, size_of(n), content=b"x") for n in numbers])
        elif luck < 0.9:
            get(store, [memory.item(n, size_of(n)) for n in numbers])
        else:
            store.remove([memory.item(n, 1).key for n in numbers])
        sys.stdout.write(".")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

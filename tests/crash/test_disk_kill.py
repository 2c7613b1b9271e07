"""kill -9 of the process that writes to a disk: what is found afterwards has the right bytes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from support import disk_child
from support.store_rigs import Memory, get, key_of, open_disk, put, verify_memory

LIVES = 8


def live_and_die(path: Path, seed: int) -> None:
    """One process from its start to its SIGKILL, somewhere behind a random number of steps."""
    draw = random.Random(seed)
    child = subprocess.Popen(
        [sys.executable, disk_child.__file__, str(path), str(seed)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        steps = draw.randint(1, 150)
        assert len(child.stdout.read(steps)) == steps, "the child ended before it was killed"
        end = time.perf_counter() + draw.uniform(0, 0.01)
        while time.perf_counter() < end:
            pass
        assert child.poll() is None, "the child ended by itself"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()


def test_what_is_found_after_a_kill_is_right(tmp_path: Path) -> None:
    memory = Memory(128 << 20)
    found = 0
    for life in range(LIVES):
        live_and_die(tmp_path, life)
        store = open_disk(tmp_path, disk_child.TOTAL_BYTES)
        numbers = list(range(disk_child.UNIVERSE))
        there = store.exists([key_of(n) for n in numbers])
        wanted = [
            memory.item(n, disk_child.size_of(n))
            for n, known in zip(numbers, there, strict=True)
            if known
        ]
        assert get(store, wanted) == [True] * len(wanted), "a kill alone damages nothing"
        assert all(verify_memory(item) for item in wanted)
        found += len(wanted)
        # It still takes new work, and not from under what it found.
        fresh = [memory.item(5000 + life * 10 + n, 60_000, content=b"x") for n in range(8)]
        assert all(put(store, fresh))
        assert all(get(store, fresh))
        store.close()
    assert found > 50 * LIVES, "no life got far"

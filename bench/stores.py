"""Slower tiers against their medium: direct I/O for the disk, the bare client for remote stores.

Each ratio is bytes per second of kvferry's store (headers, checksums, verification, index) over
those of the bare medium, with as many threads, in calls of the same size, on the same memory, in
the same run: the two follow each other in turns, and the median of the rounds' ratios counts. The
disk's reference writes and reads a preallocated file beside the store's with O_DIRECT and nothing
else; both were written to the end before. Stores that are not installed are left out.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import redis
from kvferry_native import crc32c
from kvferry_sidecar.observe.log import get_logger
from kvferry_sidecar.slow_tiers import DEFAULTS, RemoteTierConfig
from kvferry_sidecar.tiers import value
from kvferry_sidecar.tiers.disk import DiskStore
from kvferry_sidecar.tiers.host import HostTier
from kvferry_sidecar.tiers.remote import open_remote
from kvferry_sidecar.tiers.store import Form, Item, Memory, Store

try:  # needs libibverbs of the system
    from mooncake import store as mooncake
except ImportError:
    mooncake = None

from bench.common import Figure, at_least, bench_main, plain

MIB = 1 << 20
CALL_BYTES = 8 * MIB
THREADS = 4
ROUNDS = 24
SLOT_MORE_BYTES = 512  # than such an object: its checksums, and room
Work = Callable[[list[Item]], None]


class Objects:
    """A pool's payloads, ``total_bytes`` of them, each with its checksum in a slot of its own."""

    def __init__(self, total_bytes: int, object_bytes: int) -> None:
        count, slot_bytes = total_bytes // object_bytes, object_bytes + SLOT_MORE_BYTES
        self._map = mmap.mmap(-1, count * slot_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.memory = Memory(address, len(self._map))
        form, self.items = Form((object_bytes,)), []
        room_bytes = HostTier.room_bytes(object_bytes)
        for number in range(count):
            content, at = os.urandom(object_bytes), number * slot_bytes
            self._map[at : at + object_bytes] = content
            crcs = (crc32c(content, number),)
            self.items.append(Item(os.urandom(16), number, address + at, form, crcs, room_bytes))
        self.total_bytes = total_bytes
        self.per_call = max(1, CALL_BYTES // object_bytes)

    def renew(self) -> None:
        """Give every object another key: nothing of them is stored."""
        self.items = [replace(item, key=os.urandom(16)) for item in self.items]

    def seconds(self, work: Work) -> float:
        """Return how long ``work`` takes for all objects, call by call, on THREADS threads."""
        calls: queue.SimpleQueue[list[Item] | None] = queue.SimpleQueue()
        for at in range(0, len(self.items), self.per_call):
            calls.put(self.items[at : at + self.per_call])
        errors: list[BaseException] = []

        def run() -> None:
            try:
                while True:
                    work(calls.get_nowait())
            except queue.Empty:
                pass
            except BaseException as error:  # noqa: BLE001 - told by the main thread
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(THREADS)]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.perf_counter() - began_s
        if errors:
            raise errors[0]
        return took_s


def put(store: Store) -> Work:
    def work(items: list[Item]) -> None:
        known = store.exists([item.key for item in items])
        assert not any(known)
        assert all(store.put(items, [value.pack(item) for item in items]))

    return work


def get(store: Store) -> Work:
    def work(items: list[Item]) -> None:
        assert None not in value.verify(store.get(items), items)

    return work


def compared(
    name: str,
    objects: Objects,
    store: Store,
    bare: tuple[Work, Work],
    goal: float,
    rounds: int = ROUNDS,
) -> list[Figure]:
    """Return the ratios of puts and gets, in time and in this process's CPU, and GB/s."""
    works = {"put": (bare[0], put(store)), "get": (bare[1], get(store))}
    took: dict[str, list[tuple[float, float, float, float]]] = {step: [] for step in works}
    for number in range(rounds):
        objects.renew()
        for step, pair in works.items():
            took[step].append(timed(objects, pair, swapped=number % 2 == 1))
    figures: list[Figure] = []
    size = f"{objects.items[0].form.payload_bytes >> 10} KiB"
    for step, times in took.items():
        what = f"{name}, {step} of {size} objects"
        bare_s, bare_cpu_s, own_s, own_cpu_s = np.array(times).T
        ratio, cpu = np.median(bare_s / own_s), np.median(own_cpu_s / bare_cpu_s)
        rate = objects.total_bytes / np.median(own_s) / 1e9
        figures.append(at_least(f"{what}, over the bare", float(ratio), "x", goal))
        figures.append(plain(f"{what}: CPU over the bare's", float(cpu), "x"))
        figures.append(plain(what, float(rate), "GB/s"))
    return figures


def timed(
    objects: Objects, pair: tuple[Work, Work], *, swapped: bool
) -> tuple[float, float, float, float]:
    """Do both works once, one right after the other; return seconds and CPU seconds of each."""
    found: list[tuple[float, float]] = []
    for work in reversed(pair) if swapped else pair:
        began_cpu_s = time.process_time()
        took_s = objects.seconds(work)
        found.append((took_s, time.process_time() - began_cpu_s))
    bare, own = reversed(found) if swapped else found
    return *bare, *own


# --- disk --------------------------------------------------------------------------------------


def disk(quick: bool) -> list[Figure]:
    """The store in a temporary directory, and O_DIRECT over the same file."""
    total_bytes = (64 if quick else 512) * MIB
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir="/var/tmp"))
    figures: list[Figure] = []
    try:
        for object_bytes in (64 << 10, MIB):
            objects = Objects(total_bytes, object_bytes)
            store = DiskStore(
                folder,
                total_bytes=total_bytes + total_bytes // 4,  # regions are used again
                object_bytes=MIB,
                free_bytes_min=0,
                log=get_logger("bench"),
            )
            fd = os.open(folder / "bare", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(fd, 0, total_bytes)
            for _ in range(2):
                objects.renew()
                objects.seconds(put(store))
            objects.seconds(bare_disk(fd)[0])
            figures += compared("disk", objects, store, bare_disk(fd), 0.8, rounds=6)
            os.close(fd)
            store.close()
            shutil.rmtree(folder / "kvferry")
    finally:
        shutil.rmtree(folder)
    return figures


def bare_disk(fd: int) -> tuple[Work, Work]:
    """Return a write and a read of objects, in the order they have in memory."""

    def write(items: list[Item]) -> None:
        payloads = [item.payload() for item in items]
        at = items[0].seed * len(payloads[0])
        assert os.pwritev(fd, payloads, at) == sum(map(len, payloads))

    def read(items: list[Item]) -> None:
        payloads = [item.payload() for item in items]
        at = items[0].seed * len(payloads[0])
        assert os.preadv(fd, payloads, at) == sum(map(len, payloads))

    return write, read


# --- remote stores -----------------------------------------------------------------------------


def remote(url: str, memory: Memory, **changes: object) -> Store:
    """Open the store of a URL."""
    fields = {
        name.removeprefix("tiers.remote."): default
        for name, default in DEFAULTS.items()
        if name.startswith("tiers.remote.")
    } | {"url": url, "threads": THREADS}
    return open_remote(RemoteTierConfig(**(fields | changes)), 30.0, memory)


@contextmanager
def server(command: list[str], port: int) -> Iterator[None]:
    """Run a server until the block ends."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1000):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.01)
        yield
    finally:
        child.kill()
        child.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def redis_figures(quick: bool) -> list[Figure]:
    """Pipelined SETs and MGETs of the same bytes through redis-py alone."""
    program = shutil.which("redis-server")
    if program is None:
        return []
    port = free_port()
    figures: list[Figure] = []
    with server([program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""], port):
        for object_bytes in (64 << 10, MIB):
            objects = Objects((16 if quick else 32) * MIB, object_bytes)
            client = redis.Redis(port=port, protocol=2, max_connections=THREADS + 1)

            def write(items: list[Item], client: redis.Redis = client) -> None:
                with client.pipeline(transaction=False) as pipe:
                    for item in items:
                        pipe.set(b"bare" + item.key, item.payload())
                    pipe.execute()

            def read(items: list[Item], client: redis.Redis = client) -> None:
                for item, found in zip(
                    items, client.mget([b"bare" + item.key for item in items]), strict=True
                ):
                    item.payload()[:] = found

            store = remote(f"redis://127.0.0.1:{port}/0", objects.memory)
            figures += compared("redis", objects, store, (write, read), 0.9)
            client.flushall()
    return figures


def mooncake_figures(quick: bool) -> list[Figure]:
    """Batches of the same bytes through the library alone, over TCP between two processes.

    Header and payload count there as one piece that is put as it lies: over TCP the library moves
    64 KiB at a time, so that an object of exactly that size takes less than one a little larger.
    """
    if mooncake is None:
        return []
    port = free_port()
    program = str(Path(mooncake.__file__).parent / "mooncake_master")
    master = [program, "-rpc_address", "127.0.0.1", "-rpc_port", str(port)]
    master += ["-metrics_host", "127.0.0.1", "-metrics_port", str(free_port())]
    figures: list[Figure] = []
    with server(master, port), server(owner(port), port):
        for object_bytes in (64 << 10, MIB):
            objects = Objects((16 if quick else 32) * MIB, object_bytes)
            bare = mooncake.MooncakeDistributedStore()
            code = bare.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", f"127.0.0.1:{port}")
            assert code == 0, code
            assert bare.register_buffer(objects.memory.address, objects.memory.total_bytes) == 0

            def write(items: list[Item], bare: Any = bare) -> None:
                sizes = [item.form.payload_bytes + value.HEADER_BYTES for item in items]
                keys = ["bare" + item.key.hex() for item in items]
                codes = bare.batch_put_from(keys, [item.address for item in items], sizes)
                assert not any(codes), codes

            def read(items: list[Item], bare: Any = bare) -> None:
                sizes = [item.form.payload_bytes + value.HEADER_BYTES for item in items]
                keys = ["bare" + item.key.hex() for item in items]
                codes = bare.batch_get_into(keys, [item.address for item in items], sizes)
                assert codes == sizes, codes

            store = remote(f"mooncake://127.0.0.1:{port}", objects.memory, host="127.0.0.1")
            figures += compared("mooncake tcp", objects, store, (write, read), 0.9)
            bare.remove_all(True)
            store.close()
            bare.close()
    return figures


def owner(port: int) -> list[str]:
    """Return the command of a process that contributes a segment."""
    text = (
        "import sys, time; from mooncake.store import MooncakeDistributedStore as Store\n"
        "store = Store()\n"
        f"assert store.setup('127.0.0.1', 'P2PHANDSHAKE', 2 << 30, 0, 'tcp', '', "
        f"'127.0.0.1:{port}') == 0\n"
        "time.sleep(600)"
    )
    return [sys.executable, "-c", text]


def run(quick: bool = False) -> dict[str, object]:
    """Return the figures of every store that is installed."""
    figures = [*disk(quick), *redis_figures(quick), *mooncake_figures(quick)]
    return {"figures": figures, "threads": THREADS, "call_bytes": CALL_BYTES}


if __name__ == "__main__":
    bench_main(__doc__, run)

"""Mooncake over real verbs (soft-RoCE): runs inside the virtual machine of tests/rdma/run.

One process owns the memory, another one reads it by RDMA and compares every byte; then the owner
is killed, and a device that does not exist is asked for. Prints one line per step; the last is OK.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mooncake
from kvferry_native import crc32c
from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.slow_tiers import DEFAULTS, RemoteTierConfig
from kvferry_sidecar.tiers import value
from kvferry_sidecar.tiers.remote import mooncake_store, open_remote
from kvferry_sidecar.tiers.store import Form, Item, Memory

HOST = "10.99.0.1"
DEVICE = "rxe0"
PORT = 50061
OBJECTS = 8
OBJECT_BYTES = 256 << 10
SLOT_BYTES = OBJECT_BYTES + 512
PATIENCE_S = 4.0  # with a dead peer; the library itself takes a minute
COUNTERS = Path(f"/sys/class/infiniband/{DEVICE}/ports/1/hw_counters")


def say(text: str) -> None:
    print(f"{time.monotonic():.1f} {text}", flush=True)


def opened(segment_bytes: int, device: str = DEVICE):
    """Return the store over RDMA, connected, and its memory."""
    memory = mmap.mmap(-1, OBJECTS * SLOT_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fields = {
        name.removeprefix("tiers.remote."): default
        for name, default in DEFAULTS.items()
        if name.startswith("tiers.remote.")
    } | {
        "url": f"mooncake://{HOST}:{PORT}",
        "protocol": "rdma",
        "device": device,
        "segment_bytes": segment_bytes,
        "threads": 2,
    }
    mooncake_store.probe_s_max = 90.0  # an emulated CPU
    store = open_remote(RemoteTierConfig(**fields), 60.0, Memory(address, len(memory)))
    store.connect()
    assert store.facts()["transport"] == "rdma", store.facts()
    return store, memory, address


def items(address: int, filled: bool) -> list[Item]:
    """Return the objects; both processes know what must be in them."""
    found = []
    for number in range(OBJECTS):
        content = bytes([number + 1]) * (OBJECT_BYTES - 8) + b"the end."
        at = address + number * SLOT_BYTES
        if filled:
            ctypes.memmove(at, content, OBJECT_BYTES)
        key = number.to_bytes(16, "little")
        crcs, room_bytes = (crc32c(content, number),), number % 2 * (SLOT_BYTES - OBJECT_BYTES)
        found.append(Item(key, number, at, Form((OBJECT_BYTES,)), crcs, room_bytes))
    return found


def owner() -> None:
    """Bring a segment, store the objects, and stay."""
    store, _memory, address = opened(32 << 20)
    mine = items(address, filled=True)
    assert all(store.put(mine, [value.pack(item) for item in mine]))
    print("stored", flush=True)
    threading.Event().wait()


def packets() -> int:
    return sum(int((COUNTERS / name).read_text()) for name in ("sent_pkts", "rcvd_pkts"))


def get(store, wanted: list[Item]) -> list[bool]:
    return [crcs is not None for crcs in value.verify(store.get(wanted), wanted)]


def main() -> None:
    """Run all steps. AssertionError: one failed."""
    program = str(Path(mooncake.__file__).parent / "mooncake_master")
    command = [program, "-rpc_address", HOST, "-rpc_port", str(PORT), "-metrics_host", "127.0.0.1"]
    master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    child = subprocess.Popen([sys.executable, __file__, "owner"], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "stored\n"
        say("saved over verbs")
        store, _memory, address = opened(0)
        wanted = items(address, filled=False)
        before = packets()
        assert get(store, wanted) == [True] * OBJECTS
        grown = packets() - before
        assert grown > OBJECTS * OBJECT_BYTES // 4096, grown
        say(f"loaded in another process, every byte right, {grown} packets over {DEVICE}")
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        hits: list[bool] = []
        call = threading.Thread(target=lambda: hits.extend(get(store, wanted)), daemon=True)
        call.start()
        call.join(PATIENCE_S)
        assert True not in hits, hits
        how = "a miss" if hits else "no answer yet: the pipeline would have abandoned the call"
        say(f"owner killed: {how}")
        try:
            opened(0, "mlx5_77")
        except ConfigError as error:
            say(f"refused: {error.message}")
        else:
            raise AssertionError("a device that does not exist was taken")
        say("OK")
    finally:
        child.kill()
        master.kill()
    os._exit(0)  # the library would take leave of peers that are gone


if __name__ == "__main__":
    owner() if sys.argv[1:] == ["owner"] else main()

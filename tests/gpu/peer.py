"""Another process with memory on the GPU, driven by lines of JSON: ``{"do": verb, ...}``.

It is the engine's side: exports and fences are the connector's own code.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog
from gpu import device
from gpu.runner import TESTS
from kvferry_connector.cuda import Driver as EngineDriver
from kvferry_connector.cuda import StreamWords
from kvferry_connector.wire.attach import CudaMemory
from kvferry_connector.wire.names import DONE_STEP_OFFSET, FENCE_PAGE_BYTES
from kvferry_sidecar.engines.cuda_driver import CudaError
from support.memory import sealed_memfd

END_S = 20.0


class Peer:
    """The process, seen from a step."""

    def __init__(self, prefix: Sequence[str], environment: Mapping[str, str]) -> None:
        self.fds, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "gpu.peer", str(theirs.fileno())],
                cwd=TESTS, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()], env=os.environ | environment,
            )  # fmt: skip

    def send(self, verb: str, **arguments: Any) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": verb} | arguments) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the next answer. Raises CudaError with the code of one that failed there."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the other process ended with code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise CudaError(found["error"], found["code"])
        return found

    def do(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Give an order and return its answer."""
        self.send(verb, **arguments)
        return self.answer()

    def export(self, total_bytes: int, value: int = 0) -> CudaMemory:
        """Have it allocate, fill and export memory."""
        found = self.do("alloc", bytes=total_bytes, value=value)
        return msgspec.convert(found["memory"], CudaMemory)

    def export_virtual(self, total_bytes: int, value: int) -> tuple[CudaMemory, int, int]:
        """Have it do that with virtual memory: how to open it, the descriptor here and there."""
        found = self.do("virtual", bytes=total_bytes, value=value)
        _, (fd,), _, _ = socket.recv_fds(self.fds, 1, 1)
        return msgspec.convert(found["memory"], CudaMemory), fd, found["fd"]

    def kill(self) -> None:
        """SIGKILL, and reap; what a fake GPU's memory was made of goes too."""
        self.process.kill()
        self.process.communicate()
        for left in Path("/dev/shm").glob(f"kvferry-fake-gpu-{self.process.pid}-*"):
            left.unlink()

    def end(self) -> None:
        """Have it give its memory back and end; by force after a while."""
        try:
            self.process.communicate("", timeout=END_S)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def peer(prefix: Sequence[str] = (), environment: Mapping[str, str] = {}) -> Iterator[Peer]:
    """Yield another process; it ends with the block."""
    one = Peer(prefix, environment)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.end()
        one.fds.close()


class Serving:
    """The verbs, in the other process."""

    def __init__(self) -> None:
        device.driver()
        self._engine = EngineDriver()
        self._buffers: list[device.DeviceBuffer | device.VirtualBuffer] = []
        self._events: list[device.Event] = []
        self._fence = mmap.mmap(-1, 1)
        self._words: StreamWords | None = None
        self._bench: Any = None

    def alloc(self, bytes: int, value: int) -> dict[str, Any]:  # noqa: A002 - a verb's word
        buffer = device.DeviceBuffer(bytes)
        self._buffers.append(buffer)
        device.fill(buffer.address, value, bytes)
        device.settle()
        return {"memory": msgspec.to_builtins(self._engine.export(buffer.address, 0))}

    def virtual(self, bytes: int, value: int) -> dict[str, Any]:  # noqa: A002 - a verb's word
        buffer = device.VirtualBuffer(bytes)
        self._buffers.append(buffer)
        device.fill(buffer.address, value, buffer.total_bytes)
        device.settle()
        memory = self._engine.export(buffer.address, 0, buffer.total_bytes)
        fd = self._engine.export_fd(buffer.address)
        with socket.socket(fileno=os.dup(int(sys.argv[1]))) as to:
            socket.send_fds(to, [b"!"], [fd])
        os.close(fd)
        return {"memory": msgspec.to_builtins(memory), "fd": fd}

    def event(self) -> dict[str, Any]:
        self._events.append(device.Event(shared=True))
        return {"handle": text_of(self._events[-1].handle())}

    def free(self) -> dict[str, Any]:
        self._buffers.pop().free()
        return {}

    def fill(self, value: int) -> dict[str, Any]:
        buffer = self._buffers[-1]
        device.fill(buffer.address, value, buffer.total_bytes)
        device.settle()
        return {}

    def open(self, handle: str) -> dict[str, Any]:
        """Open a handle here, and close it."""
        address = device.driver().open(b64decode(handle))
        device.driver()("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        return {}

    def close(self) -> None:
        """Give everything back."""
        while self._buffers:
            self._buffers.pop().free()
        if self._bench is not None:
            self._bench.close()

    def hold(self, memory: dict[str, Any]) -> dict[str, Any]:
        """Open another process's memory, read it, and keep it open."""
        self.held = device.driver().open(msgspec.convert(memory, CudaMemory).handle)
        return {"first": device.read(self.held, 1)[0]}

    def fence(self) -> dict[str, Any]:
        fd = sealed_memfd(FENCE_PAGE_BYTES)
        self._fence = mmap.mmap(fd, FENCE_PAGE_BYTES)
        page = ctypes.addressof(ctypes.c_char.from_buffer(self._fence))
        self._words = StreamWords(self._engine, page, lambda: 0, 0)
        return {"path": f"/proc/{os.getpid()}/fd/{fd}"}

    def late(self, value: int, wrong: int, times: int) -> dict[str, Any]:
        """Keep the stream busy with other bytes, then fill and write the word; do not wait."""
        assert self._words is not None, "fence first"
        buffer = self._buffers[-1]
        for _ in range(times):
            device.fill(buffer.address, wrong, buffer.total_bytes)
        device.fill(buffer.address, value % 256, buffer.total_bytes)
        self._words.write(DONE_STEP_OFFSET, value)
        return {}

    def timed(self, step: int, wrong: int, times: int) -> dict[str, Any]:
        """Write a word behind other work; return when it is in memory (monotonic)."""
        self.late(step, wrong, times)
        while int.from_bytes(self._fence[DONE_STEP_OFFSET : DONE_STEP_OFFSET + 8], "little") < step:
            pass
        return {"at_s": time.monotonic()}

    def context(self) -> dict[str, Any]:
        """Say how much of the host's memory this process takes, now that it has a context."""
        return {"rss_mib": rss_mib()}

    def copies(self) -> dict[str, Any]:
        """Copy both ways, as a sidecar is ready to, and keep what that takes."""
        from gpu.copies import NAMES, Bench

        self._bench = Bench(64 << 20, 8 << 20)
        for direction in NAMES:
            self._bench.seconds(direction, self._bench.layout(4096, 33, 32), 32)
        return {"rss_mib": rss_mib()}

    def matmul(self, seconds: float, size: int = 8192) -> dict[str, Any]:
        """Multiply bf16 matrices for so long; returns milliseconds per product."""
        from gpu.load import products  # torch: only here

        return {"ms": products(seconds, size)}


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    serving: Serving | None = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            serving = serving or Serving()
            found = getattr(serving, order.pop("do"))(**order)
        except Exception as error:  # noqa: BLE001 - told to the step
            found = {"error": f"{type(error).__name__}: {error}", "code": getattr(error, "code", 0)}
        print(json.dumps(found), flush=True)
    if serving is not None:
        serving.close()


def rss_mib() -> float:
    """Return what is resident of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * mmap.PAGESIZE / (1 << 20), 1)


def text_of(handle: bytes) -> str:
    """Return a handle for a line of JSON."""
    return b64encode(handle).decode()


if __name__ == "__main__":
    main()

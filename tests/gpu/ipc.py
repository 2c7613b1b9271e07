"""Handles: opened, refused, told apart."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from base64 import b64decode
from typing import Any

import structlog
from gpu import device
from gpu.peer import peer, text_of
from gpu.runner import Sizes
from gpu.verdicts import Env
from kvferry_connector.wire.attach import CudaMemory, Memory
from kvferry_sidecar.engines.cuda_driver import CudaError, IpcHandle
from kvferry_sidecar.engines.cuda_memory import CudaMemories

LOG = structlog.get_logger()
_LEGACY_CAPABLE, _HANDLE_TYPES, _GDR_CAPABLE, _DMA_BUF_FD, _FABRIC = 10, 14, 15, 1, 8


def memory_of(cuda: CudaMemory) -> Memory:
    """Return a whole allocation as a rank's buffer."""
    return Memory(0, cuda.allocation_bytes - cuda.offset, "cuda", cuda)


def code_of(handle: bytes) -> int:
    """Return the driver's code for opening a handle here, 0 when it opens (and is closed)."""
    try:
        address = device.driver().open(handle)
    except CudaError as error:
        return error.code
    device.driver()("cuIpcCloseMemHandle", ctypes.c_uint64(address))
    return 0


def open_close(sizes: Sizes) -> dict[str, Any]:
    """A handle of another process opens by the product's code, reads right, and closes."""
    figures: dict[str, Any] = {}
    with peer() as engine:
        for name, total_bytes in (("big", sizes.big_bytes), ("2 MiB", 2 << 20)):
            cuda = engine.export(total_bytes, value=0x5A)
            memories = CudaMemories(device.driver(), LOG)
            started_s = time.monotonic()
            opened = memories.open(memory_of(cuda), 1)
            figures[f"open ms, {name}"] = ms_since(started_s)
            ends = (opened.address, opened.address + opened.total_bytes - 4096)
            for at in ends:
                assert device.read(at, 4096) == b"\x5a" * 4096, "another process's bytes differ"
            figures[f"second open, {name}"] = code_of(cuda.handle)
            started_s = time.monotonic()
            del opened
            figures[f"close ms, {name}"] = ms_since(started_s)
            assert not len(memories), "the mapping stayed"
            engine.do("free")
        figures["own handle"] = own_handle_code(sizes)
        figures["random handle"] = code_of(os.urandom(64))
    assert figures["own handle"], "a process opened its own handle"
    assert figures["random handle"], "random bytes were opened as a handle"
    return figures


def need_sharing() -> None:
    """Raise what the driver says where it refuses what engine and sidecar need of it."""
    with peer() as engine:
        cuda = engine.export(2 << 20)
        engine.do("fence")
        CudaMemories(device.driver(), LOG).open(memory_of(cuda), 1)


def own_handle_code(sizes: Sizes) -> int:
    """Return the code for opening what this process exported itself."""
    from kvferry_connector.cuda import Driver as EngineDriver

    buffer = device.DeviceBuffer(sizes.fill_bytes)
    try:
        return code_of(EngineDriver().export(buffer.address, 0).handle)
    finally:
        buffer.free()


def virtual(sizes: Sizes) -> dict[str, Any]:
    """Virtual memory has no handle; its descriptor maps it, the number of one does not."""
    figures: dict[str, Any] = {"fabric code": _create_code(_FABRIC)}
    own = device.VirtualBuffer(sizes.fill_bytes)
    handle, at = IpcHandle(), ctypes.c_uint64(own.address)
    try:
        device.driver()("cuIpcGetMemHandle", ctypes.byref(handle), at)
    except CudaError as error:
        figures["handle code"] = error.code
    figures["handle types"] = _attribute(_HANDLE_TYPES, own.address)
    assert figures.get("handle code"), "virtual memory has a handle"
    assert not _attribute(_LEGACY_CAPABLE, own.address), "it claims to have one"
    own.free()
    with peer() as engine:
        cuda, fd, number = engine.export_virtual(sizes.big_bytes, value=0x5A)
        memories, memory = CudaMemories(device.driver(), LOG), memory_of(cuda)
        started_s = time.monotonic()
        opened = memories.open(memory, 1, fd)
        figures["map ms"] = ms_since(started_s)
        os.close(fd)
        for at_ in (opened.address, opened.address + opened.total_bytes - 4096):
            assert device.read(at_, 4096) == b"\x5a" * 4096, "another process's bytes differ"
        started_s = time.monotonic()
        del opened
        figures["unmap ms"] = ms_since(started_s)
        assert not len(memories), "the mapping stayed"
        try:
            memories.open(memory, 1, 1000 + number)
        except CudaError as error:
            figures["number's code"] = error.code
    assert figures.get("number's code"), "the number of a descriptor mapped something"
    return figures


def _create_code(types: int) -> int:
    try:
        device.VirtualBuffer(2 << 20, types).free()
    except CudaError as error:
        return error.code
    return 0


def events(sizes: Sizes) -> dict[str, Any]:
    """Whether events of another process open: with its /dev/shm, without, and as another user."""
    device.driver()
    alone = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
    nobody = ("setpriv", "--reuid=65534", "--clear-groups")
    return {name: _event_code(prefix) for name, prefix in (
        ("as here", ()), ("without common /dev/shm", alone), ("another user", nobody),
    )}  # fmt: skip


def _event_code(prefix: tuple[str, ...]) -> int | str:
    done = subprocess.run([*prefix, "true"], check=False, capture_output=True) if prefix else None
    if done is not None and done.returncode:
        return "not possible here"
    with peer(prefix) as engine:
        try:
            device.Event(b64decode(engine.do("event")["handle"])).close()
        except (CudaError, EOFError) as error:
            return getattr(error, "code", 0) or str(error)
    return 0


def pid_clash(sizes: Sizes) -> dict[str, Any]:
    """Two processes with equal ids in two PID namespaces: the driver refuses, and so do we."""
    unshare = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        raise Env("no PID namespaces here: run it as root, where unshare --pid is allowed")
    with peer(unshare) as one, peer(unshare) as other:
        cuda = one.export(sizes.fill_bytes)
        try:
            other.do("open", handle=text_of(cuda.handle))
        except CudaError as error:
            return {"pid": cuda.pid, "code": error.code}
    return {"pid": cuda.pid, "code": 0}


def identity(sizes: Sizes) -> dict[str, Any]:
    """Whether memory allocated again in its place has another number, and another handle."""
    with peer() as engine:
        first = engine.export(sizes.fill_bytes)
        engine.do("free")
        second = engine.export(sizes.fill_bytes)
    assert first.buffer_id != second.buffer_id, "two allocations share their number"
    return {"equal handles": first.handle == second.handle}


def direct_rdma(sizes: Sizes) -> dict[str, Any]:
    """Whether imported and own memory could be registered with a NIC."""
    figures = {}
    with peer() as engine:
        address = device.driver().open(engine.export(sizes.fill_bytes).handle)
        own = device.DeviceBuffer(sizes.fill_bytes)
        for name, at in (("imported", address), ("own", own.address)):
            figures[f"capable, {name}"] = _attribute(_GDR_CAPABLE, at)
            figures[f"dma-buf code, {name}"] = _dma_buf(at)
        own.free()
    return figures


def _attribute(attribute: int, address: int) -> int:
    value = ctypes.c_uint64()
    try:
        where = ctypes.c_uint64(address)
        device.driver()("cuPointerGetAttribute", ctypes.byref(value), attribute, where)
    except CudaError as error:
        return -error.code
    return value.value


def _dma_buf(address: int) -> int:
    fd = ctypes.c_int(-1)
    try:
        device.driver()(
            "cuMemGetHandleForAddressRange", ctypes.byref(fd), ctypes.c_uint64(address),
            ctypes.c_size_t(2 << 20), _DMA_BUF_FD, ctypes.c_uint64(0),
        )  # fmt: skip
    except CudaError as error:
        return error.code
    os.close(fd.value)
    return 0


def ms_since(started_s: float) -> float:
    """Return milliseconds."""
    return round((time.monotonic() - started_s) * 1000, 3)

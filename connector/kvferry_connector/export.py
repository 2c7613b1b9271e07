"""KV memory and the fence page as descriptors that another process can map.

On CPU vLLM allocates its KV cache by one ``torch.zeros`` of int8 inside the context that
``get_mem_pool_context`` returns. There we serve it from a memfd of ours: no copy, page aligned,
and the descriptor is what travels to the sidecar. Memory of a GPU stays the engine's: a handle of
the driver travels (cuda.py).
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvferry_connector.cuda import Driver, StreamWords
from kvferry_connector.half import MemoryHandle
from kvferry_connector.log import LOGGER
from kvferry_connector.wire.attach import CudaMemory, Memory, attach_fds_max
from kvferry_connector.wire.names import (
    BOUND_STEP_OFFSET,
    DONE_STEP_OFFSET,
    FENCE_PAGE_BYTES,
)

logger = logging.getLogger(LOGGER)
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_BOUND, _DONE = BOUND_STEP_OFFSET // 8, DONE_STEP_OFFSET // 8
served_bytes_min = 1 << 20  # below: scratch tensors, which nobody transfers
_buffers_max = attach_fds_max - 2  # Hello also carries a pidfd and the fence page


class ExportError(Exception):
    """KV memory cannot be shared with the sidecar; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One exported allocation: ``[address, address + total_bytes)`` of this process."""

    buffer: int
    fd: int | None
    address: int
    total_bytes: int
    cuda: CudaMemory | None = None

    @property
    def kind(self) -> str:
        """As wire.attach.Memory has it."""
        if self.cuda is None:
            return "memfd"
        return "cuda" if self.fd is None else "cuda-fd"


class KvMemory:
    """The KV buffers of one worker, in memfds.

    ``context()`` goes to ``get_mem_pool_context``. Mappings live as long as the tensors in them;
    ``close`` only closes our descriptors (after the client, which borrows them).
    """

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._kept: list[int] = []  # of memory that a sidecar may still have open
        self.driver: Driver | None = None  # once KV memory of a GPU was found
        self.device = 0  # the ordinal of that GPU

    def context(self) -> TorchFunctionMode:
        """Return a context manager that serves large CPU int8 ``torch.zeros`` from a memfd."""
        return _ServeZeros(self._allocate)

    def handles(self) -> tuple[MemoryHandle, ...]:
        """Return the buffers as the client wants them, by buffer number."""
        return tuple(
            MemoryHandle(Memory(b.buffer, b.total_bytes, b.kind, b.cuda), b.fd)
            for b in self._buffers
        )

    def find(self, tensor: torch.Tensor) -> Buffer:
        """Return the buffer that holds the storage of ``tensor``.

        Raises ExportError when the engine allocated it elsewhere, CudaError when the driver does
        not hand it out.
        """
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for buffer in self._buffers:
            if buffer.address <= start and end <= buffer.address + buffer.total_bytes:
                return buffer
        if tensor.device.type == "cuda":
            return self._export(tensor.device.index, start, storage.nbytes())
        raise ExportError(
            f"KV memory at {start:#x} ({tensor.device}) was not allocated through "
            "get_mem_pool_context, so the sidecar cannot map it; CPU and CUDA engines are served, "
            "and no other connector may supply the memory pool"
        )

    def _export(self, ordinal: int, address: int, total_bytes: int) -> Buffer:
        self._check_room()
        self.driver, self.device = self.driver or Driver(), ordinal
        with self.driver.on(ordinal):
            cuda = self.driver.export(address, ordinal, total_bytes)
            fd = None if cuda.handle else self.driver.export_fd(address)
        buffer = Buffer(self._number(), fd, address, total_bytes, cuda)
        self._buffers.append(buffer)
        return buffer

    def _number(self) -> int:
        return 1 + max((buffer.buffer for buffer in self._buffers), default=-1)

    def _check_room(self) -> None:
        if len(self._buffers) >= _buffers_max:
            raise ExportError(
                f"the engine allocates more than {_buffers_max} KV buffers, which is all a rank "
                "can register"
            )

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        self._check_room()
        total_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd, mapping = _shared_memory("kvferry-kv", total_bytes)
        tensor = torch.frombuffer(mapping, dtype=torch.int8, count=num_bytes)
        buffer = Buffer(self._number(), fd, tensor.data_ptr(), total_bytes)
        self._buffers.append(buffer)
        return tensor

    def forget(self, *, closed: bool) -> None:
        """The engine maps its GPU memory anew: what was exported of it is of the memory before.

        ``closed``: no sidecar needs the descriptors any more, nor those of an earlier sleep; each
        keeps its memory. Host memory stays where it is.
        """
        old = [buffer for buffer in self._buffers if buffer.cuda is not None]
        self._buffers = [buffer for buffer in self._buffers if buffer.cuda is None]
        self._kept += [buffer.fd for buffer in old if buffer.fd is not None]
        if closed:
            self._close_kept()

    def close(self) -> None:
        """Close the descriptors; tensors keep their memory."""
        self._kept += [buffer.fd for buffer in self._buffers if buffer.fd is not None]
        self._buffers.clear()
        self._close_kept()

    def _close_kept(self) -> None:
        while self._kept:
            os.close(self._kept.pop())


class _ServeZeros(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed by mypy
    """Inside the ``with``: large CPU int8 zeros come from ``allocate``, all else is torch's.

    So are those that ``allocate`` has no memory for: the engine starts, and registers nothing.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._allocate = allocate

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.zeros:
            shape = _served_shape(args, options)
            if shape is not None:
                try:
                    return self._allocate(prod(shape)).view(shape)
                except ExportError as error:
                    logger.error("kvferry: no cache: %s", error)  # noqa: TRY400 - told whole
        return func(*args, **options)


def _served_shape(args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a ``torch.zeros`` call we serve, or None."""
    if set(options) - {"size", "dtype", "device"} or options.get("dtype") is not torch.int8:
        return None
    if torch.device(options.get("device") or torch.get_default_device()).type != "cpu":
        return None
    size = args or (options.get("size"),)
    if len(size) == 1 and not isinstance(size[0], int):
        size = tuple(size[0] or ())
    shape = tuple(int(n) for n in size)
    return shape if shape and prod(shape) >= served_bytes_min else None


def _shared_memory(name: str, total_bytes: int) -> tuple[int, mmap.mmap]:
    """Return a memfd of a fixed size whose pages are all there, and its mapping.

    Pages are taken now: a page that is missing at first touch would be a SIGBUS while serving.
    Raises ExportError.
    """
    fd = -1
    try:
        available = _available_bytes()
        if total_bytes > available:  # asking anyway would wake the OOM killer, on anyone
            raise ExportError(
                f"{total_bytes} bytes of KV memory are wanted and {available} are available; "
                "lower kv_cache_memory_bytes, or raise the memory limit of the container"
            )
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, total_bytes)
        os.posix_fallocate(fd, 0, total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd, mmap.mmap(fd, total_bytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise ExportError(
            f"cannot share {total_bytes} bytes of memory ({error.strerror}); lower "
            "kv_cache_memory_bytes, raise the memory limit of the container, or `ulimit -n` if "
            "descriptors ran out"
        ) from error


def _available_bytes() -> int:
    """Return what the node has to give, at most what this container may use."""
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    node = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return node
    return min(node, int(limit)) if limit.isdecimal() else node


class FencePage:
    """The two words (u64) of one rank that tell the sidecar how far the engine is.

    ``bound(step)``: the blocks of the step are zeroed and copied, loads into them may start.
    ``done(step)``: the forward of the step has written its KV, saves may read. Steps only grow,
    and only those with loads or saves are written: nobody waits for another.
    Each is one aligned 8-byte store (a torn step can not be read); the sidecar polls. On a GPU the
    step is only launched when a hook runs: there the stream stores the words.
    """

    def __init__(self) -> None:
        self.fd, self._mapping = _shared_memory("kvferry-fence", FENCE_PAGE_BYTES)
        self._words = memoryview(self._mapping).cast("Q")
        self._of_stream: StreamWords | None = None

    def follow(self, driver: Driver, stream: Callable[[], int], device: int) -> None:
        """Have ``stream()`` of a device store the words from now on. Raises CudaError."""
        page = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._of_stream = StreamWords(driver, page, stream, device)

    def bound(self, step: int) -> None:
        """Write ``bound_step``. Raises CudaError."""
        if self._of_stream is None:
            self._words[_BOUND] = step
        else:
            self._of_stream.write(BOUND_STEP_OFFSET, step)

    def done(self, step: int) -> None:
        """Write ``done_step``. Raises CudaError."""
        if self._of_stream is None:
            self._words[_DONE] = step
        else:
            self._of_stream.write(DONE_STEP_OFFSET, step)

    def close(self) -> None:
        """Unmap and close (after the client, which borrows ``fd``). Raises CudaError."""
        try:
            if self._of_stream is not None:
                self._of_stream.close()
        finally:
            self._words.release()
            self._mapping.close()
            os.close(self.fd)

"""The data file of one disk path: preallocated, and read and written past the page cache.

Objects lie at multiples of BLOCK_BYTES. The pool's slots are aligned so that direct I/O reads and
writes them in place; a payload whose length is no multiple of the device's sector goes through
the page cache instead, as everything does where the file system has no direct I/O.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

BLOCK_BYTES = 4096
_payloads_max = 256  # of one system call: IOV_MAX is 1024
# What lies between two objects, written and read: its content means nothing. Page aligned.
_PAD = mmap.mmap(-1, BLOCK_BYTES)
_SECTORS = (512, 4096)  # logical sector sizes in use


class DataFile:
    """One file of ``total_bytes``. Raises OSError."""

    def __init__(self, path: Path, total_bytes: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._buffered = os.open(path, flags, 0o600)
        self._direct = -1
        self.sector_bytes = 0  # 0: no direct I/O
        try:
            os.posix_fallocate(self._buffered, 0, total_bytes)
            if os.fstat(self._buffered).st_size > total_bytes:
                os.ftruncate(self._buffered, total_bytes)
            self._open_direct(path)
        except BaseException:
            self.close()
            raise

    def write(self, payloads: Sequence[memoryview], offset: int) -> None:
        """Write payloads one after the other, each at the next multiple of BLOCK_BYTES."""
        for fd, parts, at in self._groups(payloads, offset):
            _whole(os.pwritev(fd, parts, at), parts)

    def read(self, payloads: Sequence[memoryview], offset: int) -> None:
        """Read what ``write`` wrote there into as many buffers of the same lengths."""
        for fd, parts, at in self._groups(payloads, offset):
            _whole(os.preadv(fd, parts, at), parts)

    def close(self) -> None:
        """Close both descriptors."""
        for fd in (self._buffered, self._direct):
            if fd >= 0:
                os.close(fd)
        self._buffered = self._direct = -1

    def _groups(
        self, payloads: Sequence[memoryview], offset: int
    ) -> Iterator[tuple[int, list[memoryview], int]]:
        """Cut into system calls: descriptor, buffers with what lies between them, offset."""
        for first in range(0, len(payloads), _payloads_max):
            parts: list[memoryview] = []
            for payload in payloads[first : first + _payloads_max]:
                parts += (payload, memoryview(_PAD)[: -len(payload) % BLOCK_BYTES])
            sector = self.sector_bytes
            direct = sector and not any(len(part) % sector for part in parts)
            yield self._direct if direct else self._buffered, parts, offset
            offset += sum(map(len, parts))

    def _open_direct(self, path: Path) -> None:
        """Find out whether and in which units this file can be read directly."""
        try:
            self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return
            raise
        with mmap.mmap(-1, 2 * BLOCK_BYTES) as memory:
            view = memoryview(memory)
            for sector in _SECTORS:
                try:
                    os.preadv(self._direct, [view[512 : 512 + sector]], 0)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                else:
                    self.sector_bytes = sector
                    break
            view.release()


def _whole(moved_bytes: int, parts: Sequence[memoryview]) -> None:
    wanted = sum(map(len, parts))
    if moved_bytes != wanted:
        raise OSError(errno.EIO, f"{moved_bytes} of {wanted} bytes were moved")

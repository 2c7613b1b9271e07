"""Memory files for tests, as engines make them, and a count of this process's descriptors."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def sealed_memfd(total_bytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    """Return a memfd of that size that cannot shrink any more."""
    fd = os.memfd_create("kvferry-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, total_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def free_fake_gpu(pid: int) -> None:
    """Remove what the memory of a fake GPU was made of in a process that was killed."""
    for left in Path("/dev/shm").glob(f"kvferry-fake-gpu-{pid}-*"):
        left.unlink()


def open_descriptors() -> dict[str, str]:
    """Return this process's open descriptors and what they are."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = str(entry.readlink())
        except FileNotFoundError:  # the directory listing's own descriptor
            continue
    return found


def mapped_files(pid: int | None = None) -> list[str]:
    """Return the lines of memory maps that are memfds of halves, also of these tests' own."""
    maps = Path(f"/proc/{pid or 'self'}/maps").read_text()
    return [line for line in maps.splitlines() if "memfd:kvferry-" in line]

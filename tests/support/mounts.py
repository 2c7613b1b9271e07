"""File systems of a test's own: small ones, and ones that cannot be written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@contextmanager
def tmpfs(path: Path, size: str, *options: str) -> Iterator[Path]:
    """Yield a new directory that is a file system of its own."""
    path.mkdir()
    spec = ",".join((f"size={size}", *options))
    subprocess.run(["mount", "-t", "tmpfs", "-o", spec, "kvferry-test", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)

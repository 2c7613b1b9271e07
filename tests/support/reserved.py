"""Huge pages of this machine, reserved for a test."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

RESERVED = Path("/proc/sys/vm/nr_hugepages")


@contextmanager
def huge_pages(count: int) -> Iterator[None]:
    """Reserve pages of 2 MiB where this machine gives them; else the test is skipped.

    They are the machine's: other tests that ask for some wait for this one.
    """
    with RESERVED.open() as pages:
        fcntl.flock(pages, fcntl.LOCK_EX)
        before = RESERVED.read_text()
        try:
            if count:
                RESERVED.write_text(str(int(before) + count))
            if int(RESERVED.read_text()) < int(before) + count:
                pytest.skip("this machine has no huge page to give")
            yield
        except PermissionError:
            pytest.skip("huge pages can be reserved by root only")
        finally:
            if RESERVED.read_text() != before:
                RESERVED.write_text(before)

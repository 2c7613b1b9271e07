"""Connections of other users; needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_user(uid: int, gid: int, *further: int) -> Iterator[None]:
    """Connect as this user, in these further groups: the kernel notes who calls connect()."""
    groups = os.getgroups()
    os.setgroups(further)
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)

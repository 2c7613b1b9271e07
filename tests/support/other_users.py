"""Connections of other users, and a command in front of processes that are not quite root's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# May read and write what root may, but RLIMIT_NPROC counts: as a user that nobody else is.
COUNTED = (
    *("setpriv", "--ruid", str(60_000 + os.getpid() % 5_000)),
    *("--bounding-set", "-sys_resource,-sys_admin"),
)


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

"""Who is at the other end of an attach stream: a live process we can watch, not only a number.

A half passes a pidfd of itself. It must be the process that connected:

* ``SO_PEERPIDFD`` (Linux 6.5) gives our own pidfd of that process. With pidfs (6.9) both have one
  inode per process; before it, both name their process in ``/proc/self/fdinfo``.
* Without ``SO_PEERPIDFD``: what was passed must be a pidfd at all, and the connecting uid decides.
  (SO_PEERCRED's pid is of no use: it is 0 across sibling PID namespaces.)

In every case the connecting uid must be ours or root, or one that an operator has bound a tenant to
(tenants.py). Neither holds: refused.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from kvferry_sidecar.sessions.tenants import NOBODY_BOUND, Credentials, Tenants

SO_PEERPIDFD = 77  # not in Python's socket module
_UCRED = struct.Struct("iII")
_PIDFD_LINK = "anon_inode:[pidfd]"  # kept by pidfs for old readers


class IdentityError(Exception):
    """The process at the other end is not who it says, or cannot be watched."""


@dataclass(frozen=True, slots=True)
class Life:
    """One process's life. ``inode`` is equal for two attachments of the same process only.

    ``inode``: the pidfs inode; on kernels without pidfs the negated pid, which is as good for as
    long as the process is alive (and the registry compares it only then).
    """

    inode: int
    who: Credentials


def credentials_of(connection: socket.socket) -> Credentials:
    """Return uid and gid of who connected, as this user namespace sees them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, gid = _UCRED.unpack(raw)
    return Credentials(int(uid), int(gid))


def verify(
    connection: socket.socket, passed: int, claimed_pid: int, tenants: Tenants = NOBODY_BOUND
) -> Life:
    """Check that ``passed`` is a pidfd of the process that connected.

    ``claimed_pid`` only tells lives apart on kernels without pidfs across PID namespaces. Raises
    IdentityError with the reason, OSError where this process is out of descriptors; no descriptor
    is kept or closed.
    """
    who = credentials_of(connection)
    if not uid_allowed(who.uid) and not tenants.admits(who):
        raise IdentityError(f"uid {who.uid} connected; only uid {os.geteuid()} and root may")
    if not is_pidfd(passed):
        raise IdentityError("the first descriptor is no pidfd")
    own = _peer_pidfd(connection)
    if own is not None:
        try:
            _check_same_process(own, passed)
        finally:
            os.close(own)
    if proven_dead(passed):
        raise IdentityError("the process of the passed pidfd has ended")
    return Life(_life_inode(passed, claimed_pid), who)


def own_credentials() -> Credentials:
    """Return this process's."""
    return Credentials(os.geteuid(), os.getegid())


def uid_allowed(uid: int) -> bool:
    """Whether this uid may attach at all: ours or root."""
    return uid in (os.geteuid(), 0)


def is_pidfd(fd: int) -> bool:
    """Whether the descriptor is a pidfd."""
    try:
        link = str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return False
    return link == _PIDFD_LINK or link.startswith("pidfd:")


def proven_dead(pidfd: int) -> bool:
    """Whether the process has ended: the POLLIN bit, set at its last thread's exit.

    POLLHUP alone does not count, nor does POLLNVAL (a descriptor of ours that is wrong).
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return any(bits & select.POLLIN for _, bits in poll.poll(0))


def has_pidfs(pidfd: int) -> bool:
    """Whether pidfds have an inode per process (Linux 6.9), not the one of all anonymous files."""
    other = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        return os.fstat(pidfd).st_dev != os.fstat(other).st_dev
    finally:
        os.close(other)


def _peer_pidfd(connection: socket.socket) -> int | None:
    """Return our own pidfd of the connected process; None where the kernel has no such option."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return None
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # says nothing about the peer
        raise IdentityError(
            f"the kernel gives no pidfd of the connected process: {error.strerror}"
        ) from error


def _check_same_process(own: int, passed: int) -> None:
    if has_pidfs(own):
        same = os.path.samestat(os.fstat(own), os.fstat(passed))
    else:
        pid = _fdinfo_pid(own)
        same = pid > 0 and pid == _fdinfo_pid(passed)
    if not same:
        raise IdentityError("the passed pidfd is of another process than the one that connected")


def _life_inode(pidfd: int, claimed_pid: int) -> int:
    if has_pidfs(pidfd):
        return os.fstat(pidfd).st_ino
    return -(_fdinfo_pid(pidfd) or abs(claimed_pid))


def _fdinfo_pid(pidfd: int) -> int:
    """Return the pid in our PID namespace: 0 when it is not visible, -1 when it has ended."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pid":
            return int(value)
    return 0

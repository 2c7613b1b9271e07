"""The process's descriptors: how many it may open, and the three that everybody takes for given."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.limits import Limits

descriptors_min = 64  # sockets, the pool, threads' pipes, and some for attachments
descriptors_max = 1 << 19


def raise_descriptor_limit(limits: Limits) -> None:
    """Allow as many descriptors as the hard limit does, up to ``descriptors_max``.

    The limits need a stream and a pidfd per half; but whoever may connect to the ZeroMQ socket can
    take more, and libzmq ends the process where it gets none to accept with. Raises ConfigError
    where the hard limit is too low to serve anyone.
    """
    wanted = limits.sessions_max * (limits.ranks_max + 1) * 2 + limits.connections_max + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < descriptors_min:
        raise ConfigError(
            f"the hard limit of open files (RLIMIT_NOFILE) is {hard}, at least {descriptors_min} "
            "are needed",
            f"raise it to {wanted} (ulimit -Hn, LimitNOFILE=): enough for all limits",
        )
    allowed = descriptors_max if hard == resource.RLIM_INFINITY else min(descriptors_max, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def stand_in_for_closed() -> None:
    """Where the process was started with stdin, stdout or stderr closed, have /dev/null there.

    Else the next file of ours gets its number, and what libraries say goes into that file. Called
    before anything is opened.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free number, so this one's.
            stream = Path(os.devnull).open(mode)  # noqa: SIM115 - for as long as the process lives
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)

"""How many descriptors the process may open."""

from __future__ import annotations

import resource

from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.limits import Limits

descriptors_min = 64  # sockets, the pool, threads' pipes, and some for attachments


def raise_descriptor_limit(limits: Limits) -> None:
    """Allow as many descriptors as the limits may need: a stream and a pidfd per half.

    Raises ConfigError where the hard limit is too low to serve anyone.
    """
    wanted = limits.sessions_max * (limits.ranks_max + 1) * 2 + limits.connections_max + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < descriptors_min:
        raise ConfigError(
            f"the hard limit of open files (RLIMIT_NOFILE) is {hard}, at least {descriptors_min} "
            "are needed",
            f"raise it to {wanted} (ulimit -Hn, LimitNOFILE=): enough for all limits",
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))

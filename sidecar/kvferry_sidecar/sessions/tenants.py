"""Which processes may be of which tenant, where an operator has bound tenants to users or groups.

Without a binding the tenant that an engine says is a name that separates caches and no boundary:
all engines are of the sidecar's own user. With one, processes of other users may attach, each as
the tenants that are bound to it, and nobody else may take a bound tenant's name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry_connector.wire.attach import Refused

from kvferry_sidecar.errors import ConfigError

KEY = "namespaces.bound"
_ID_END = 2**32 - 1  # no user or group has this number or a higher one
_BINDING = re.compile(r"([^=;,\s]+)=((?:uid|gid):\d{1,10}(?:,(?:uid|gid):\d{1,10})*)")


class Credentials(NamedTuple):
    """Of a connected process, as the kernel gives them."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Tenants:
    """``bound``: tenant -> the (kind, number) of users and groups that may be it."""

    bound: Mapping[str, frozenset[tuple[str, int]]]

    def of(self, who: Credentials) -> list[str]:
        """Return the tenants bound to a process's user or group."""
        mine = {("uid", who.uid), ("gid", who.gid)}
        return [tenant for tenant, holders in self.bound.items() if holders & mine]

    def admits(self, who: Credentials) -> bool:
        """Whether a process of another user than the sidecar's may attach."""
        return bool(self.of(who))

    def over_share(
        self, mine: Sequence[str], others: Iterable[Sequence[str]], places: int, limit: str
    ) -> Refused | None:
        """Return why a process of the tenants ``mine`` gets no further one of ``places``, or None.

        ``limit``: the setting that says how many places there are.
        ``others``: the tenants of who holds a place now. Every tenant has an equal share, and so
        have the sidecar's own user and root together: nobody can take what the others need.
        """
        share = max(1, places // (len(self.bound) + 1))
        taken = Counter(tenant for other in others for tenant in other)
        for tenant in mine:
            if taken[tenant] >= share:
                text = f"tenant {tenant!r} has its share, {share} of {places}; raise {limit}"
                return Refused("tenant-share", text)
        return None

    def refusal(
        self, who: Credentials, identity: Mapping[str, str], *, own: bool
    ) -> Refused | None:
        """Return why a process may not be of the tenant that its engine's identity names, or None.

        ``own``: it is the sidecar's user or root, who may be any tenant that nobody is bound to.
        """
        mine, tenant = self.of(who), identity.get("tenant", "")
        if not self.bound or tenant in mine or (own and tenant not in self.bound):
            return None
        may = f"may be {' or '.join(mine)}" if mine else "may be no tenant that is bound"
        text = f"uid {who.uid} and gid {who.gid} {may} (namespaces.bound)"
        return Refused("tenant", f"tenant {tenant!r} is not this process's: {text}")


NOBODY_BOUND = Tenants({})


def parse(text: str, origin: str = KEY) -> Tenants:
    """Return the bindings: ``red=uid:1000,gid:2000; blue=uid:1001``. Raises ConfigError."""
    bound: dict[str, frozenset[tuple[str, int]]] = {}
    for one in (part.strip() for part in text.split(";")):
        if not one:
            continue
        found = _BINDING.fullmatch(one)
        if found is None or found[1] in bound:
            raise ConfigError(
                f"{KEY} ({origin}): {one!r} is no binding, or a tenant's second one",
                "write TENANT=uid:NUMBER or TENANT=gid:NUMBER, several after commas, tenants "
                "separated by ';'",
            )
        pairs = (holder.split(":") for holder in found[2].split(","))
        bound[found[1]] = frozenset((kind, int(number)) for kind, number in pairs)
        if any(number >= _ID_END for _, number in bound[found[1]]):
            raise ConfigError(f"{KEY} ({origin}): {one!r} names no user", f"below {_ID_END}")
    return Tenants(bound)

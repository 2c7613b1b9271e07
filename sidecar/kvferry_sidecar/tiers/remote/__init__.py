"""Remote stores: one adapter per file, named by the scheme of ``tiers.remote.url``."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

from kvferry_sidecar.slow_tiers import RemoteTierConfig, remote_scheme
from kvferry_sidecar.tiers.store import Store

Open = Callable[[RemoteTierConfig, SplitResult, float], Store]


def open_remote(remote: RemoteTierConfig, call_s_max: float) -> Store:
    """Return the store that the configuration names; nothing is connected yet.

    ``call_s_max``: what a call may take, where the library lets us say so. Raises ConfigError for
    a setting that the store cannot have, MissingExtraError without its package.
    """
    parts = urlsplit(remote.url)
    return _OPENERS[remote_scheme(remote)](remote, parts, call_s_max)


def _redis(remote: RemoteTierConfig, parts: SplitResult, call_s_max: float) -> Store:
    from kvferry_sidecar.tiers.remote.redis_store import open_redis  # noqa: PLC0415 - an extra

    return open_redis(remote, parts, call_s_max)


_OPENERS: dict[str, Open] = {
    "redis": _redis,
    "rediss": _redis,
    "redis+unix": _redis,
}

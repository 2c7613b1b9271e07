"""Remote stores: one adapter per file, named by the scheme of ``tiers.remote.url``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

from kvferry_sidecar.slow_tiers import RemoteTierConfig, remote_scheme
from kvferry_sidecar.tiers.store import Memory, Store, StoreError

Open = Callable[[RemoteTierConfig, SplitResult, float, Memory], Store]


def open_remote(remote: RemoteTierConfig, call_s_max: float, pool: Memory) -> Store:
    """Return the store that the configuration names; it may be away.

    ``call_s_max``: what a call may take, where the library lets us say so. Raises ConfigError for
    a setting that the store cannot have, MissingExtraError without its package.
    """
    parts = urlsplit(remote.url)
    return _OPENERS[remote_scheme(remote)](remote, parts, call_s_max, pool)


def _redis(remote: RemoteTierConfig, parts: SplitResult, call_s_max: float, _pool: Memory) -> Store:
    from kvferry_sidecar.tiers.remote.redis_store import open_redis  # noqa: PLC0415 - an extra

    return open_redis(remote, parts, call_s_max)


def _mooncake(
    remote: RemoteTierConfig, parts: SplitResult, _call_s_max: float, pool: Memory
) -> Store:
    from kvferry_sidecar.tiers.remote import mooncake_store  # noqa: PLC0415 - an extra

    store = mooncake_store.open_mooncake(remote, parts, pool)
    with contextlib.suppress(StoreError):  # away: it is tried again when it is used
        store.connect()  # now, while nobody waits: it may take long
    return store


def _dfkv(remote: RemoteTierConfig, parts: SplitResult, _call_s_max: float, pool: Memory) -> Store:
    from kvferry_sidecar.tiers.remote import dfkv_store  # noqa: PLC0415 - loads a library

    return dfkv_store.open_dfkv(remote, parts, pool)


_OPENERS: dict[str, Open] = {
    "redis": _redis,
    "rediss": _redis,
    "redis+unix": _redis,
    "mooncake": _mooncake,
    "dfkv": _dfkv,
    "dfkv+mds": _dfkv,
}

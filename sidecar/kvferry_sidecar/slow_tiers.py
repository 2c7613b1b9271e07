"""Settings of the tiers under the pool: their structs, defaults, and what must fit together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from kvferry_sidecar import settings
from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.settings import Setting

DISK_BYTES_MIN = 16 << 20
REMOTE_STORES = (
    "redis",
    "rediss",
    "redis+unix",
    "mooncake",
    "dfkv",
    "dfkv+mds",
)  # schemes of tiers.remote.url
# Which objects of the pool are written to a slower tier: each, those loaded again, or none.
Policy = Literal["all", "reused", "none"]

# What Mooncake's library reads for itself, and would leave RDMA for: any value, even an empty one.
_NO_RDMA_ENV = "MC_FORCE_TCP"
# With 1 it takes whatever devices it finds, and TCP where it finds none. 0 is its default.
_CHOOSES_ENV = "MC_MS_AUTO_DISC"

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Threads = Annotated[int, msgspec.Meta(ge=1, le=64)]

DEFAULTS: Mapping[str, object] = {
    "tiers.disk.paths": "",
    "tiers.disk.bytes": 0,
    "tiers.disk.free_bytes_min": 1 << 30,
    "tiers.disk.threads": 4,
    "tiers.disk.policy": "all",
    "tiers.remote.url": "",
    "tiers.remote.password_file": "",
    "tiers.remote.value_bytes_max": 64 << 20,
    "tiers.remote.ttl_s": 0,
    "tiers.remote.threads": 4,
    "tiers.remote.policy": "all",
    "tiers.remote.protocol": "tcp",
    "tiers.remote.library": "",
    "tiers.remote.device": "",
    "tiers.remote.host": "",
    "tiers.remote.segment_bytes": 0,
    "tiers.remote.replicas": 1,
}


class DiskTierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Directories under the host pool; ``bytes`` of all of them together, 0: no disk tier."""

    paths: str  # separated by commas
    bytes: _Natural
    free_bytes_min: _Natural
    threads: _Threads  # of each path
    policy: Policy


class RemoteTierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A store beside the node; its URL's scheme names it. Empty: none."""

    url: str
    password_file: str
    value_bytes_max: Annotated[int, msgspec.Meta(ge=4096)]
    ttl_s: _Natural
    threads: _Threads
    policy: Policy
    protocol: Literal["tcp", "rdma"]  # Mooncake, dfkv
    library: str  # dfkv
    # Mooncake
    device: str  # with rdma
    host: str  # this node's address for its peers
    segment_bytes: _Natural  # memory of this node that the store may use
    replicas: Annotated[int, msgspec.Meta(ge=1, le=16)]


def disk_paths(disk: DiskTierConfig) -> list[Path]:
    """Return the configured directories; none when there is no disk tier."""
    return [Path(one.strip()) for one in disk.paths.split(",") if one.strip() and disk.bytes]


def remote_scheme(remote: RemoteTierConfig) -> str:
    """Return which store the remote URL names; "" for none."""
    return urlsplit(remote.url).scheme


def check_disk(disk: DiskTierConfig, values: Mapping[str, Setting]) -> None:
    """Raise ConfigError for what no single value shows."""
    if bool(disk.bytes) != bool(disk.paths.strip()):
        raise ConfigError(
            f"tiers.disk.bytes = {disk.bytes} ({values['tiers.disk.bytes'].origin}) and "
            f"tiers.disk.paths = {disk.paths!r} ({values['tiers.disk.paths'].origin}) do not go "
            "together",
            "set both for a disk tier, or neither",
        )
    paths = disk_paths(disk)
    for path in paths:
        if not path.is_absolute() or paths.count(path) > 1:
            raise ConfigError(
                f"tiers.disk.paths: {os.fspath(path)!r} ({values['tiers.disk.paths'].origin}) is "
                "relative, or there twice",
                "give different absolute paths, separated by commas",
            )
    if paths and disk.bytes // len(paths) < DISK_BYTES_MIN:
        raise ConfigError(
            f"tiers.disk.bytes = {disk.bytes} ({values['tiers.disk.bytes'].origin}) is too small",
            f"give at least {settings.size_text(DISK_BYTES_MIN)} per path",
        )


def check_remote(remote: RemoteTierConfig, values: Mapping[str, Setting]) -> None:
    """Raise ConfigError for what no single value shows."""
    given = f"tiers.remote.url ({values['tiers.remote.url'].origin})"
    if remote.url and remote_scheme(remote) not in REMOTE_STORES:
        raise ConfigError(
            f"{given} is {remote.url!r}, which names no store that is known",
            f"begin it with one of {', '.join(f'{name}://' for name in REMOTE_STORES)}",
        )
    if urlsplit(remote.url).password is not None:
        raise ConfigError(
            f"{given} carries a password, and settings are shown to operators",
            "put it into a file and name that with tiers.remote.password_file",
        )


def check_environment(remote: RemoteTierConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for what would turn the store's library away from what is configured."""
    if remote_scheme(remote) != "mooncake":
        return
    if environ.get(_CHOOSES_ENV, "0") != "0":
        raise ConfigError(
            f"environment {_CHOOSES_ENV} has Mooncake choose transport and devices itself, "
            f"tiers.remote.protocol is {remote.protocol}",
            f"unset {_CHOOSES_ENV}",
        )
    if remote.protocol == "rdma" and _NO_RDMA_ENV in environ:
        raise ConfigError(
            f"environment {_NO_RDMA_ENV} has Mooncake use TCP, tiers.remote.protocol is rdma",
            f"unset {_NO_RDMA_ENV}, or set tiers.remote.protocol = tcp",
        )

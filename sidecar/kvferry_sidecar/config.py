"""The configuration: file < environment < flags, decoded once into frozen structs.

The only module that reads the environment. Every value keeps where it came from, so that
`kvferry config show` and every error can name the place to change. Nothing is guessed: an unknown
key, an unreadable value or an impossible combination ends the command.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from kvferry_connector.wire.names import run_dir_bytes_max

from kvferry_sidecar import policies, settings, slow_tiers
from kvferry_sidecar.errors import ConfigError, PoolSegmentError
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.sessions import tenants
from kvferry_sidecar.settings import Setting
from kvferry_sidecar.slow_tiers import DiskTierConfig, RemoteTierConfig
from kvferry_sidecar.stages.modes import LoadModes

ENV_PREFIX = "KVFERRY_"
CONFIG_ENV = "KVFERRY_CONFIG"
SHM_DIR = Path("/dev/shm")  # noqa: S108 - where shm_open puts segments
_SYSTEM_RUN_DIR = Path("/run/kvferry")

HTTP_LISTEN = "127.0.0.1:9480"
POOL_BYTES = 4 << 30
POOL_BYTES_MIN = 1 << 20
SLAB_BYTES_MIN = 1 << 20
SLAB_BYTES_MAX = 64 << 20
SLABS_PER_POOL = 64
POOL_BYTES_PER_KEY = 16 << 10
KEYS_MIN = 4096
KEYS_MAX = (1 << 31) - 1  # of the pool's format

# Kubernetes puts these into every container beside a Service named kvferry-something.
_SERVICE_LINK = re.compile(
    r"KVFERRY(_[A-Z0-9]+)*_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?"
    r"|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)

_Positive = Annotated[int, msgspec.Meta(ge=1)]
# host:port with an IPv4 address, a name or [an IPv6 address]; empty: off
_ADDRESS = r"^$|^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}$"
_SegmentName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]


class HostTierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host pool: one POSIX shared-memory segment ``/dev/shm/<name>``.

    ``slab_bytes`` bounds one stored object (a chunk of all local ranks); a power of two.
    ``hugepages_dir``: a hugetlbfs mount that has the segment instead of /dev/shm; "": none.
    ``numa``: see placement.py.
    """

    bytes: Annotated[int, msgspec.Meta(ge=POOL_BYTES_MIN)]
    name: _SegmentName
    slab_bytes: Annotated[int, msgspec.Meta(ge=4096)]
    keys_max: Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)]
    hugepages_dir: Annotated[str, msgspec.Meta(pattern=r"^$|^/")]
    numa: Annotated[str, msgspec.Meta(pattern=r"^$|^interleave$|^\d+(-\d+)?(,\d+(-\d+)?)*$")]


class TiersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where bytes are kept."""

    host: HostTierConfig
    disk: DiskTierConfig
    remote: RemoteTierConfig


class NamespacesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds per namespace (policies.py)."""

    rules: str
    bound: str  # tenants to users and groups: sessions/tenants.py


class CopyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The copy engines. ``gpu``: whether engines with KV memory on a GPU are served."""

    threads: Annotated[int, msgspec.Meta(ge=1, le=256)]
    gpu: bool
    gpu_mode: Literal["auto", "rect", "batch", "kernel"]
    gpu_share_percent: Annotated[int, msgspec.Meta(ge=1, le=100)]


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logs go to stderr, as text for people or one JSON object per line."""

    level: Literal["debug", "info", "warning", "error"]
    format: Literal["console", "json"]


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """HTTP for operators; "" switches an address off. See observe/http."""

    listen: Annotated[str, msgspec.Meta(pattern=_ADDRESS)]
    probes_listen: Annotated[str, msgspec.Meta(pattern=_ADDRESS)]
    token_file: str


class TracesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Traces of requests by OTLP over HTTP; "" switches them off. See observe/traces.py."""

    endpoint: Annotated[str, msgspec.Meta(pattern=r"^$|^https?://[^\s/]+(/\S*)?$")]
    sample_percent: Annotated[int, msgspec.Meta(ge=0, le=100)]
    slow_ms: _Positive


class FaultsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fault injection, for tests: docs/faults.md. Rules are separated by ``;``."""

    enabled: bool
    rules: str
    seed: Annotated[int, msgspec.Meta(ge=0)]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything `kvferry serve` can be told.

    ``retention``: "engine", "dense" or a number of tokens (sessions/rules.py: retention_of).
    """

    run_dir: Path
    retention: Annotated[str, msgspec.Meta(pattern=r"^(engine|dense|[1-9][0-9]{0,8})$")]
    tiers: TiersConfig
    namespaces: NamespacesConfig
    copy: CopyConfig
    loads: LoadModes
    log: LogConfig
    http: HttpConfig
    traces: TracesConfig
    faults: FaultsConfig
    limits: Limits


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and per dotted key where its value came from."""

    config: Config
    origins: Mapping[str, str]
    file: Path | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (key, value as text, origin) of every setting, in the order of the structs."""
        return [
            (key, settings.as_text(key, value), self.origins[key])
            for key, value in view(self.config).items()
        ]


KNOWN = settings.keys_of(Config)

# What takes effect without a restart (reload.py).
HOT = frozenset(
    {
        "log.level",
        "retention",
        "loads.breaker",
        "traces.sample_percent",
        "traces.slow_ms",
        "namespaces.rules",
        "limits.hashes_max",
        "limits.leases_max",
        "limits.jobs_max",
        "limits.fence_ms_max",
        "limits.fence_poll_us",
        "limits.copy_ms_max",
        "limits.save_copies_max",
        "limits.ranks_wait_ms_max",
        "limits.drain_ms_max",
        "limits.scan_places_max",
        "limits.pinned_percent_max",
    }
)


def load(
    file: Path | None = None,
    flags: Mapping[str, Setting] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Loaded:
    """Read all layers and return the configuration.

    ``flags`` maps dotted keys to what was given on the command line; ``environment`` defaults to
    the process's own. Raises ConfigError naming key, place and remedy.
    """
    environ = os.environ if environment is None else environment
    if file is None and environ.get(CONFIG_ENV):
        file = Path(environ[CONFIG_ENV])
    given = read_file(file) if file else {}
    given |= _from_environment(environ)
    for key, one in (flags or {}).items():
        if key not in KNOWN:
            raise settings.unknown(f"{one.origin} names an unknown key {key!r}", key, list(KNOWN))
        given[key] = one
    values = {
        key: Setting(settings.parse(key, KNOWN[key], one), one.origin) for key, one in given.items()
    }
    loaded = replace(_decode(_with_defaults(values)), file=file)
    slow_tiers.check_environment(loaded.config.tiers.remote, environ)
    return loaded


def read_file(file: Path) -> dict[str, Setting]:
    """Return the settings of a TOML file by dotted key. Raises ConfigError."""
    try:
        tree = settings.flatten(tomllib.loads(settings.read_text(file)))
    except OSError as error:
        raise ConfigError(
            f"configuration file {file} cannot be read: {error.strerror}",
            "name an existing file with --config or KVFERRY_CONFIG",
        ) from error
    except (ValueError, RecursionError) as error:  # also no UTF-8, or a thousand digits
        raise ConfigError(f"{file} is no TOML: {error}", "correct the file there") from error
    found: dict[str, Setting] = {}
    for key, value in tree.items():
        if key not in KNOWN:
            raise settings.unknown(f"{file} has an unknown key {key!r}", key, list(KNOWN))
        found[key] = Setting(value, f"file {file}")
    return found


def view(config: Config) -> dict[str, object]:
    """Return every setting by dotted key, as plain values."""
    return settings.flatten(msgspec.to_builtins(config, enc_hook=str))


def from_view(values: Mapping[str, object]) -> Config:
    """Return the configuration of what ``view`` gave."""
    tree = settings.unflatten(values)
    return msgspec.convert(tree, Config, dec_hook=lambda kind, value: kind(value))


def env_name(key: str) -> str:
    """Return the environment variable of a dotted key: tiers.host.bytes, KVFERRY_TIERS_..."""
    return ENV_PREFIX + key.upper().replace(".", "_")


def default_run_dir() -> Path:
    """Return the node's run directory where it exists, else this user's own.

    The same rule as the connector's, which reads no environment: both find each other unconfigured.
    """
    if _SYSTEM_RUN_DIR.is_dir():
        return _SYSTEM_RUN_DIR
    return Path(f"/tmp/kvferry-{os.getuid()}")  # noqa: S108 - made private (0700) and checked


def default_slab_bytes(pool_bytes: int) -> int:
    """Return a 64th of the pool within 1 to 64 MiB, rounded down to a power of two."""
    wanted = min(max(pool_bytes // SLABS_PER_POOL, SLAB_BYTES_MIN), SLAB_BYTES_MAX)
    return 1 << (wanted.bit_length() - 1)


def default_keys_max(pool_bytes: int) -> int:
    """Return index places for objects of 16 KiB: 0.4 % of the pool."""
    return min(max(pool_bytes // POOL_BYTES_PER_KEY, KEYS_MIN), KEYS_MAX)


def check_space(host: HostTierConfig) -> None:
    """Raise PoolSegmentError when /dev/shm cannot hold the pool; an existing segment counts.

    The segment itself is reserved later (posix_fallocate); this is the same answer, earlier.
    """
    if host.hugepages_dir:
        return  # what is free there the segment's own check says
    space = os.statvfs(SHM_DIR)
    free_bytes = space.f_bavail * space.f_frsize
    segment = SHM_DIR / host.name
    has_bytes = segment.stat().st_blocks * 512 if segment.exists() else 0
    if host.bytes > free_bytes + has_bytes:
        raise PoolSegmentError(
            f"the pool of {settings.size_text(host.bytes)} does not fit {SHM_DIR}, which has "
            f"{settings.size_text(free_bytes + has_bytes)} left",
            "lower tiers.host.bytes (--pool-bytes), or enlarge the file system "
            "(mount -o remount,size=..., docker --shm-size, or an emptyDir of medium Memory)",
        )


def _from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    names = {env_name(key): key for key in KNOWN}
    found: dict[str, Setting] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name == CONFIG_ENV or _SERVICE_LINK.fullmatch(name):
            continue
        if name not in names:
            raise settings.unknown(f"environment has an unknown {name}", name, list(names))
        found[names[name]] = Setting(value, f"environment {name}")
    return found


def _with_defaults(values: dict[str, Setting]) -> dict[str, Setting]:
    """Fill in what nothing set. Sizes that follow from the pool's say so in their origin."""
    cpus = len(os.sched_getaffinity(0))
    defaults: dict[str, object] = {
        "run_dir": str(default_run_dir()),
        "retention": "engine",
        "tiers.host.bytes": POOL_BYTES,
        "tiers.host.name": f"kvferry-{os.getuid()}",
        "tiers.host.hugepages_dir": "",
        "tiers.host.numa": "",
        "namespaces.rules": "",
        "namespaces.bound": "",
        "copy.threads": min(max(cpus // 4, 1), 8),
        "copy.gpu": False,
        "copy.gpu_mode": "auto",
        "copy.gpu_share_percent": 100,
        "loads.mode": "overlapped",
        "loads.breaker": True,
        "loads.shadow_percent": 0,
        "log.level": "info",
        "log.format": "console",
        "http.listen": HTTP_LISTEN,
        "http.probes_listen": "",
        "http.token_file": "",
        "traces.endpoint": "",
        "traces.sample_percent": 1,
        "traces.slow_ms": 1000,
        "faults.enabled": False,
        "faults.rules": "",
        "faults.seed": 1,
    }
    defaults |= slow_tiers.DEFAULTS
    for name, value in msgspec.structs.asdict(Limits()).items():
        defaults[f"limits.{name}"] = value
    full = {key: Setting(value, "default") for key, value in defaults.items()} | values
    pool_bytes = full["tiers.host.bytes"].value
    assert isinstance(pool_bytes, int)
    origin = "default, from tiers.host.bytes"
    full.setdefault("tiers.host.slab_bytes", Setting(default_slab_bytes(pool_bytes), origin))
    full.setdefault("tiers.host.keys_max", Setting(default_keys_max(pool_bytes), origin))
    return {key: full[key] for key in KNOWN}


def _decode(values: dict[str, Setting]) -> Loaded:
    """Build the structs, then check what no single value shows."""
    try:
        config = from_view({key: one.value for key, one in values.items()})
    except msgspec.ValidationError as error:
        key = settings.key_in(str(error))
        one = values.get(key)
        where = f"{key} = {one.value!r} ({one.origin})" if one else key
        raise ConfigError(f"{where}: {error}", "see docs/configuration.md for its range") from error
    _check(config, values)
    return Loaded(config, {key: one.origin for key, one in values.items()})


def _check(config: Config, values: Mapping[str, Setting]) -> None:
    slow_tiers.check_disk(config.tiers.disk, values)
    slow_tiers.check_remote(config.tiers.remote, values)
    tenants.parse(config.namespaces.bound, values["namespaces.bound"].origin)
    policies.parse(config.namespaces.rules, values["namespaces.rules"].origin)
    if config.faults.rules and not config.faults.enabled:
        raise ConfigError(
            f"faults.rules ({values['faults.rules'].origin}) asks for fault injection, which is "
            "not enabled",
            "remove it; only in a test, set faults.enabled = true as well",
        )
    host = config.tiers.host
    run_dir = os.fspath(config.run_dir)
    origin = values["run_dir"].origin
    if not config.run_dir.is_absolute():
        raise ConfigError(f"run_dir {run_dir!r} ({origin}) is relative", "give an absolute path")
    if len(os.fsencode(run_dir)) > run_dir_bytes_max:
        raise ConfigError(
            f"run_dir {run_dir!r} ({origin}) is longer than {run_dir_bytes_max} bytes, and socket "
            "paths end at 108",
            "choose a shorter directory",
        )
    for key in ("http.listen", "http.probes_listen"):
        address = str(values[key].value)
        if address and int(address.rpartition(":")[2]) > 65535:
            raise ConfigError(
                f"{key} = {address!r} ({values[key].origin}): there is no such port",
                "give a port up to 65535, or 0 for any free one",
            )
    if host.slab_bytes & (host.slab_bytes - 1):
        raise ConfigError(
            f"tiers.host.slab_bytes = {host.slab_bytes} ({values['tiers.host.slab_bytes'].origin})"
            " is no power of two",
            f"use {settings.size_text(1 << host.slab_bytes.bit_length())}",
        )
    if host.slab_bytes > host.bytes:
        raise ConfigError(
            f"tiers.host.slab_bytes = {settings.size_text(host.slab_bytes)} "
            f"({values['tiers.host.slab_bytes'].origin}) is over tiers.host.bytes = "
            f"{settings.size_text(host.bytes)}",
            "lower slab_bytes or raise bytes",
        )

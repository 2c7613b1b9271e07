"""Settings of the half in the engine: ``kv_connector_extra_config``, checked in full at start."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from kvferry_connector.wire.names import run_dir_bytes_max

_SYSTEM_RUN_DIR = Path("/run/kvferry")


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range; the text has the remedy."""


class FerryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting with its unit. Defaults suit one node; see docs for when to change one.

    ``pinned_blocks_max`` 0 stands for a quarter of the engine's blocks. ``model_identity``,
    ``model_revision`` and ``weights_version`` overrule what the engine says of itself (for
    weights that are loaded from elsewhere, or that change without a new revision). ``tenant``
    separates the cache of engines that would otherwise share it.
    """

    run_dir: str = ""
    lookup_wait_us_max: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 300
    idle_wait_us_max: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 2_000
    probe_ms_max: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 100
    hint_fresh_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 50
    pinned_blocks_max: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    awake_ms_max: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] = 60_000
    job_ask_ms: Annotated[int, msgspec.Meta(ge=10, le=600_000)] = 2_000
    silent_ms_max: Annotated[int, msgspec.Meta(ge=100, le=600_000)] = 3_000
    attach_ms_max: Annotated[int, msgspec.Meta(ge=100, le=600_000)] = 5_000
    gather_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 512
    heartbeat_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0
    loads: bool = True
    saves: bool = True
    model_identity: str = ""
    model_revision: str = ""
    weights_version: str = ""
    tenant: str = ""

    def run_path(self) -> Path:
        """Return the run directory: the setting, else the node's, else this user's."""
        if self.run_dir:
            return Path(self.run_dir)
        if _SYSTEM_RUN_DIR.is_dir():
            return _SYSTEM_RUN_DIR
        return Path(f"/tmp/kvferry-{os.getuid()}")  # noqa: S108 - the same rule as the sidecar's

    def pins_max(self, num_blocks: int) -> int:
        """Return how many of the engine's ``num_blocks`` may be pinned by saves at once."""
        return self.pinned_blocks_max or max(1, num_blocks // 4)


def volume_of(path: Path) -> str:
    """Return a name of the mounted volume ``path`` lies in, or will: the same wherever it is seen.

    Two pods of one host may have equal paths in volumes of their own.
    """
    inside = Path(os.path.realpath(path))
    root = next(at for at in (inside, *inside.parents) if os.path.ismount(at)).stat()
    return f"{root.st_dev}:{root.st_ino}"


def read_config(extra: Mapping[str, object]) -> FerryConfig:
    """Check ``kv_connector_extra_config`` and return the settings.

    Raises ConfigError naming the key, its value, what is expected, and for an unknown key the
    nearest known one.
    """
    known = FerryConfig.__struct_fields__
    for key, value in extra.items():
        where = f"kv_connector_extra_config[{key!r}]"
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"{where}: there is no such setting{hint}")
        try:
            msgspec.convert({key: value}, FerryConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where} is {value!r}: {error}") from error
    config = msgspec.convert(dict(extra), FerryConfig)
    if config.run_dir and not Path(config.run_dir).is_absolute():
        raise ConfigError(
            f"kv_connector_extra_config['run_dir'] is {config.run_dir!r}: expected an absolute "
            "path, the one `kvferry serve` uses"
        )
    if len(os.fsencode(config.run_path())) > run_dir_bytes_max:
        raise ConfigError(
            f"run_dir {config.run_dir!r} is longer than {run_dir_bytes_max} bytes, and socket "
            "paths in it would not fit; choose a shorter one, e.g. /run/kvferry"
        )
    return config

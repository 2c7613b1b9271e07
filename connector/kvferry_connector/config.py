"""Settings of the half in the engine: ``kv_connector_extra_config``, checked in full at start."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvferry_connector.wire.names import run_dir_bytes_max

_SYSTEM_RUN_DIR = Path("/run/kvferry")


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range; the text has the remedy."""


class FerryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting with its unit. Defaults suit one node; see docs for when to change one.

    ``pinned_blocks_max`` 0 stands for a quarter of the engine's blocks. ``model_identity``,
    ``model_revision`` and ``weights_version`` overrule what the engine says of itself (for
    weights that are loaded from elsewhere, or that change without a new revision).
    """

    run_dir: str = ""
    lookup_wait_us_max: int = 300
    probe_ms_max: int = 100
    hint_fresh_ms: int = 50
    pinned_blocks_max: int = 0
    awake_ms_max: int = 60_000
    job_ask_ms: int = 2_000
    silent_ms_max: int = 3_000
    attach_ms_max: int = 5_000
    heartbeat_ms: int = 0
    loads: bool = True
    saves: bool = True
    model_identity: str = ""
    model_revision: str = ""
    weights_version: str = ""

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


_RANGES: dict[str, tuple[int, int]] = {
    "lookup_wait_us_max": (0, 10_000),
    "probe_ms_max": (0, 60_000),
    "hint_fresh_ms": (0, 60_000),
    "pinned_blocks_max": (0, 1 << 31),
    "awake_ms_max": (0, 3_600_000),
    "job_ask_ms": (10, 600_000),
    "silent_ms_max": (100, 600_000),
    "attach_ms_max": (100, 600_000),
    "heartbeat_ms": (0, 60_000),
}


def read_config(extra: Mapping[str, object]) -> FerryConfig:
    """Check ``kv_connector_extra_config`` and return the settings.

    Raises ConfigError naming the key, its value, what is expected, and for an unknown key the
    nearest known one.
    """
    fields = {field.name: field for field in msgspec.structs.fields(FerryConfig)}
    for key, value in extra.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(fields)}"
            raise ConfigError(f"kv_connector_extra_config has no setting {key!r}{hint}")
        expected = type(fields[key].default)
        if type(value) is not expected:  # bool is an int to isinstance, and here a mistake
            raise ConfigError(
                f"kv_connector_extra_config[{key!r}] is {value!r} ({type(value).__name__}); "
                f"expected {_TYPE_NAMES[expected]}"
            )
        _check_range(key, value)
    config = msgspec.convert(dict(extra), FerryConfig)
    _check_run_dir(config)
    return config


_TYPE_NAMES: dict[type, str] = {str: "a string", int: "an integer", bool: "true or false"}


def _check_range(key: str, value: object) -> None:
    if key not in _RANGES or not isinstance(value, int):
        return
    low, high = _RANGES[key]
    if not low <= value <= high:
        raise ConfigError(
            f"kv_connector_extra_config[{key!r}] is {value}; expected {low} to {high}"
        )


def _check_run_dir(config: FerryConfig) -> None:
    if config.run_dir and not Path(config.run_dir).is_absolute():
        raise ConfigError(
            f"kv_connector_extra_config['run_dir'] is {config.run_dir!r}; expected an absolute "
            "path, the one `kvferry serve` uses"
        )
    if len(os.fsencode(str(config.run_path()))) > run_dir_bytes_max:
        raise ConfigError(
            f"run_dir {config.run_dir!r} is longer than {run_dir_bytes_max} bytes, and socket "
            "paths in it would not fit; choose a shorter one, e.g. /run/kvferry"
        )

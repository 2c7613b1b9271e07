"""Flags that set configuration keys, shared by the commands that read a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from kvferry_sidecar import config
from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.settings import Setting

Command = TypeVar("Command", bound=Callable[..., Any])


class Flag(NamedTuple):
    """A flag of its own for a key; every other key is set by ``--set KEY=VALUE``."""

    option: str
    metavar: str
    text: str


FLAGS: Mapping[str, Flag] = {
    "run_dir": Flag("--run-dir", "DIR", "Directory of the sockets and the lock."),
    "tiers.host.bytes": Flag("--pool-bytes", "SIZE", "Size of the host pool, such as 8GiB."),
    "tiers.host.name": Flag("--pool-name", "NAME", "Name of its segment in /dev/shm."),
    "tiers.host.slab_bytes": Flag("--slab-bytes", "SIZE", "Largest stored object; power of two."),
    "tiers.host.keys_max": Flag("--keys-max", "N", "Places in the pool's index."),
    "retention": Flag("--retention", "HOW", "engine, dense, or a number of tokens."),
    "copy.threads": Flag("--copy-threads", "N", "Threads that copy."),
    "http.listen": Flag("--http-listen", "HOST:PORT", "Metrics, probes and page; empty: none."),
    "log.level": Flag("--log-level", "LEVEL", "debug, info, warning or error."),
    "log.format": Flag("--log-format", "FORMAT", "console or json."),
}

config_file = click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file (or KVFERRY_CONFIG).",
)


def setting_flags(*keys: str) -> Callable[[Command], Command]:
    """Add the flags of ``keys`` (all when none is named) and ``--set`` to a command."""

    def decorate(command: Command) -> Command:
        decorated = click.option(
            "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Set any other key."
        )(command)
        for key in reversed(keys or tuple(FLAGS)):
            flag = FLAGS[key]
            decorated = click.option(
                flag.option, _parameter(key), metavar=flag.metavar, help=flag.text
            )(decorated)
        return decorated

    return decorate


def given(values: Mapping[str, object], assignments: Sequence[str]) -> dict[str, Setting]:
    """Return what the command line sets, by dotted key. Raises ConfigError for a bad --set."""
    found = {
        key: Setting(values[_parameter(key)], f"flag {flag.option}")
        for key, flag in FLAGS.items()
        if values.get(_parameter(key)) is not None
    }
    for assignment in assignments:
        key, value = pair(assignment, "--set KEY=VALUE, for example --set limits.sessions_max=8")
        found[key] = Setting(value, f"flag --set {key}")
    return found


def pair(text: str, form: str) -> tuple[str, str]:
    """Return the halves of NAME=VALUE. Raises ConfigError naming the ``form`` to write."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} has no value", f"write {form}")
    return name, value


def load(
    file: Path | None, values: Mapping[str, object], assignments: Sequence[str] = ()
) -> config.Loaded:
    """Read file, environment and flags. Raises ConfigError."""
    return config.load(file, given(values, assignments))


def _parameter(key: str) -> str:
    return key.replace(".", "_")

"""Settings as dotted keys: the pure half of config.py. Nothing here reads a file or environment."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvferry_sidecar.errors import ConfigError

# "": off
may_be_empty = (
    "http.listen",
    "http.probes_listen",
    "http.token_file",
    "traces.endpoint",
    "tiers.host.hugepages_dir",
    "tiers.host.numa",
    "tiers.disk.paths",
    "tiers.remote.url",
    "tiers.remote.password_file",
    "faults.rules",
    "namespaces.rules",
    "namespaces.bound",
    "tiers.remote.library",
    "tiers.remote.device",
    "tiers.remote.host",
)
_UNITS = {
    "": 1, "B": 1,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+)(?:\.(\d{1,9}))?\s*([A-Za-z]*)\s*")
_WORDS = {"true": True, "false": False}
file_chars_max = 1 << 20
integer_max = (1 << 63) - 1
_digits_max = 64  # characters of a number
_shown_max = 200  # characters of a wrong value in its refusal


class Setting(NamedTuple):
    """A value and the place it came from."""

    value: object
    origin: str


def keys_of(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, Any]:
    """Return the dotted key of every leaf of nested structs with its type, in their order."""
    hints = typing.get_type_hints(struct, include_extras=True)
    found: dict[str, Any] = {}
    for field in struct.__struct_fields__:
        kind = hints[field]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            found |= keys_of(kind, f"{prefix}{field}.")
        else:
            found[f"{prefix}{field}"] = kind
    return found


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested tables as dotted keys."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.") or {f"{prefix}{name}": {}}
        else:
            found[f"{prefix}{name}"] = value
    return found


def unflatten(values: Mapping[str, object]) -> dict[str, object]:
    """Return dotted keys as nested tables."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        table = tree
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return tree


def read_text(file: Path) -> str:
    """Return a file's text. Raises OSError, and ValueError for what is no text of its bound."""
    with file.open(encoding="utf-8") as source:
        text = source.read(file_chars_max + 1)
    if len(text) > file_chars_max:  # a device gives them without end
        raise ValueError(f"it has more than {file_chars_max} characters")
    return text


def unknown(what: str, key: str, known: Sequence[str]) -> ConfigError:
    """Return the error for a key that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:  # the section may be missing: compare last parts
        tails = {name.rpartition(".")[2]: name for name in known}
        last = difflib.get_close_matches(key.rpartition(".")[2], list(tails), n=1)
        near = [tails[name] for name in last]
    remedy = f"did you mean {near[0]}?" if near else "docs/configuration.md lists all keys"
    return ConfigError(what, remedy)


def parse(key: str, kind: Any, one: Setting) -> object:
    """Return the value of a setting in its type. Raises ConfigError; never falls back.

    Text is read by type; any other value must have it. Sizes take a number of bytes or text such
    as "8GiB". Numbers are positive unless the type says otherwise.
    """
    metadata = getattr(kind, "__metadata__", ())
    base = typing.get_args(kind)[0] if metadata else kind
    least = min((meta.ge for meta in metadata if meta.ge is not None), default=1)
    value = one.value
    if base is int and isinstance(value, str):
        value = _size(key, one, value) if is_size(key) else _integer(key, one, value)
    if base is bool and isinstance(value, str):
        if value.lower() in _WORDS:
            return _WORDS[value.lower()]
        raise _wrong(key, one, "true or false", "write true or false")
    if isinstance(value, Path):
        value = str(value)
    expected = {int: int, bool: bool}.get(base, str)
    if type(value) is not expected:  # bool is an int to isinstance, and here a mistake
        names = {int: "an integer", bool: "true or false", str: "text"}
        raise _wrong(key, one, names[expected], f"write {names[expected]}")
    if isinstance(value, str) and "\0" in value:
        raise _wrong(key, one, "text", "leave the NUL out")
    if value == "" and key not in may_be_empty:
        raise _wrong(key, one, "text", "give a value or leave it out")
    if type(value) is int and value < min(least, 1):
        positive = "a positive number" if least else "0 or more"
        raise _wrong(key, one, f"at least {min(least, 1)}", f"give {positive} or leave it out")
    if type(value) is int and value > integer_max:
        raise _wrong(key, one, "a number of 63 bits", "give a smaller one")
    return value


def is_size(key: str) -> bool:
    """Say whether a key counts bytes."""
    return "bytes" in key.rpartition(".")[2].split("_")


def size_text(value: int) -> str:
    """Return a byte count for people: rounded to a decimal of the largest binary unit."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value >= _UNITS[unit]:
            return f"{value / _UNITS[unit]:.1f} {unit}".replace(".0 ", " ")
    return f"{value} B"


def as_text(key: str, value: object) -> str:
    """Return a value as `config show` prints it: exact, and readable as a setting again."""
    if is_size(key) and isinstance(value, int):
        exact = [unit for unit in ("TiB", "GiB", "MiB", "KiB") if value % _UNITS[unit] == 0]
        return f"{value // _UNITS[exact[0]]} {exact[0]}" if exact and value else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def key_in(message: str) -> str:
    """Return the dotted key that a msgspec error names ("... - at `$.tiers.host.bytes`")."""
    found = re.search(r"at `\$\.([\w.]+)`", message)
    return found[1] if found else ""


def _size(key: str, one: Setting, text: str) -> int:
    found = _SIZE.fullmatch(text) if len(text) <= _digits_max else None
    if found is None or found[3] not in _UNITS or (found[2] and _UNITS[found[3]] == 1):
        raise _wrong(key, one, "a size", 'write bytes or a size such as "8GiB" (KiB, MiB, TiB, KB)')
    whole, fraction, unit = found.groups()
    scale = 10 ** len(fraction or "")
    return int(int(whole + (fraction or "")) * _UNITS[unit] // scale)


def _integer(key: str, one: Setting, text: str) -> int:
    if len(text) <= _digits_max and re.fullmatch(r"\s*\d+(_\d+)*\s*", text):
        return int(text)
    units = {"ms": " of milliseconds", "us": " of microseconds"}
    unit = next((units[part] for part in key.split("_") if part in units), "")
    remedy = f"write a whole number{unit}"
    raise _wrong(key, one, "a whole number", remedy)


def _wrong(key: str, one: Setting, expected: str, remedy: str) -> ConfigError:
    text = repr(one.value)
    text = text if len(text) <= _shown_max else f"{text[:_shown_max]}..."
    return ConfigError(f"{key} = {text} ({one.origin}) is not {expected}", remedy)

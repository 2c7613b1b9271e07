"""`kvferry objects`: what the pool holds, counted, listed, pinned and dropped."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import msgspec

from kvferry_sidecar.cli import options
from kvferry_sidecar.cli.api import Api
from kvferry_sidecar.errors import ExitCode, RequestError
from kvferry_sidecar.settings import size_text

_page_objects = 1000  # of one answer
_keys_page = 1000  # keys of one action
_line_bytes_max = 4096
_LIST = "give a list that `kvferry objects list` has printed"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Command = TypeVar("Command", bound=Callable[..., Any])


class Listed(NamedTuple):
    """One object of a list; namespace and key in hexadecimal digits."""

    namespace: str
    group: int
    key: str


def _age(text: str) -> int:
    """Return seconds of a number with s, m, h or d behind it, or of a bare one."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    if not number.isdecimal():
        raise click.BadParameter(f"{text!r} is no age: write 90, 30m, 12h or 7d")
    return int(number) * _UNITS[unit]


def _selecting(command: Command) -> Command:
    """Give a command the options that say which objects."""
    for add in (
        click.option("--keys-file", type=click.Path(path_type=Path, exists=True),
                     help="Only the objects of a list (one of `objects list`)."),
        click.option("--pinned", type=click.Choice(["none", "soft", "hard"]),
                     help="Only objects that are pinned so."),
        click.option("--younger", type=_age, help="Stored less than this ago."),
        click.option("--older", type=_age, help="Stored at least this ago: 90, 30m, 12h, 7d."),
        click.option("--tenant", help="Only of this tenant's namespaces."),
        click.option("--namespace", help="Its first hexadecimal digits."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        options.setting_flags("run_dir"),
        options.config_file,
    ):  # fmt: skip
        command = add(command)
    return command


@click.group()
def objects() -> None:
    """Count, list, pin and drop objects, by tier, namespace and age."""


@objects.command()
@options.config_file
@options.setting_flags("run_dir")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def count(file: Path | None, assignments: tuple[str, ...], as_json: bool, **values: object) -> int:
    """Say what every namespace has, and what each slower tier has in all."""
    api = Api(options.load(file, values, assignments).config.run_dir)
    found = {"namespaces": api.get("namespaces"), "tiers": api.get("tiers")["slower"]}
    if as_json:
        _print_json(found)
        return ExitCode.OK
    if not found["namespaces"]:
        print("the pool has no objects")
    for one in found["namespaces"]:
        quota = f" of {size_text(one['quota_bytes'])}" if one["quota_bytes"] else ""
        who = " ".join(one[name] for name in ("tenant", "model", "engine") if one[name])
        print(
            f"{one['namespace'] or 'nobody':<32}  {one['objects']:>9,} objects  "
            f"{size_text(one['total_bytes'])}{quota}  {who}"
        )
    for tier in found["tiers"]:
        print(f"{tier['name']}: {tier['state']}, {tier['facts'].get('objects', '?')} objects")
    return ExitCode.OK


@objects.command("list")
@_selecting
@click.option("--limit", default=1000, type=click.IntRange(1), help="At most so many.")
@click.option("--tier", type=click.Choice(["host", "disk"]), default="host", show_default=True)
def list_objects(limit: int, tier: str, as_json: bool, **given: Any) -> int:
    """List objects: a line each of namespace, group, key, seconds since it was stored, bytes, pin.

    With --json one object per line. Both are lists that `kvferry warm` and --keys-file read.
    What remote stores hold is only counted.
    """
    if tier == "disk":
        found = itertools.chain.from_iterable(pages for _, pages in _on_disks(given))
        for one in itertools.islice(found, limit):
            _print_object(one, as_json)
        return ExitCode.OK
    api, fits = _selected(given)
    left = limit
    for one in fits:
        if one.pop("keys", None) is not None:
            raise RequestError("a list cannot be listed", "leave --keys-file out")
        first: int | None = 0
        while first is not None and left > 0:
            query = {**one, "first": first, "limit": min(left, _page_objects)}
            page = api.get("objects", query=query)
            for found in page["objects"]:
                _print_object(found, as_json)
            left -= len(page["objects"])
            first = page["next"]
    return ExitCode.OK


@objects.command()
@_selecting
@click.option("--soft", is_flag=True, help="Evict them when nothing else can be; else never.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
def pin(soft: bool, dry_run: bool, as_json: bool, **given: Any) -> int:
    """Keep objects from eviction, also over restarts; at most limits.pinned_percent_max hard."""
    return _pin("soft" if soft else "hard", dry_run, as_json, given)


@objects.command()
@_selecting
@click.option("--dry-run", is_flag=True, help="Only count them.")
def unpin(dry_run: bool, as_json: bool, **given: Any) -> int:
    """Let pinned objects be evicted as all others."""
    return _pin("none", dry_run, as_json, given)


@objects.command()
@_selecting
@click.option("--tier", type=click.Choice(["host", "disk", "slower", "all"]), default="host")
@click.option("--dry-run", is_flag=True, help="Only count them.")
def drop(tier: str, dry_run: bool, as_json: bool, **given: Any) -> int:
    """Forget objects: in the pool (host), on disks, in all tiers below the pool (slower), or all.

    With `disk` those that fit of what the disks hold. With `slower` and `all` the tiers are asked
    to forget the objects that the pool has and that fit, and every key of --keys-file.
    """
    if tier == "disk" and not given["keys_file"]:
        sums: Counter[str] = Counter(objects=0, bytes=0, refused=0)
        for api, page in _on_disks(given):
            sums.update(objects=len(page), bytes=sum(one["bytes"] for one in page))
            if page and not dry_run:
                fits = {"keys": [one["key"] for one in page]}
                api.act("drop-objects", fits=fits, tiers=tier, dry_run=False)
        return _told("drop-objects", sums, dry_run, as_json)
    return _act("drop-objects", {"tiers": tier}, dry_run, as_json, given)


@objects.command()
@options.config_file
@options.setting_flags("run_dir")
@click.option("--to-percent", required=True, type=click.IntRange(0, 100), help="Of the pool used.")
@click.option("--dry-run", is_flag=True, help="Only say how much it is.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evict(
    file: Path | None,
    assignments: tuple[str, ...],
    to_percent: int,
    dry_run: bool,
    as_json: bool,
    **values: object,
) -> int:
    """Evict what is coldest until so much of the pool is used; pinned and leased objects stay.

    It goes on in the sidecar: `kvferry status` shows how far it is.
    """
    api = Api(options.load(file, values, assignments).config.run_dir)
    did = api.act("evict", to_percent=to_percent, dry_run=dry_run)
    if as_json:
        _print_json(did)
    else:
        print(f"{size_text(int(str(did['bytes'])))}: {'would go' if dry_run else 'going'}")
    return ExitCode.OK


def _pin(level: str, dry_run: bool, as_json: bool, given: dict[str, Any]) -> int:
    return _act("pin-objects", {"pin": level}, dry_run, as_json, given)


def _act(
    action: str, how: dict[str, object], dry_run: bool, as_json: bool, given: dict[str, Any]
) -> int:
    """Carry an action out page by page, and print the sums."""
    api, fits = _selected(given)
    sums: Counter[str] = Counter(objects=0, bytes=0, refused=0)
    for one in fits:
        first: Any = 0
        while first is not None:
            did = api.act(action, fits=one, first=first, dry_run=dry_run, **how)
            sums.update({name: int(str(did[name])) for name in sums})
            first = did["next"]
    return _told(action, sums, dry_run, as_json)


def _told(action: str, sums: Counter[str], dry_run: bool, as_json: bool) -> int:
    if as_json:
        _print_json({"action": action, "dry_run": dry_run, **sums})
    else:
        would = "would be " if dry_run else ""
        print(f"{sums['objects']:,} objects, {size_text(sums['bytes'])}: {would}done")
        if sums["refused"]:
            print(f"{sums['refused']:,} more are over limits.pinned_percent_max")
    return ExitCode.FAILED if sums["refused"] else ExitCode.OK


def _on_disks(given: dict[str, Any]) -> Iterator[tuple[Api, list[dict[str, Any]]]]:
    """Yield what fits page by page, disk by disk. Raises RequestError."""
    api, fits = _selected(given)
    disks = [one["name"] for one in api.get("tiers")["slower"] if one["source"] == "disk"]
    for one, name in itertools.product(fits, disks):
        after: str | None = ""
        while after is not None:
            query = {**one, "tier": name, "after": after, "limit": _page_objects}
            page = api.get("objects", query=query)
            yield api, page["objects"]
            after = page["next"]


def _selected(given: dict[str, Any]) -> tuple[Api, list[dict[str, Any]]]:
    """Return the API and the filters whose objects are meant: one per namespace or part of a list.

    Raises RequestError.
    """
    named = {"namespace", "tenant", "older", "younger", "pinned", "keys_file"}
    values = {name: value for name, value in given.items() if name not in named}
    file, assignments = values.pop("file"), values.pop("assignments")
    api = Api(options.load(file, values, assignments).config.run_dir)
    plain = {
        "older_s": given["older"],
        "younger_s": given["younger"],
        "pin": given["pinned"],
        "namespace": (given["namespace"] or "").lower(),
    }
    one = {name: value for name, value in plain.items() if value}
    if given["tenant"]:
        found = [n["namespace"] for n in api.get("namespaces") if n["tenant"] == given["tenant"]]
        if not found:
            raise RequestError(
                f"tenant {given['tenant']!r} has no objects, or no engine of it was here yet",
                "see `kvferry objects count`, and name its --namespace",
            )
        fits = [{**one, "namespace": name} for name in found]
    else:
        fits = [one]
    if given["keys_file"]:
        keys = [one.key for one in read_list(given["keys_file"])]
        parts = [keys[at : at + _keys_page] for at in range(0, len(keys), _keys_page)]
        fits = [{**filter_, "keys": part} for filter_ in fits for part in parts]
    return api, fits


def read_list(file: Path) -> Iterator[Listed]:
    """Yield the objects of a list's lines. Raises RequestError with the line."""
    for where, line in lines_of(file, _line_bytes_max):
        yield listed(where, line)


def lines_of(file: Path, bytes_max: int) -> Iterator[tuple[str, bytes]]:
    """Yield a list's lines, each with its place; comments are left out. Raises RequestError."""
    try:
        with file.open("rb") as stream:
            lines = iter(lambda: stream.readline(bytes_max + 1), b"")
            for number, line in enumerate(lines, 1):
                where = f"{file}, line {number}"
                if len(line) > bytes_max:
                    raise RequestError(f"{where} has more than {bytes_max} bytes", _LIST)
                if line.strip() and not line.startswith(b"#"):
                    yield where, line
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}", _LIST) from error


def listed(where: str, line: bytes) -> Listed:
    """Return the object of one line. Raises RequestError."""
    try:
        if line.startswith(b"{"):
            found = msgspec.json.decode(line)
            return Listed(found["namespace"], int(found["group"]), found["key"])
        namespace, group, key, *_ = line.decode().split()
        return Listed(namespace, int(group), key)
    except (ValueError, KeyError, TypeError, msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{where} is no object: {error}", _LIST) from error


def _print_object(one: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(one).decode() + "\n")
    else:
        print(
            f"{one['namespace']} {one['group']} {one['key']} {one['age_s']} {one['bytes']} "
            f"{one['pin']}"
        )


def _print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())

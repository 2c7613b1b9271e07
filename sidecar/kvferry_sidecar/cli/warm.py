"""`kvferry warm`: objects and prefixes of a list, brought from slower tiers into the pool."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import click
import msgspec

from kvferry_sidecar.cli import options
from kvferry_sidecar.cli.api import Api
from kvferry_sidecar.cli.objects import Listed, lines_of, listed
from kvferry_sidecar.errors import ExitCode, RequestError
from kvferry_sidecar.plan.chunk_keys import new_keys

_page = 500  # objects of one action: its body is bounded
_line_bytes_max = 8 << 20  # a prefix of 65,536 hashes has half of them
_progress_s = 0.2
_HASHES = (
    "give the hexadecimal block hashes of vLLM's KV events, in order from the first block on; the "
    "engine tells them whole with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0"
)


class Prefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prefix. ``namespace``: its first digits, where engines of several are known."""

    hashes: Annotated[list[str], msgspec.Meta(min_length=1)]
    namespace: str = ""


@click.command()
@options.config_file
@options.setting_flags("run_dir")
@click.option("--dry-run", is_flag=True, help="Only say what would be looked for.")
@click.argument("objects_file", metavar="FILE", type=click.Path(path_type=Path, exists=True))
def warm(
    file: Path | None,
    assignments: tuple[str, ...],
    dry_run: bool,
    objects_file: Path,
    **values: object,
) -> int:
    """Bring the objects and prefixes of FILE from slower tiers into the pool, and wait for it.

    FILE is a list of `kvferry objects list`, or has prefixes, one a line: {"hashes": ["...",
    ...]}, the prompt's block hashes as vLLM's KV events have them. They are fetched in the order
    of the lines, of a prefix whatever is stored in any group. An engine of each namespace has to
    have been here since the sidecar's start.
    """
    api = Api(options.load(file, values, assignments).config.run_dir)
    before = api.get("warm")
    rows = list(wanted_objects(objects_file, before["namespaces"]))
    sums: Counter[str] = Counter(taken=0, there=0, unknown=0)
    while sums["taken"] < len(rows):
        part = rows[sums["taken"] : sums["taken"] + _page]
        did = api.act("warm", objects=part, dry_run=dry_run)
        sums.update({name: int(str(did[name])) for name in sums})
        if not did["taken"]:
            if dry_run:
                break
            _tell_progress(api)
    looked_for = sums["taken"] - sums["there"] - sums["unknown"]
    told = f"{len(rows):,} objects: {sums['there']:,} are in the pool"
    if sums["unknown"]:
        told += f", {sums['unknown']:,} are of namespaces that no engine has registered"
    if dry_run:
        print(f"{told}, {looked_for:,} would be looked for")
        return ExitCode.OK
    while _tell_progress(api):
        pass
    now: dict[str, int] = api.get("warm")["counts"]
    ended = {name: now[name] - before["counts"].get(name, 0) for name in sorted(now)}
    print(told, *(f"{count:,} {name}" for name, count in ended.items() if count), sep=", ")
    return ExitCode.FAILED if sums["unknown"] or ended.get("failed") else ExitCode.OK


def wanted_objects(file: Path, known: Mapping[str, Sequence[int]]) -> Iterator[Listed]:
    """Yield what a list names; ``known``: namespaces with their groups. Raises RequestError."""
    for where, line in lines_of(file, _line_bytes_max):
        if line.startswith(b"{") and b'"hashes"' in line:
            yield from _of_prefix(where, line, known)
        else:
            yield listed(where, line)


def _of_prefix(where: str, line: bytes, known: Mapping[str, Sequence[int]]) -> Iterator[Listed]:
    """Yield an object per group and hash.

    Which of them were ever stored only the store knows: a group has one at the end of each of its
    own blocks, a window or a state only where a request can resume.
    """
    try:
        prefix = msgspec.json.decode(line, type=Prefix)
        hashes = [bytes.fromhex(one) for one in prefix.hashes]
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{where} is no prefix: {error}", _HASHES) from error
    hash_bytes = len(hashes[0])
    if not hash_bytes or any(len(one) != hash_bytes for one in hashes):
        raise RequestError(f"{where}: its hashes are empty, or not all of one length", _HASHES)
    fits = [name for name in known if name.startswith(prefix.namespace.lower())]
    if len(fits) != 1:
        raise RequestError(
            f"{where}: namespace {prefix.namespace!r} fits {len(fits)} of those that engines have "
            f"registered ({', '.join(sorted(known)) or 'none'})",
            'name it by its first digits ("namespace": "..."), after an engine of it has started',
        )
    for group in known[fits[0]]:
        keys = new_keys(
            bytes.fromhex(fits[0]),
            group,
            b"".join(hashes),
            hashes_per_unit=1,
            hash_bytes=hash_bytes,
            start=0,
        )
        for key in keys:
            yield Listed(fits[0], group, key.tobytes().hex())


def _tell_progress(api: Api) -> int:
    """Say how many objects wait, a few times a second; returns that number."""
    waiting = int(api.get("warm")["waiting"])
    if waiting:
        if sys.stderr.isatty():
            print(f"\r{waiting:,} objects wait ", end="", file=sys.stderr, flush=True)
        time.sleep(_progress_s)
    return waiting

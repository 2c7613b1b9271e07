"""`kvferry geometry`: the masks and the hit search as a tool, and what engines registered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from kvferry_sidecar.cli import options, query
from kvferry_sidecar.errors import ExitCode, KvferryError

line_bytes_max = 64 << 20


class InputFileError(KvferryError):
    """The file with the questions cannot be read."""

    exit_code = ExitCode.FAILED


@click.group("geometry")
def geometry() -> None:
    """Ask which chunks a load needs, a save keeps and a lookup finds (docs/geometry.md)."""


@geometry.command("eval")
@click.argument("file", default="-")
def evaluate(file: str) -> int:
    """Answer the questions in FILE, or of standard input for -, one line for each line.

    A configuration that cannot be served exactly, or a line that is no question, is answered
    with {"refused": "the reason"}; the lines after it are answered all the same.
    """
    from kvferry_sidecar.cli.questions import answer  # noqa: PLC0415 - numpy, for this command only

    for line in _lines(file):
        sys.stdout.write(answer(line, line_bytes_max).decode() + "\n")
        sys.stdout.flush()  # whoever asks over a pipe waits for this line
    return ExitCode.OK


@geometry.command("show")
@click.argument("namespace", default="")
@options.config_file
@options.setting_flags("run_dir")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per namespace and line.")
def show(
    namespace: str, file: Path | None, assignments: tuple[str, ...], as_json: bool, **values: object
) -> int:
    """Print the geometry of attached engines whose namespace begins with NAMESPACE (or of all).

    Per group: kind, tokens per block, window or chunk, layers, how many ranks hold the same
    bytes, shards per stripe, and the bytes of one chunk in the pool and on all local ranks.
    """
    run_dir = options.load(file, values, assignments).config.run_dir
    from kvferry_sidecar.cli import render, shapes  # noqa: PLC0415 - rich, for this command only

    shown = shapes.select(query.read_status(query.ask_status(run_dir)), namespace)
    if as_json:
        for one in shown:
            print(msgspec.json.encode(one).decode())
    else:
        render.console().print(shapes.table(shown))
    return ExitCode.OK


def _lines(file: str) -> Iterator[bytes]:
    """Yield the lines without their ends, each cut one byte past the longest allowed."""
    try:
        if file == "-":
            yield from _read(sys.stdin.buffer)
        else:
            with Path(file).open("rb") as stream:
                yield from _read(stream)
    except OSError as error:
        raise InputFileError(
            f"{file} cannot be read: {error.strerror}", "name a readable file, or - for stdin"
        ) from error


def _read(stream: BinaryIO) -> Iterator[bytes]:
    while line := stream.readline(line_bytes_max + 1):
        rest = line
        while len(rest) > line_bytes_max and not rest.endswith(b"\n"):
            rest = stream.readline(line_bytes_max + 1)
        yield line.removesuffix(b"\n")

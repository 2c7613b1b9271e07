"""`kvferry top`: the sidecar at a glance in a terminal, once a second."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry_sidecar.cli import render
from kvferry_sidecar.cli.api import PREFIX, Api
from kvferry_sidecar.errors import NoSidecarError, RequestError
from kvferry_sidecar.observe.status import Document, read
from kvferry_sidecar.settings import size_text
from kvferry_sidecar.stages.views import JobView

jobs_shown_max = 12
_QUIT = b"qQ\x1b\x03"


class Frame:
    """What one look found. ``missing``: why the sidecar does not answer."""

    def __init__(self, api: Api) -> None:
        self.at_s = time.monotonic()
        self.document: Document | None = None
        self.jobs: list[JobView] = []
        self.missing = ""
        try:
            self.document = read(api.call("GET", f"{PREFIX}/status"))
            self.jobs = api.get("jobs", list[JobView])
        except (NoSidecarError, RequestError) as error:
            self.missing = f"{error.message}; {error.remedy}"


def run(run_dir: Path, interval_s: float) -> int:
    """Show frames until q, Escape or Ctrl-C; one frame where the output is no terminal."""
    api, console = Api(run_dir), render.console()
    before = Frame(api)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        console.print(screen(before, None))
        return 0 if before.document is not None else NoSidecarError.exit_code
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as pressed:
        live.update(screen(before, None), refresh=True)
        while not pressed(interval_s):
            frame = Frame(api)
            live.update(screen(frame, before), refresh=True)
            before = frame
    return 0


def screen(frame: Frame, before: Frame | None) -> RenderableType:
    """Return one frame; rates are those since the one before.

    A terminal that is too small cuts the end off: what changes and what is stuck comes first.
    """
    document = frame.document
    if document is None:
        return Text(f"{frame.missing}\nwaiting; q quits", style="yellow")
    parts: list[RenderableType] = [
        Text("q quits; kvferry explain REQUEST tells one request's story", style="dim"),
        *_jobs(frame.jobs),
        render.status(document),
    ]
    former = before.document if before is not None else None
    if former is not None and before is not None and former.epoch == document.epoch:
        parts.insert(1, _rates(document.pipeline, former.pipeline, frame.at_s - before.at_s))
    return Group(*parts)


def _rates(now: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> RenderableType:
    def rate(*path: str) -> float:
        return max(0.0, (_number(now, path) - _number(before, path)) / max(seconds, 0.05))

    loaded, saved = rate("ledger", "loaded_bytes"), rate("ledger", "saved_bytes")
    return Text(
        f"now: load {size_text(int(loaded))}/s, save {size_text(int(saved))}/s, "
        f"hit {rate('hit_tokens'):,.0f} and missed {rate('missed_tokens'):,.0f} tokens/s, "
        f"{rate('probes'):,.0f} probes/s",
        style="bold",
    )


def _number(tree: Mapping[str, Any], path: tuple[str, ...]) -> float:
    for name in path[:-1]:
        tree = tree.get(name, {})
    return float(tree.get(path[-1], 0))


def _jobs(jobs: list[JobView]) -> Iterator[RenderableType]:
    yield Text(f"in flight: {len(jobs)}")
    if not jobs:
        return
    table = Table("age", "kind", "request", "engine", "tokens", "ranks", box=None)
    for job in jobs[:jobs_shown_max]:
        ranks = ", ".join(f"{rank.rank} {rank.state}" for rank in job.ranks[:8])
        span = f"{job.start_tokens:,} to {job.end_tokens:,}"
        table.add_row(f"{job.age_s:.1f} s", job.kind, job.request, job.engine, span, ranks)
    yield table


@contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits for a key and says whether it means the end."""
    fd = sys.stdin.fileno()
    former = termios.tcgetattr(fd)

    def pressed(wait_s: float) -> bool:
        end_s = time.monotonic() + wait_s
        while (left_s := end_s - time.monotonic()) > 0:
            if select.select([fd], [], [], left_s)[0]:
                data = os.read(fd, 16)
                return not data or any(key in data for key in _QUIT)
        return False

    try:
        tty.setcbreak(fd)
        yield pressed
    except KeyboardInterrupt:
        pass  # as good as q
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, former)

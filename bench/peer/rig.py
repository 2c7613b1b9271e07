"""Engines of several variants alive at the same time, each cache with its own server.

Rows measure them by turns: what the machine does meanwhile meets all of them alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peer.remote import Remote
from bench.peer.servers import FerryServer, LMCacheServer, Server
from bench.peer.variants import CACHES, FERRY

ENGINE_START_S = 240.0


@dataclass(frozen=True, slots=True)
class Rig:
    """Engines by variant, and the servers of those that have one."""

    engines: dict[str, Remote]
    servers: dict[str, Server]


@contextmanager
def rig(
    variants: Sequence[str], what: str, *, pool_bytes: int, model: dict[str, object],
    engine: dict[str, object],
) -> Iterator[Rig]:  # fmt: skip
    """Yield the engines, ready. ``what`` names the worker's class, the rest goes to it."""
    setup: dict[str, object] = {"what": what, "model": model, "engine": engine}
    with ExitStack() as stack:
        folder, servers = stack.enter_context(serving(variants, pool_bytes))
        engines = {
            variant: stack.enter_context(new_engine(variant, setup, folder, servers))
            for variant in variants
        }
        for one in engines.values():
            one.reply(ENGINE_START_S)
        yield Rig(engines, servers)


@contextmanager
def serving(variants: Sequence[str], pool_bytes: int) -> Iterator[tuple[Path, dict[str, Server]]]:
    """Yield a folder for all files, and the variants' servers, which serve."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-")))
        servers = {
            variant: stack.enter_context(closing(new_server(variant, folder, pool_bytes)))
            for variant in variants
            if variant in CACHES
        }
        for server in servers.values():
            server.start()
        yield folder, servers


def new_engine(
    variant: str, setup: dict[str, object], folder: Path, servers: dict[str, Server]
) -> Remote:
    """Return an engine process of the variant that begins to start."""
    server = servers.get(variant)
    own: dict[str, object] = {"options": {}, "server_pid": 0}
    if server is not None:
        own = {"options": server.options, "server_pid": server.pid}
    return Remote(variant, setup | own, folder)


def new_server(variant: str, folder: Path, pool_bytes: int) -> Server:
    """Return the variant's server, not started."""
    made = FerryServer if variant == FERRY else LMCacheServer
    return made(folder, pool_bytes)


def turns(variants: Sequence[str], number: int) -> list[str]:
    """Return the order of round ``number``: everyone begins, follows and ends equally often."""
    first = number % len(variants)
    return [*variants[first:], *variants[:first]]

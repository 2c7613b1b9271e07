"""Which nodes `kvferry ui` shows: those named, and those behind a name of DNS.

A headless Service has one address per pod; they come and go with nodes. So a name is looked up
again when somebody asks for the nodes and the last answer is old; between two answers, and while
DNS fails, the addresses known last stay.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from kvferry_sidecar.errors import ConfigError

targets_max = 64
nodes_max = 256  # shown; a name with more addresses says so
fresh_s = 5.0
lookup_s_max = 2.0  # what a reader waits for DNS
_DNS = "dns+http"
_REMEDY = f"give HOST:PORT, a URL or {_DNS}://NAME:PORT"
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Node:
    """``url`` is its base address; "": there is none, and ``trouble`` says why."""

    name: str
    url: str
    trouble: str = ""


def targets_of(text: str) -> list[str]:
    """Return the base addresses in ``HOST:PORT,...``. Raises ConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not 1 <= len(names) <= targets_max:
        raise ConfigError(f"{len(names)} targets; 1 to {targets_max}", _REMEDY)
    found = [_target(name) for name in names]
    told = [target.partition("://")[2] for target in found]
    if twice := {name for name in told if told.count(name) > 1}:
        raise ConfigError(f"{min(twice)} is named twice", "leave one out")
    return found


def _target(name: str) -> str:
    try:
        url = httpx.URL(name if "://" in name else f"http://{name}")
    except httpx.InvalidURL as error:
        raise ConfigError(f"target {name!r}: {error}", _REMEDY) from error
    plain = url.path == "/" and not url.query and (url.port or 80) < 1 << 16
    if url.scheme not in ("http", "https", _DNS) or not url.host or not plain:
        raise ConfigError(f"{name!r} is no address of a node", _REMEDY)
    if url.scheme == _DNS and url.port is None:
        raise ConfigError(f"{name!r} has no port", _REMEDY)
    return str(url).rstrip("/")


async def resolved(host: str, port: int) -> Sequence[str]:
    """Return ``ADDRESS:PORT`` of every address of a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for *_, address in found})
    return [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in addresses]


class Fleet:
    """The nodes behind some targets (``targets_of``)."""

    def __init__(self, targets: Sequence[str], resolve: Resolve = resolved) -> None:
        self._targets = tuple(targets)
        self._resolve = resolve
        self._addresses: dict[str, Sequence[str]] = {}  # by target, as DNS said last
        self._troubles: dict[str, str] = {}
        self._due_s = 0.0
        self._looking: asyncio.Task[None] | None = None

    async def nodes(self) -> list[Node]:
        """Return the nodes, after asking DNS if its last answer is old."""
        now_s = asyncio.get_running_loop().time()
        # One question at a time: a resolver that hangs must not collect threads.
        if now_s >= self._due_s and (self._looking is None or self._looking.done()):
            self._due_s = now_s + fresh_s
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            await asyncio.wait([self._looking], timeout=lookup_s_max)
        return self._known()

    async def node(self, name: str) -> Node | None:
        """Return the node of this name; DNS is asked only where it is not known."""
        known = {node.name: node for node in self._known()}
        if name not in known:
            known = {node.name: node for node in await self.nodes()}
        return known.get(name)

    def _known(self) -> list[Node]:
        nodes: dict[str, Node] = {}
        for target in self._targets:
            scheme, _, name = target.partition("://")
            if scheme != _DNS:
                nodes.setdefault(name, Node(name, target))
                continue
            addresses = self._addresses.get(target, ())
            free = max(nodes_max - len(nodes), 0)
            for one in addresses[:free]:
                nodes.setdefault(one, Node(one, f"http://{one}"))
            trouble = "" if addresses else self._troubles.get(target, "was not looked up yet")
            if len(addresses) > free:
                trouble = f"has {len(addresses)} addresses, {free} of them are shown"
            if trouble:
                nodes[name] = Node(name, "", f"{name} {trouble}")
        return list(nodes.values())

    async def _look(self) -> None:
        for target in self._targets:
            if not target.startswith(_DNS):
                continue
            url = httpx.URL(target)
            try:
                self._addresses[target] = await self._resolve(url.host, url.port or 0)
                self._troubles[target] = "has no address"
            except (OSError, UnicodeError) as error:  # the latter: no name at all
                self._troubles[target] = f"does not resolve: {error}"

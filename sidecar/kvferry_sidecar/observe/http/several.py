"""`kvferry ui`: the page over several nodes. It hands the API of each on, and keeps nothing.

    /ui/                  the page, as every sidecar has it
    /api/v1/nodes         the nodes, for the page's selector
    /nodes/N/api/v1/...   what node N answers; POST for actions only
    /nodes/N/debug/bundle

The guard is the sidecar's own: foreign hosts and origins are refused here, and an action needs the
token, which the node then asks for once more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.observe.http import ui
from kvferry_sidecar.observe.http.api import PREFIX, body_bytes_max
from kvferry_sidecar.observe.http.guard import Guard, fault

targets_max = 64
answer_s_max = 10.0
_ASKED = ("accept", "authorization", "content-type")
_ANSWERED = ("content-type", "content-disposition", "x-accel-buffering", "allow")


def targets_of(text: str) -> list[str]:
    """Return the base addresses in ``HOST:PORT,...``. Raises ConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not 1 <= len(names) <= targets_max:
        raise ConfigError(f"{len(names)} targets; 1 to {targets_max}", "give HOST:PORT,HOST:PORT")
    found = []
    for name in names:
        try:
            url = httpx.URL(name if "://" in name else f"http://{name}")
        except httpx.InvalidURL as error:
            raise ConfigError(f"target {name!r}: {error}", "give HOST:PORT or a URL") from error
        plain = url.path == "/" and not url.query and (url.port or 80) < 1 << 16
        if url.scheme not in ("http", "https") or not url.host or not plain:
            raise ConfigError(f"{name!r} is no address of a node", "give HOST:PORT or a URL")
        found.append(str(url).rstrip("/"))
    return found


class Nodes:
    """Hands requests on. ``client`` is closed by whoever made it."""

    def __init__(self, targets: Sequence[str], client: httpx.AsyncClient) -> None:
        self._targets = tuple(targets)
        self._client = client

    async def listed(self, _request: Request) -> Response:
        """Return the nodes' names, and where the page finds their API."""
        return JSONResponse(
            [
                {"name": target.partition("://")[2], "base": f"../nodes/{number}/"}
                for number, target in enumerate(self._targets)
            ]
        )

    async def hand_on(self, request: Request) -> Response:
        """Return what a node answers, as it comes."""
        number, path = request.path_params["number"], "/" + request.path_params["path"]
        if number >= len(self._targets) or not _served(request.method, path):
            return fault("path", f"{request.url.path} is not served here", "see /api/v1/nodes", 404)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > body_bytes_max:
                text = f"the body is over {body_bytes_max} bytes"
                return fault("request", text, "send less", 400)
        asked = self._client.build_request(
            request.method,
            self._targets[number] + path,
            params=request.url.query,
            headers={name: request.headers[name] for name in _ASKED if name in request.headers},
            content=body or None,
        )
        try:
            answer = await self._client.send(asked, stream=True)
        except httpx.HTTPError as error:
            told = f"{self._targets[number]} does not answer: {type(error).__name__} {error}"
            return fault("unavailable", told, "see whether its sidecar runs and is reachable", 502)
        headers = {name: answer.headers[name] for name in _ANSWERED if name in answer.headers}
        return StreamingResponse(_pieces(answer), answer.status_code, headers)


def application(
    targets: Sequence[str],
    client: httpx.AsyncClient,
    token: str,
    names: frozenset[str] = frozenset(),
) -> ASGIApp:
    """Return the application over these nodes; ``token`` "": nobody may act.

    ``names`` are host names under which it may be asked, beside addresses and this host's own.
    """
    nodes = Nodes(targets, client)
    app = Starlette(
        routes=[
            Route(f"{PREFIX}/nodes", nodes.listed, methods=["GET"]),
            Route("/nodes/{number:int}/{path:path}", nodes.hand_on, methods=["GET", "POST"]),
            *ui.routes(),
        ]
    )
    return Guard(app, token=lambda: token, local=False, names=names)


def new_client() -> httpx.AsyncClient:
    """Return a client that no environment redirects, and whose streams may stay silent."""
    timeout = httpx.Timeout(answer_s_max, read=None)
    return httpx.AsyncClient(timeout=timeout, trust_env=False)


def _served(method: str, path: str) -> bool:
    if ".." in path.split("/"):
        return False
    if method == "POST":
        return path.startswith(f"{PREFIX}/actions/")
    return path.startswith(f"{PREFIX}/") or path == "/debug/bundle"


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.HTTPError:
        return  # the node went away: so does the stream, and the page says so
    finally:
        await answer.aclose()

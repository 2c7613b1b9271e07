"""`kvferry ui`: the page over several nodes. It hands the API of each on, and keeps nothing.

    /ui/                  the page, as every sidecar has it
    /api/v1/nodes         the nodes, for the page's selector
    /nodes/NAME/api/v1/...   what that node answers; POST for actions only
    /nodes/NAME/debug/bundle

The guard is the sidecar's own: foreign hosts and origins are refused here, and an action needs the
token, which the node then asks for once more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from kvferry_sidecar.observe.http import ui
from kvferry_sidecar.observe.http.api import PREFIX, body_bytes_max
from kvferry_sidecar.observe.http.fleet import Fleet
from kvferry_sidecar.observe.http.guard import Guard, fault

answer_s_max = 10.0
_ASKED = ("accept", "authorization", "content-type")
_ANSWERED = ("content-type", "content-disposition", "x-accel-buffering", "allow")


class Nodes:
    """Hands requests on. ``client`` is closed by whoever made it."""

    def __init__(self, fleet: Fleet, client: httpx.AsyncClient) -> None:
        self._fleet = fleet
        self._client = client

    async def listed(self, _request: Request) -> Response:
        """Return the nodes' names, and where the page finds their API."""
        return JSONResponse(
            [
                {"name": node.name, "base": f"../nodes/{quote(node.name, safe='')}/"}
                for node in await self._fleet.nodes()
            ]
        )

    async def hand_on(self, request: Request) -> Response:
        """Return what a node answers, as it comes."""
        path = "/" + request.path_params["path"]
        node = await self._fleet.node(request.path_params["name"])
        if node is None or not _served(request.method, path):
            return fault("path", f"{request.url.path} is not served here", "see /api/v1/nodes", 404)
        if not node.url:
            return fault("unavailable", node.trouble, "see whether DNS knows this name", 502)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > body_bytes_max:
                text = f"the body is over {body_bytes_max} bytes"
                return fault("request", text, "send less", 400)
        asked = self._client.build_request(
            request.method,
            node.url + path,
            params=request.url.query,
            headers={name: request.headers[name] for name in _ASKED if name in request.headers},
            content=body or None,
        )
        try:
            answer = await self._client.send(asked, stream=True)
        except httpx.HTTPError as error:
            told = f"{node.url} does not answer: {type(error).__name__} {error}"
            return fault("unavailable", told, "see whether its sidecar runs and is reachable", 502)
        headers = {name: answer.headers[name] for name in _ANSWERED if name in answer.headers}
        return StreamingResponse(_pieces(answer), answer.status_code, headers)


def application(
    fleet: Fleet,
    client: httpx.AsyncClient,
    token: str,
    names: frozenset[str] = frozenset(),
) -> ASGIApp:
    """Return the application over these nodes; ``token`` "": nobody may act.

    ``names`` are host names under which it may be asked, beside addresses and this host's own.
    """
    nodes = Nodes(fleet, client)
    app = Starlette(
        routes=[
            Route(f"{PREFIX}/nodes", nodes.listed, methods=["GET"]),
            Route("/nodes/{name}/{path:path}", nodes.hand_on, methods=["GET", "POST"]),
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

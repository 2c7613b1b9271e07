"""/ui/: the page of this node, plain files that `make ui` builds into the package."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

PAGE = Path(__file__).parent / "page"
_NOT_BUILT = """The page is not built into this installation.

In a clone of the sources, with Node 18 or newer and npm: make ui
(a wheel made afterwards has it). Everything it shows is at ../api/v1 too.
"""


def routes(page: Path = PAGE) -> list[BaseRoute]:
    """Return the routes of the page; addresses are relative, so any prefix before them works."""

    async def to_page(_request: Request) -> Response:
        return RedirectResponse("ui/")

    async def not_built(_request: Request) -> Response:
        return PlainTextResponse(_NOT_BUILT, 501)

    home = Route("/", to_page, methods=["GET"])
    if not (page / "index.html").is_file():
        return [home, Route("/ui/{rest:path}", not_built, methods=["GET"])]
    return [home, Mount("/ui", StaticFiles(directory=page, html=True))]

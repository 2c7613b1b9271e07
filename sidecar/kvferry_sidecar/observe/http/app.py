"""The applications: which routes a socket serves, behind which guard."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from kvferry_sidecar.observe.http import api, probes, ui
from kvferry_sidecar.observe.http.guard import Guard, fault
from kvferry_sidecar.observe.http.window import Window


async def _not_there(request: Request, _error: Exception) -> Response:
    """Answer as every other fault is: a page of a newer version asks an older sidecar too."""
    text = f"{request.url.path} is not served by kvferry {version('kvferry')}"
    return fault("path", text, f"see {api.PREFIX}", 404)


def application(window: Window, what: str, token: Callable[[], str]) -> ASGIApp:
    """Return the application of one socket: ``what`` is "local", "all" or "probes"."""
    if what == "probes":
        return Starlette(routes=probes.routes(window))
    app = Starlette(
        routes=[*probes.routes(window), *api.routes(window), *ui.routes()],
        exception_handlers={404: _not_there},
    )
    return Guard(app, token=token, local=what == "local")

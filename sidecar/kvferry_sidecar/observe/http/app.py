"""The applications: which routes a socket serves, behind which guard."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.types import ASGIApp

from kvferry_sidecar.observe.http import api, probes, ui
from kvferry_sidecar.observe.http.guard import Guard
from kvferry_sidecar.observe.http.window import Window


def application(window: Window, what: str, token: Callable[[], str]) -> ASGIApp:
    """Return the application of one socket: ``what`` is "local", "all" or "probes"."""
    if what == "probes":
        return Starlette(routes=probes.routes(window))
    app = Starlette(routes=[*probes.routes(window), *api.routes(window), *ui.routes()])
    return Guard(app, token=token, local=what == "local")

"""Who may ask what: names for the host, actions only for who may act, nothing across origins.

A page of another site can make a browser send requests to loopback. It cannot choose the Host
header of an IP address or of localhost, and cannot read the answer; so foreign names are refused
(DNS rebinding), and an action needs a token or the Unix socket.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry_sidecar.errors import HttpError

token_chars_min = 16
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def read_token(file: str) -> str:
    """Return the token in a file; "" for no file. Raises HttpError."""
    if not file:
        return ""
    try:
        token = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise HttpError(
            f"http.token_file {file} cannot be read: {error}",
            "make a file with a random line in it that only this user can read",
        ) from error
    if len(token) < token_chars_min or not token.isascii():
        raise HttpError(
            f"the token in {file} is shorter than {token_chars_min} characters or not ASCII",
            "write a random one: head -c 24 /dev/urandom | base64 > FILE",
        )
    return token


def fault(code: str, text: str, remedy: str, status: int) -> Response:
    """Return an error as readers get it."""
    return JSONResponse({"error": code, "message": text, "remedy": remedy}, status)


class Guard:
    """Wraps an application. ``token`` may be read anew; ``local`` is the Unix socket.

    ``names`` are further host names, in small letters, under which it may be asked.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: Callable[[], str],
        local: bool,
        names: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._names = names
        self._token = token
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or hand on and add the headers of every answer."""
        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if self._local:
            return None
        host = request.headers.get("host", "")
        if host.partition(":")[0].lower() not in self._names and not host_allowed(host):
            return fault(
                "host",
                f"the Host {host!r} is no address of this machine",
                "use the IP address, localhost or this host's name",
                421,
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return fault("origin", f"{origin} may not ask", "open the page at this address", 403)
        if request.method == "POST" and not self._may_act(request):
            return fault(
                "token",
                "an action needs the token of http.token_file",
                "send Authorization: Bearer TOKEN, or use the Unix socket http.sock in run_dir",
                401,
            )
        return None

    def _may_act(self, request: Request) -> bool:
        token = self._token()
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        return (
            bool(token)
            and kind.lower() == "bearer"
            and hmac.compare_digest(given.strip().encode(), token.encode())
        )


def host_allowed(host: str) -> bool:
    """Say whether a Host header names an IP address, localhost or this machine."""
    name = host.rpartition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in ("localhost", socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

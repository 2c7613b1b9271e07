"""The HTTP thread: up to three sockets, each with an application of its own.

| socket | serves |
|---|---|
| `RUN_DIR/http.sock` (mode 0600) | everything; whoever can open it may act |
| `http.listen` | everything; actions with the token |
| `http.probes_listen` | probes and metrics |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.errors import HttpError, RunDirError
from kvferry_sidecar.observe.http.window import Window
from kvferry_sidecar.observe.log import Throttle

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

_backlog_max = 64
_end_s_max = 3.0


def bind_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket that only this user can open. Raises RunDirError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_backlog_max)
    except OSError as error:
        listener.close()
        remedy = "make sure that the directory has space, or set another run_dir"
        raise RunDirError(f"{path} cannot be bound: {error}", remedy) from error
    return listener


def bind_tcp(key: str, address: str) -> socket.socket:
    """Return a listening TCP socket of ``host:port``. Raises HttpError naming the setting."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, ValueError) as error:  # no number, no name of a host
        raise HttpError(f"{key} = {address!r} is no address: {error}", "give host:port") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_backlog_max)
    except (OSError, OverflowError) as error:
        listener.close()
        raise HttpError(
            f"{key} = {address!r} cannot be bound: {error}",
            f"set {key} to a free address, or leave it empty",
        ) from error
    return listener


class HttpServer:
    """Owns the sockets given to ``add`` and the thread that serves them."""

    def __init__(self, window: Window, token: Callable[[], str], log: Log) -> None:
        self._window = window
        self._token = token
        self._log = log
        self._sockets: list[tuple[socket.socket, str]] = []
        self._servers: list[uvicorn.Server] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def add(self, listener: socket.socket, what: str) -> None:
        """Serve a socket: ``what`` is "local", "all" or "probes"."""
        self._sockets.append((listener, what))

    def start(self) -> None:
        """Begin to serve; connections made before wait in the backlog."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, within its bound, and close the sockets."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._end)
            self._thread.join(_end_s_max)
        for listener, _ in self._sockets:
            listener.close()

    def _end(self) -> None:
        for server in self._servers:
            server.should_exit = True
        self._ended.set()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - engines are served without it
            self._log.error("HTTP has ended", exc_info=error)

    async def _serve(self) -> None:
        import uvicorn  # noqa: PLC0415 - 0.2 s of imports that nobody should wait for

        from kvferry_sidecar.observe.http.app import application  # noqa: PLC0415 - as above

        _log_into(self._log)
        for _, what in self._sockets:
            app = application(self._window, what, self._token)
            self._servers.append(uvicorn.Server(configured(app)))
        for server in self._servers:
            server.main_loop = self._until_ended  # type: ignore[method-assign]  # see there
        self._loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(
                server.serve([listener])
                for server, (listener, _) in zip(self._servers, self._sockets, strict=True)
            )
        )

    async def _until_ended(self) -> None:
        """Stand in for uvicorn's turns ten times a second, which have no setting.

        They look whether it is to end, and at the time: more work than the control loop has while
        nothing happens.
        """
        await self._ended.wait()


def configured(app: ASGIApp) -> uvicorn.Config:
    """Return how uvicorn serves an application of ours."""
    import uvicorn  # noqa: PLC0415 - see _serve

    from kvferry_sidecar.observe.http.protocol import BoundedProtocol  # noqa: PLC0415 - as above

    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=1,
    )


def _log_into(log: Log) -> None:
    """Have uvicorn's own warnings and errors in our log."""

    throttle = Throttle()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            held_back = throttle.passes(str(record.msg), record.created)
            if held_back is not None:
                log.warning("HTTP", text=text, level=record.levelname, not_logged=held_back)

    logger = logging.getLogger("uvicorn.error")
    logger.handlers = [Handler(logging.WARNING)]
    logger.propagate = False

"""What operators reach a sidecar by: HTTP's sockets and thread, and the traces of its requests."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, MutableMapping, Sequence
from importlib.metadata import version

from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar import locks
from kvferry_sidecar.config import Config, Loaded
from kvferry_sidecar.doctor.finding import Finding
from kvferry_sidecar.errors import HttpError
from kvferry_sidecar.loop import READ, Loop
from kvferry_sidecar.observe import paths, traces
from kvferry_sidecar.observe.http.guard import read_token
from kvferry_sidecar.observe.http.server import HttpServer, bind_tcp, bind_unix
from kvferry_sidecar.observe.http.window import Desk, Window
from kvferry_sidecar.observe.mailbox import Mailbox
from kvferry_sidecar.observe.progress import Progress
from kvferry_sidecar.observe.spans import Keep
from kvferry_sidecar.observe.traces import Records, Traces


class Front:
    """Binds and serves as soon as it is made: probes are answered while the pool is.

    ``doctor`` examines the machine, in HTTP's thread. ``degraded`` is told what is not served.
    """

    def __init__(
        self,
        loaded: Loaded,
        loop: Loop,
        *,
        progress: Progress,
        doctor: Callable[[], Sequence[Finding]],
        degraded: MutableMapping[str, str],
        log: Log,
        stack: contextlib.ExitStack,
    ) -> None:
        config = loaded.config
        self._log = log
        self._degraded = degraded
        self._origins = loaded.origins
        self._token = read_token(config.http.token_file)
        self._mailbox = Mailbox()
        stack.callback(self._mailbox.close)
        loop.watch(self._mailbox.fd, READ, self._mailbox.on_wake)
        stall_s_max = config.limits.loop_stall_ms_max / 1000
        self._window = Window(self._mailbox, lambda: loop.last_turn_at_s, stall_s_max)
        self._window.doctor = doctor
        self._window.progress = progress.reading
        self._http = HttpServer(self._window, lambda: self._token, log)
        stack.callback(self._http.close)
        path = locks.http_path(config.run_dir)
        self._http.add(bind_unix(path), "local")
        stack.callback(locks.remove_socket, path)
        if config.http.listen:
            self._listen("http.listen", config.http.listen, "all")
        if config.http.probes_listen:
            self._listen("http.probes_listen", config.http.probes_listen, "probes")
        self._http.start()
        self.traces: Traces | None = None

    def open_traces(self, config: Config, epoch: int) -> None:
        """Export traces where they are on. Raises ConfigError."""
        wanted = config.traces
        if not wanted.endpoint:
            return
        facts = {
            "service.version": version("kvferry"),
            "service.instance.id": f"{epoch:016x}",
            "host.name": socket.gethostname(),
        }
        self.traces = Traces(
            traces.open_sink(wanted.endpoint, facts),
            Keep(wanted.sample_percent, wanted.slow_ms),
            wanted.endpoint,
            self._records,
            self._log,
        )

    def set_traces(self, config: Config) -> None:
        """Keep traces by these settings from now on."""
        if self.traces is not None:
            self.traces.keep = Keep(config.traces.sample_percent, config.traces.slow_ms)

    def watch_paths(self, pool_address: int, pool_bytes: int) -> None:
        """Tell of network cards, and where this memory lies, from now on."""
        self._window.paths = lambda: paths.read(pool_address, pool_bytes)

    def serve(self, desk: Desk) -> None:
        """The sidecar is complete."""
        self._window.desk = desk
        if self.traces is not None:
            self.traces.start()

    def close(self, records: Records) -> None:
        """The loop has ended; ``records`` are what it remembers."""
        self._http.close()
        if self.traces is not None:
            self.traces.close(records)

    def read_token_again(self, file: str) -> None:
        """Take the token as it is now; one that cannot be read stays as it was."""
        try:
            self._token = read_token(file)
        except HttpError as error:
            self._log.error("token kept", error=error.message, remedy=error.remedy)

    def _records(self) -> Records:
        desk = self._window.desk
        if desk is None:
            return ()
        return self._mailbox.ask(desk.records).result(traces.answer_s_max)

    def _listen(self, key: str, address: str, what: str) -> None:
        """Serve on an address. One that nobody chose may be taken: engines matter more."""
        try:
            listener = bind_tcp(key, address)
        except HttpError as error:
            if self._origins[key] != "default":
                raise
            self._degraded["http"] = error.message
            self._log.warning("no HTTP", error=error.message, remedy=error.remedy)
            return
        self._http.add(listener, what)
        self._log.info("HTTP", setting=key, address="{}:{}".format(*listener.getsockname()[:2]))

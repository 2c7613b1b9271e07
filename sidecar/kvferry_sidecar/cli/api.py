"""Ask a running sidecar over HTTP on its Unix socket: whoever can open it may act too."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from kvferry_sidecar.errors import NoSidecarError, ProtocolError, RequestError
from kvferry_sidecar.locks import http_path

answer_s_max = 10.0
PREFIX = "/api/v1"


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=answer_s_max)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Api:
    """One sidecar. Every call raises NoSidecarError, RequestError or ProtocolError."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def get(self, path: str, kind: Any = Any, query: Mapping[str, object] | None = None) -> Any:
        """Return what ``/api/v1/path?query`` answers, decoded as ``kind``."""
        asked = f"{PREFIX}/{quote(path)}"
        if query:
            asked += f"?{urlencode(query)}"
        return self._decoded(self.call("GET", asked), kind)

    def act(self, action: str, **parameters: object) -> dict[str, object]:
        """Carry out an action; returns what it did."""
        body = msgspec.json.encode(parameters)
        answer = self.call("POST", f"{PREFIX}/actions/{quote(action, safe='')}", body)
        did: dict[str, object] = self._decoded(answer, dict[str, object])
        return did

    def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Return the body of a good answer."""
        connection = _Connection(http_path(self._run_dir))
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NoSidecarError(
                f"no sidecar runs in {self._run_dir}",
                "start one with `kvferry serve`, or name its directory with --run-dir",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise NoSidecarError(
                f"the sidecar in {self._run_dir} does not answer: {error}",
                "run this as the sidecar's user, on its node; see its log",
            ) from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise self._error(answer.status, text)
        return text

    def _error(self, status: int, text: bytes) -> RequestError:
        try:
            told = msgspec.json.decode(text, type=dict[str, str])
            return RequestError(told["message"], told["remedy"])
        except (msgspec.DecodeError, KeyError):
            what = text[:200].decode(errors="replace").strip()
            return RequestError(f"the sidecar answered {status}: {what}", "see its log")

    def _decoded(self, text: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            raise ProtocolError(
                f"the answer cannot be read: {error}",
                "use the kvferry command of the sidecar's own version",
            ) from error

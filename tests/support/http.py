"""HTTP as a client has it: over a Unix socket or TCP, with every header the test's own."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LATE = b"the control loop did not answer in"
LAG = re.compile(rb"^kvferry_loop_lag_seconds (\S+)$", re.MULTILINE)
LAG_S_MAX = 2.0  # as long as an answer may take; after it /metrics tells what it knew before
# How often a question is asked; a loop that answers none of them is at fault, and so is any
# other refusal.
ASKED_MAX = 10


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


class Http:
    """``where``: the path of a Unix socket, or (host, port)."""

    def __init__(self, where: Path | tuple[str, int], **headers: str) -> None:
        self.where = where
        self.headers = headers

    @contextmanager
    def connected(self, seconds: float = 90.0) -> Iterator[http.client.HTTPConnection]:
        if isinstance(self.where, Path):
            connection = http.client.HTTPConnection("localhost")
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(seconds)
            connection.sock.connect(str(self.where))
        else:
            connection = http.client.HTTPConnection(*self.where, timeout=seconds)
        try:
            yield connection
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        """Ask, and again where a busy machine needed an answer's two seconds otherwise."""
        for _ in range(ASKED_MAX):
            answer = self.once(path, **headers)
            lag = LAG.search(answer.body)
            if LATE not in answer.body and (lag is None or float(lag[1]) < LAG_S_MAX):
                break
        return answer

    def once(self, path: str, **headers: str) -> Answer:
        """Ask, and take what comes."""
        return self.request("GET", path, None, headers)

    def post(self, path: str, body: object = None, **headers: str) -> Answer:
        given = {"content-type": "application/json", **headers}
        return self.request("POST", path, json.dumps(body or {}).encode(), given)

    def request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        named = {name.replace("_", "-"): text for name, text in {**self.headers, **headers}.items()}
        with self.connected() as connection:
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())

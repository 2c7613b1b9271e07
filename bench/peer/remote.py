"""An engine process that measures what it is told to: the bench's side."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvferry_demo.processes import ENGINE_ENVIRONMENT, Child, in_environment

from bench.peer.servers import remove_kv_segments
from bench.peer.variants import python_of

CALL_S = 400.0
END_S = 10.0
_ENVIRONMENT = {
    **ENGINE_ENVIRONMENT,
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "LMCACHE_DISABLE_BANNER": "1",
}


class Remote(Child):
    """``python -m bench.peer.worker`` of one variant: one JSON document per line, both ways."""

    def __init__(self, variant: str, setup: dict[str, object], folder: Path) -> None:
        self.variant = variant
        self._buffer = b""
        name = variant.replace(" ", "-")
        file = folder / f"{name}.json"
        file.write_text(json.dumps(setup | {"variant": variant, "folder": os.fspath(folder)}))
        command = [python_of(variant), "-m", "bench.peer.worker", os.fspath(file)]
        super().__init__(in_environment(_ENVIRONMENT, command), folder / f"{name}.log", pipes=True)

    def call(self, operation: str, **arguments: object) -> dict[str, Any]:
        """Carry out one operation. Raises RuntimeError, with the log's end, when it failed."""
        self.begin(operation, **arguments)
        return self.reply()

    def begin(self, operation: str, **arguments: object) -> None:
        """Give an operation without waiting; ``reply`` must follow."""
        assert self.process.stdin is not None, "built with pipes"
        line = json.dumps({"operation": operation, "arguments": arguments})
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def reply(self, deadline_s: float = CALL_S) -> dict[str, Any]:
        """Return the next document. Raises RuntimeError when the process failed or is silent."""
        assert self.process.stdout is not None, "built with pipes"
        end_s = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            left_s = max(0.0, end_s - time.monotonic())
            ready, _, _ = select.select([self.process.stdout], [], [], left_s)
            data = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                what = f"ended with {self.process.wait(20)}" if ready else "is silent"
                raise RuntimeError(f"the engine with {self.variant} {what}:\n{self.tail(25)}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        document: dict[str, Any] = json.loads(line)
        if "error" in document:
            raise RuntimeError(f"the engine with {self.variant}: {document['error']}")
        return document

    def __exit__(self, *_: object) -> None:
        # The end of its input ends it in order; by force when it hangs.
        assert self.process.stdin is not None, "built with pipes"
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.stop()
        remove_kv_segments(self.pid)

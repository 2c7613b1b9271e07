"""The way of one node to a server: frozen and killed without the server noticing.

``python -m support.tcp_proxy PORT TARGET_PORT`` hands bytes on between two ports of 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from support.server import ServerProcess
from support.waiting import wait_until

READ_BYTES = 1 << 16


class TcpProxy(ServerProcess):
    """One port of 127.0.0.1 that leads to another one."""

    def __init__(self, target_port: int) -> None:
        super().__init__()
        self._target_port = target_port

    def start(self) -> None:
        """Start it and return when it takes connections."""
        ports = [str(self.port), str(self._target_port)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.tcp_proxy", *ports], cwd=Path(__file__).parents[1]
        )
        wait_until(self._listens, "the proxy listens")

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(READ_BYTES):
            sink.write(data)
            await sink.drain()
    sink.close()


async def _serve(port: int, target_port: int) -> None:
    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward = await asyncio.open_connection("127.0.0.1", target_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pass_on(reader, onward[1]), _pass_on(onward[0], writer))

    server = await asyncio.start_server(taken, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))

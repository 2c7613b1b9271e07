"""HTTP/1.1 whose peers cannot hold descriptors, or keep probes out, by doing nothing.

uvicorn waits for ever for a request, and for an answer to be read, and takes any number of
connections.
"""

from __future__ import annotations

import asyncio
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

connections_max = 128  # of one socket; then the one that has kept us waiting longest goes
peer_s_max = 10.0  # for a whole request, and for room for more of an answer
_logger = logging.getLogger("uvicorn.error")


class BoundedProtocol(H11Protocol):
    """One connection. It is given up when its peer does nothing, and for others at the bound."""

    _since_s = 0.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection, and give another one up where they are too many."""
        assert isinstance(transport, asyncio.Transport), "of a stream"
        super().connection_made(transport)
        self._since_s = self.loop.time()
        self._watch()
        if len(self.connections) > connections_max:
            others = (one for one in self.connections if isinstance(one, BoundedProtocol))
            idle = [one for one in others if one.waits and one is not self]
            min(idle, key=lambda one: one._since_s, default=self).give_up("connections_max")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; a whole request ends the waiting for one."""
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        """The peer does not read what it asked for."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """It has read most of it."""
        super().resume_writing()
        self._watch()

    @property
    def waits(self) -> bool:
        """Whether the peer is to go on: to ask, or to read."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered or self.conn.their_state is h11.SEND_BODY or self.flow.write_paused

    def give_up(self, bound: str) -> None:
        """Close it without a word."""
        _logger.warning("connections whose peer does nothing are closed: %s", bound)
        self.connections.discard(self)  # now: its end is told later
        self.transport.abort()

    def _watch(self) -> None:
        if not self.waits and self._late is not None:
            self._late.cancel()
            self._late = None
        elif self.waits and self._late is None and not self.transport.is_closing():
            self._since_s = self.loop.time()
            self._late = self.loop.call_later(peer_s_max, self.give_up, "peer_s_max")

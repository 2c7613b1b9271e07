"""Proof of death: the pidfds of all attached halves, in the control loop.

Only a readable pidfd proves that a process has ended, and with it the last use of its memory by
itself. A closed stream, missed heartbeats, a full queue are hints that change nothing here.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from kvferry_sidecar.loop import READ, Loop
from kvferry_sidecar.sessions.identity import proven_dead
from kvferry_sidecar.sessions.model import Peer


class Liveness:
    """Owns one pidfd per half. ``on_dead(peer, now_s)`` is called once, at the proof."""

    def __init__(self, loop: Loop, on_dead: Callable[[Peer, float], None]) -> None:
        self._loop = loop
        self._on_dead = on_dead
        self._pidfds: dict[Peer, int] = {}

    def adopt(self, peer: Peer, pidfd: int) -> None:
        """Watch a half's process; the descriptor is ours from now on."""
        self._pidfds[peer] = pidfd
        self._loop.watch(pidfd, READ, lambda events, now_s: self._ready(peer, events, now_s))

    def watches(self, peer: Peer) -> bool:
        """Whether this half's pidfd is held here."""
        return peer in self._pidfds

    def is_dead(self, peer: Peer) -> bool:
        """Whether the half's process has ended, asked now, before the loop comes to it."""
        pidfd = self._pidfds.get(peer)
        return pidfd is None or proven_dead(pidfd)

    def forget(self, peer: Peer) -> None:
        """Stop watching (the half said Bye, or its death was handled)."""
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is not None:
            self._loop.unwatch(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Forget every half."""
        for peer in list(self._pidfds):
            self.forget(peer)

    def _ready(self, peer: Peer, events: int, now_s: float) -> None:
        if not events & READ:  # a reaped child raises EPOLLHUP as well; only this bit is the proof
            return
        self.forget(peer)
        self._on_dead(peer, now_s)

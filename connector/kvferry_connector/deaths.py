"""Proof that a sidecar ended: its pidfd, kept from Welcome until it fires."""

from __future__ import annotations

import os
import select

dead_epochs_max = 256
unproven_epochs_max = 8


class Deaths:
    """The sidecars this half has met: watched by pidfd, or proven dead.

    Written by the lifeline thread; the hook thread only looks epochs up in ``dead``. A pidfd
    becomes readable when the last thread of the process has exited; a closed stream, a lock or
    a missed heartbeat say nothing of the sort, so an epoch stays watched after its stream ended.
    """

    def __init__(self) -> None:
        self.dead: dict[int, None] = {}
        self._watched: dict[int, int] = {}

    def watch(self, epoch: int, pidfd: int) -> bool:
        """Take over the pidfd of the sidecar of ``epoch``; False when no more can be watched."""
        if epoch in self._watched or epoch in self.dead:
            os.close(pidfd)
            return epoch not in self.dead
        if len(self._watched) >= unproven_epochs_max:
            os.close(pidfd)
            return False
        self._watched[epoch] = pidfd
        return True

    def fds(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return list(self._watched.values())

    def collect(self) -> list[int]:
        """Move epochs whose pidfd has fired to ``dead``; returns those that are new there."""
        if not self._watched:
            return []
        poller = select.poll()
        for pidfd in self._watched.values():
            poller.register(pidfd, select.POLLIN)
        fired = {fd for fd, events in poller.poll(0) if events & select.POLLIN}
        new = [epoch for epoch, pidfd in self._watched.items() if pidfd in fired]
        for epoch in new:
            self.dead[epoch] = None
            os.close(self._watched.pop(epoch))
            if len(self.dead) > dead_epochs_max:
                del self.dead[next(iter(self.dead))]
        return new

    def close(self) -> None:
        """Close the pidfds that have not fired."""
        for pidfd in self._watched.values():
            os.close(pidfd)
        self._watched.clear()

"""The sidecar as one half sees it: attached or not, and never in the way.

Threads: the hook thread (the one that runs vLLM's hooks) calls everything here. A daemon thread
of ours (lifeline.py) owns the attach stream, the heartbeats and the proofs of death, so that an
idle engine attaches again too; it talks to the hook thread only by swapping attributes. No call
here locks, and none blocks except ``receive(wait_us)`` and ``close()``.

A typical hook::

    link = client.link()
    if link is None or not link.ready or client.silent():
        return 0, False                      # sidecar away, slow or refusing = a miss
    client.send(link, Ask(...))
    for message, raw in client.receive(link, wait_us=config.lookup_wait_us_max):
        ...
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import zmq

from kvferry_connector.config import FerryConfig
from kvferry_connector.half import Half, MemoryHandle
from kvferry_connector.lifeline import Lifeline
from kvferry_connector.link import Counters, HotSocket, Link, pack
from kvferry_connector.wire.attach import Refused, RegisterEngine, RegisterRank
from kvferry_connector.wire.codec import Frame
from kvferry_connector.wire.hot import FromHalf, FromSidecar

__all__ = ["Client", "Counters", "Half", "Link", "MemoryHandle"]

join_s_max = 2.0


class Client:
    """One half's attachment to the node's sidecar, over all its epochs.

    ``half`` says who we are (role, rank, ids, fence page); ``registration`` is sent after every
    Welcome. Descriptors (fence page, memories) are borrowed: they stay open, and the caller's,
    until ``close()``. Nothing happens before ``start()``, which belongs after the last fork.
    """

    def __init__(
        self,
        config: FerryConfig,
        half: Half,
        registration: RegisterEngine | RegisterRank,
        memories: Sequence[MemoryHandle] = (),
    ) -> None:
        self._config = config
        self._half = half
        self._registration = registration
        self._memories = tuple(memories)
        self._serial = _serial(registration)
        self._silent_s_max = config.silent_ms_max / 1000
        self.counters = Counters()
        self._pid = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._lifeline: Lifeline | None = None
        self._hot: HotSocket | None = None

    def start(self) -> None:
        """Open our pidfd and start the lifeline thread; does nothing when it runs already.

        In a forked child the parent's thread does not exist and its pidfd names the parent:
        there, everything is started anew. Raises OSError when no pidfd can be opened.
        """
        if self._running() is not None:
            return
        # A forked child must not touch the parent's sockets: they are dropped, not closed.
        self._hot = None
        self.counters = Counters()
        self._context = zmq.Context()
        self._lifeline = Lifeline(
            self._config,
            self._half,
            self._registration,
            self._memories,
            context=self._context,
            counters=self.counters,
        )
        self._pid = os.getpid()
        self._lifeline.start()

    def _running(self) -> Lifeline | None:
        return self._lifeline if self._pid == os.getpid() else None

    # --- state -------------------------------------------------------------------------------

    def link(self) -> Link | None:
        """Return the attached and registered link, or None: away, refused, or proven dead.

        ``link.ready`` turns True (in a new Link of the same ``key``) once all local ranks are
        registered. A link with another ``key`` than before starts from nothing: the sidecar of
        the old one may know nothing any more. Taking a new link closes the old socket.
        """
        lifeline = self._running()
        link = lifeline.published if lifeline is not None else None
        if link is None or lifeline is None or link.serial != self._serial:
            return None
        if self._hot is None or self._hot.key != link.key:
            self._adopt(lifeline)
            if self._hot is None or self._hot.key != link.key:
                return None  # the lifeline is already one link further; the next call has it
        return link

    def _adopt(self, lifeline: Lifeline) -> None:
        try:
            fresh = lifeline.handoff.popleft()
        except IndexError:
            return
        if self._hot is not None:
            self._hot.close()
        self._hot = fresh

    def is_dead(self, epoch: int) -> bool:
        """True once the pidfd of the sidecar of ``epoch`` proved its end; hints never do.

        Only epochs this half was attached to are known (the last ``dead_epochs_max``).
        """
        lifeline = self._running()
        return lifeline is not None and epoch in lifeline.deaths.dead

    def silent(self) -> bool:
        """True when the last heartbeat answer is older than ``silent_ms_max``: ask nothing.

        A silent sidecar keeps everything it was given; only ``is_dead`` ends that. Without a
        link the answer is True.
        """
        lifeline = self._running()
        return lifeline is None or lifeline.ack_age_s() > self._silent_s_max

    @property
    def refusal(self) -> Refused | None:
        """The last refusal of an attach or a registration; None once registered again."""
        lifeline = self._running()
        return lifeline.refusal if lifeline is not None else None

    @property
    def state(self) -> str:
        """One of "stopped", "away", "refused", "registered", "ready"."""
        lifeline = self._running()
        return lifeline.state if lifeline is not None else "stopped"

    # --- hot channel -------------------------------------------------------------------------

    def send(self, link: Link, message: FromHalf, raw: Sequence[Frame] = ()) -> bool:
        """Queue one message to the sidecar of ``link``; False (counted) when it is not taken.

        True promises nothing: the sidecar may die first. Frames of a link that is no longer the
        current one are never sent.
        """
        hot = self._usable(link)
        if hot is None or not hot.send(pack(link, message, raw)):
            self.counters.sends_refused += 1
            return False
        self.counters.sent += 1
        return True

    def receive(self, link: Link, wait_us: int = 0) -> list[tuple[FromSidecar, list[bytes]]]:
        """Return the messages that came for ``link`` with their raw frames, oldest first.

        Waits at most ``wait_us`` microseconds, and only for the first one. Frames of another
        epoch or generation, and what is no message of ours, are dropped and counted.
        """
        hot = self._usable(link)
        if hot is None:
            return []
        return hot.receive(link, wait_us, self.counters)

    def _usable(self, link: Link) -> HotSocket | None:
        """Return the socket of ``link``; never the parent's in a forked child."""
        hot = self._hot
        own = hot is not None and hot.key == link.key and self._running() is not None
        return hot if own else None

    # --- lifeline ----------------------------------------------------------------------------

    def set_live(self, as_of: int, live: Sequence[int]) -> None:
        """State the admissions that hold leases after ask number ``as_of``, for heartbeats."""
        lifeline = self._running()
        if lifeline is not None:
            lifeline.live = (as_of, list(live))

    def rotate(self, version: bytes) -> None:
        """Make ``version`` (16 bytes) the namespace version, now and at every later attach."""
        if isinstance(self._registration, RegisterRank):
            raise TypeError("only the scheduler half holds a namespace version")
        self._registration = _with_version(self._registration, version)
        lifeline = self._running()
        if lifeline is not None:
            lifeline.rotate(self._registration)

    def update_registration(
        self, registration: RegisterRank, memories: Sequence[MemoryHandle]
    ) -> None:
        """Attach again with re-mapped KV memory (a higher serial); older jobs become stale.

        ``link()`` is None until the sidecar has taken it. The new descriptors are borrowed.
        """
        self._registration = registration
        self._memories = tuple(memories)
        self._serial = registration.serial
        lifeline = self._running()
        if lifeline is not None:
            lifeline.replace(registration, self._memories)

    def close(self) -> None:
        """Say Bye, stop the thread (waits at most ``join_s_max`` seconds), drop the sockets."""
        lifeline = self._running()
        if lifeline is None:
            return
        self._lifeline = None
        if self._hot is not None:
            self._hot.close()
            self._hot = None
        if lifeline.stop(join_s_max) and self._context is not None:
            self._context.term()
        self._context = None


def _serial(registration: RegisterEngine | RegisterRank) -> int:
    return registration.serial if isinstance(registration, RegisterRank) else 0


def _with_version(registration: RegisterEngine, version: bytes) -> RegisterEngine:
    if len(version) != 16:
        raise ValueError(f"a namespace version has 16 bytes, not {len(version)}")
    return msgspec.structs.replace(registration, version=version)

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
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry_connector.acks import Acks
from kvferry_connector.config import FerryConfig
from kvferry_connector.half import Half, MemoryHandle
from kvferry_connector.lifeline import Lifeline
from kvferry_connector.link import HotSocket, Link, pack
from kvferry_connector.wire.attach import Refused, RegisterEngine, RegisterRank
from kvferry_connector.wire.codec import Frame
from kvferry_connector.wire.hot import FromHalf, FromSidecar

__all__ = ["Client", "Half", "Link", "MemoryHandle"]

join_s_max = 2.0


class Client:
    """One half's attachment to the node's sidecar, over all its epochs.

    ``half`` says who we are (role, rank, ids, fence page); ``registration`` is sent after every
    Welcome. Descriptors (fence page, memories) are borrowed: they stay open, and the caller's,
    until ``close()``. Nothing happens before ``start()``, which belongs after the last fork; in a
    child that is forked later the client is as before ``start()``.
    """

    def __init__(
        self,
        config: FerryConfig,
        half: Half,
        registration: RegisterEngine | RegisterRank,
        memories: Sequence[MemoryHandle] = (),
    ) -> None:
        self._facts = (config, half, registration, tuple(memories))
        self._silent_s_max = config.silent_ms_max / 1000
        self.forget()
        _clients.add(self)

    def forget(self) -> None:
        """Be as before ``start()``: a forked child drops the parent's sockets, unclosed."""
        self._lifeline = Lifeline(*self._facts)
        self._hot: HotSocket | None = None
        self.counts = self._lifeline.counts
        self._told: Counter[str] = Counter()

    def start(self) -> None:
        """Start its thread. Raises OSError without a pidfd, RuntimeError without a thread."""
        self._lifeline.start()

    # --- state -------------------------------------------------------------------------------

    def link(self) -> Link | None:
        """Return the attached and registered link, or None: away, refused, or proven dead.

        ``link.ready`` turns True (in a new Link of the same ``key``) once all local ranks are
        registered. A link with another ``key`` than before starts from nothing: the sidecar of
        the old one may know nothing any more. Taking a new link closes the old socket.
        """
        link = self._lifeline.published
        if link is not None and link.hot is not self._hot:
            if self._hot is not None:
                self._hot.close()
            self._hot = link.hot
        return link

    def is_dead(self, epoch: int) -> bool:
        """True once the pidfd of the sidecar of ``epoch`` proved its end; hints never do.

        ``epoch`` is one of a link of this client: it was watched before the link was published.
        """
        return epoch not in self._lifeline.unproven

    def silent(self) -> bool:
        """True when the last heartbeat answer is older than ``silent_ms_max``: ask nothing.

        A silent sidecar keeps everything it was given; only ``is_dead`` ends that. Without a
        link the answer is True.
        """
        lifeline = self._lifeline
        if lifeline.published is None:
            return True
        return time.monotonic() - lifeline.last_ack_s > self._silent_s_max

    @property
    def refusal(self) -> Refused | None:
        """The last refusal of an attach or a registration; None once registered again."""
        return self._lifeline.refusal

    @property
    def state(self) -> str:
        """One of "stopped", "away", "refused", "registered", "ready", "asleep"."""
        return self._lifeline.state

    def tell(self, count: Callable[[str, int], None]) -> None:
        """Pass on what both threads have counted since the last call: numbers that only grow."""
        for name, number in list(self.counts.items()):  # a copy: the thread may add names
            if new := number - self._told[name]:
                self._told[name] = number
                count(name, new)

    # --- hot channel -------------------------------------------------------------------------

    def send(self, link: Link, message: FromHalf, raw: Sequence[Frame] = ()) -> bool:
        """Queue one message to the sidecar of ``link``; False (counted) when it is not taken.

        True promises nothing: the sidecar may die first. Frames of a link that is no longer the
        current one are never sent.
        """
        hot = self._hot
        if hot is not None and link.hot is hot and hot.send(pack(link, message, raw)):
            return True
        self.counts["frames_refused"] += 1
        return False

    def receive(self, link: Link, wait_us: int = 0) -> list[tuple[FromSidecar, list[bytes]]]:
        """Return the messages that came for ``link`` with their raw frames, oldest first.

        Waits at most ``wait_us`` microseconds, and only for the first one. Frames of another
        epoch or generation, and what is no message of ours, are dropped and counted.
        """
        hot = self._hot
        if hot is None or link.hot is not hot:
            return []
        return hot.receive(link, wait_us, self.counts)

    # --- lifeline ----------------------------------------------------------------------------

    def set_live(self, as_of: int, live: Sequence[int]) -> None:
        """State the admissions that hold leases after ask number ``as_of``, for heartbeats."""
        self._lifeline.live = (as_of, list(live))

    def set_pace(self, token_ns: int) -> None:
        """State what a token of prefill costs the engine, for heartbeats."""
        self._lifeline.token_ns = token_ns

    def set_acks(self, acks: Acks) -> None:
        """Share the jobs whose outcomes are not acknowledged yet: heartbeats take them along."""
        self._lifeline.acks = acks

    def rotate(self, version: bytes) -> None:
        """Make ``version`` (16 bytes) the namespace version, now and at every later attach."""
        self._lifeline.rotate(version)

    def withdraw(self, wait_s: float) -> bool:
        """Take the memory back from every sidecar; True once each has closed it, or has ended.

        From then on no copy runs on it. Waits at most ``wait_s`` seconds; what has not come by
        then is waited for in the background. There is no link until ``lend``.
        """
        loan = self._lifeline.loan
        loan.recall()
        self._lifeline.prod()
        return loan.returned.wait(wait_s)

    def lend(self, registration: RegisterRank, memories: Sequence[MemoryHandle]) -> None:
        """After ``withdraw``: register this memory, once what was lent before is back."""
        self._facts = (*self._facts[:2], registration, tuple(memories))
        self._lifeline.loan.renew((registration, tuple(memories)))
        self._lifeline.prod()

    def close(self) -> None:
        """Say Bye, stop the thread (waits at most ``join_s_max`` seconds), drop the sockets."""
        if self._hot is not None:
            self._hot.close()
            self._hot = None
        self._lifeline.stop(join_s_max)


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _forget_all() -> None:
    for client in _clients:
        client.forget()


os.register_at_fork(after_in_child=_forget_all)

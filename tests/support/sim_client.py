"""The connector's client in a simulation: link, lifeline and inbox of one half.

It has the interface of client.py and the behaviour of lifeline.py: it attaches, beats, watches for
the sidecar's death and attaches again by itself, at random moments.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from kvferry_connector.acks import Acks
from kvferry_connector.link import Link
from kvferry_connector.wire.attach import (
    Bye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Ready,
    Refused,
    Registered,
    RegisterEngine,
    RegisterRank,
    Rotate,
    ToPeer,
)
from kvferry_connector.wire.codec import ids_max
from kvferry_connector.wire.hot import FromHalf, FromSidecar
from kvferry_sidecar.sessions.model import Peer
from kvferry_sidecar.sessions.registry import Offer
from support.sim_network import SimFrame
from support.sim_sidecar import SimProcess, SimSidecar

if TYPE_CHECKING:
    from support.sim_world import World

BEAT_S = 0.1
SILENT_S_MAX = 0.4


class SimClient:
    """One half's attachment over all sidecars. Its process may die: then it does nothing more."""

    def __init__(
        self,
        world: World,
        process: SimProcess,
        hello: Hello,
        registration: RegisterEngine | RegisterRank,
        offer: Offer,
    ) -> None:
        self.world, self.process, self.hello, self.offer = world, process, hello, offer
        self.registration = registration
        self.rng: random.Random = world.rng
        self.published: Link | None = None
        self.unproven: dict[int, float] = {}  # epoch -> when its death is seen; inf: it lives
        self.inbox: deque[SimFrame] = deque()
        self.live: tuple[int, list[int]] = (0, [])
        self.token_ns = 0
        self.acks = Acks()
        self.peer: Peer | None = None  # what the sidecar of ``published`` calls us
        self.last_ack_s = 0.0
        self.next_s = 0.0  # when the next attach or beat is due
        self._sidecar: SimSidecar | None = None
        self._up: deque[tuple[float, Heartbeat | Rotate | Bye]] = deque()
        self._down: deque[tuple[float, ToPeer]] = deque()
        self._beats = 0

    # --- as client.py -------------------------------------------------------------------------

    def start(self) -> None:
        """Nothing: ``live_on`` is the thread."""

    def link(self) -> Link | None:
        return self.published

    def is_dead(self, epoch: int) -> bool:
        return epoch not in self.unproven

    def silent(self) -> bool:
        return self.published is None or self.world.now_s - self.last_ack_s > SILENT_S_MAX

    @property
    def state(self) -> str:
        return "registered" if self.published else "away"

    def send(self, link: Link, message: FromHalf, raw: Sequence[bytes] = ()) -> bool:
        if self.published is None or link.key != self.published.key or self.rng.random() < 0.002:
            return False
        self.world.network.post(self.world.now_s, True, link.key, message, tuple(raw))
        return True

    def receive(self, link: Link, wait_us: int = 0) -> list[tuple[FromSidecar, list[bytes]]]:
        taken: list[tuple[FromSidecar, list[bytes]]] = []
        while self.inbox:
            frame = self.inbox.popleft()
            if frame.key != link.key:
                self.world.saw("stale frame dropped by a half")
            elif not frame.garbled:
                taken.append((frame.message, []))
        return taken

    def set_live(self, as_of: int, live: Sequence[int]) -> None:
        self.live = (as_of, list(live))

    def tell(self, count: Callable[[str, int], None]) -> None:
        """Nothing is counted here."""

    def set_pace(self, token_ns: int) -> None:
        self.token_ns = token_ns

    def set_acks(self, acks: Acks) -> None:
        self.acks = acks

    def rotate(self, version: bytes) -> None:
        self.registration = msgspec.structs.replace(self.registration, version=version)
        self._say(Rotate(version))

    def close(self) -> None:
        self._detach()

    # --- the thread ---------------------------------------------------------------------------

    def live_on(self, now_s: float) -> None:
        """Whatever is due: proofs, messages of the stream, an attach, a beat."""
        if not self.process.alive:
            return
        for epoch in [e for e, seen_s in self.unproven.items() if seen_s <= now_s]:
            del self.unproven[epoch]
            if self.published is not None and self.published.epoch == epoch:
                self._detach()
        sidecar = self.world.sidecar
        if self._sidecar is not None and self._sidecar is not sidecar:
            self._detach()  # the stream's end is seen before or after the proof
        if sidecar is None or not sidecar.runs(now_s):
            return
        while self._up and self._up[0][0] <= now_s and self.peer is not None:
            sidecar.heard(self.peer, self._up.popleft()[1], now_s)
        while self._down and self._down[0][0] <= now_s:
            self._hear(self._down.popleft()[1], now_s)
        if now_s >= self.next_s:
            if self.published is None:
                self._attach(sidecar, now_s)
            else:
                self._beats += 1
                acks = self.acks.take(ids_max)
                self._say(Heartbeat(self._beats, *self.live, acks, self.token_ns))
                self.next_s = now_s + BEAT_S

    def pushed(self, message: ToPeer, now_s: float) -> None:
        """The sidecar sent a message on our stream."""
        before_s = self._down[-1][0] if self._down else now_s
        self._down.append((max(before_s, now_s + self.rng.uniform(0, 0.02)), message))

    def lose_stream(self, now_s: float) -> None:
        """The stream breaks, and with it what was on its way."""
        sidecar = self._sidecar
        self._detach()
        if sidecar is not None and sidecar is self.world.sidecar:
            sidecar.lost(self, now_s)
        self.next_s = now_s + self.rng.uniform(0, 0.3)

    def died(self, epoch: int, seen_s: float) -> None:
        """The sidecar of an epoch died; its pidfd tells at ``seen_s``."""
        if epoch in self.unproven:
            self.unproven[epoch] = seen_s

    def _attach(self, sidecar: SimSidecar, now_s: float) -> None:
        self.next_s = now_s + self.rng.uniform(0, 0.2)
        found = sidecar.attach(self, self.hello, self.offer, self.registration, now_s)
        if isinstance(found, Refused):
            self.world.saw(f"attach refused: {found.code}")
            return
        self.peer, answer = found
        if self.published is None and self.inbox:
            self.world.saw("attached with frames of before")
        self._sidecar = sidecar
        self.unproven.setdefault(sidecar.epoch, float("inf"))
        self.last_ack_s = now_s
        self._publish(answer)
        sidecar.settle(self.peer, now_s)

    def _publish(self, answer: Registered) -> None:
        assert self.peer is not None
        assert self._sidecar is not None
        rules = tuple(answer.save_rules)
        self.published = Link(self._sidecar.epoch, self.peer.generation, 1, rules)

    def _hear(self, message: ToPeer, now_s: float) -> None:
        link = self.published
        match message:
            case HeartbeatAck():
                self.last_ack_s = now_s
            case Ready() if link is not None:
                self.published = replace(link, ready=True, save_rules=tuple(message.save_rules))
            case Registered() if link is not None:
                self.published = replace(link, save_rules=tuple(message.save_rules))
            case Refused():
                raise AssertionError(f"refused on a registered stream: {message}")

    def _say(self, message: Heartbeat | Rotate | Bye) -> None:
        if self.published is not None:
            now_s = self.world.now_s
            before_s = self._up[-1][0] if self._up else now_s
            self._up.append((max(before_s, now_s + self.rng.uniform(0, 0.02)), message))

    def _detach(self) -> None:
        self.published = self._sidecar = self.peer = None
        self._up.clear()
        self._down.clear()


def make_hello(engine: str, instance: str, rank: int, pid: int) -> Hello:
    """Return the Hello of a half; ``rank`` -1 is the scheduler half."""
    role = "scheduler" if rank < 0 else "worker"
    return Hello(1, 1, role, engine, instance, rank, pid, fence=rank >= 0)

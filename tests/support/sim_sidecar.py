"""One life of a simulated sidecar: the real pipeline and registry between fake descriptors.

``turn`` is what loop.py does: deaths, attach streams, copies, ticks. A killed one is dropped as it
stands: what was in its tables is gone, what its copies were writing is half written.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvferry_connector.wire.attach import (
    Bye,
    Heartbeat,
    Hello,
    Refused,
    Registered,
    RegisterEngine,
    RegisterRank,
    Rotate,
    ToPeer,
)
from kvferry_connector.wire.hot import Error, FromSidecar
from kvferry_sidecar.engines.base import CopyStatus
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.pipeline import Pipeline
from kvferry_sidecar.sessions.model import Peer, RankGeometry
from kvferry_sidecar.sessions.registry import Claim, Offer, Registry
from kvferry_sidecar.stages.stores import Tier
from kvferry_sidecar.tiers.host import HostTier
from support.fake_copies import FakeCopies
from support.fake_tier import FakeTier
from support.pipeline_bed import NullLog
from support.sim_network import SimFrame

LIMITS = Limits(
    admissions_max=12,
    key_bytes_max=1500,
    leases_max=24,
    lease_idle_ms_max=250,
    jobs_max=5,
    tombstones_max=16,
    outcomes_unacked_max=8,
    outcome_resend_ms=50,
    fence_ms_max=400,
    copy_ms_max=150,
    save_copies_max=3,
    ranks_wait_ms_max=500,
    drain_ms_max=200,
    stage_ms_max=30,
    stage_bytes_max=9 << 10,
    stage_calls_max=2,
    store_call_bytes_max=4 << 10,
    store_ms_max=300,
    store_retry_ms=50,
    abandoned_calls_max=2,
    write_behind_max=8,
    versions_max=2,
)


Stored = dict[bytes, tuple[tuple[int, ...], tuple[int, ...]]]  # of a FakeTier


@dataclass(eq=False)
class SimProcess:
    """A process of an engine. ``seen_s``: when its pidfd has reached the sidecar's loop."""

    inode: int
    alive: bool = True
    seen_s: float = 0.0


class Stream(Protocol):
    """The half's end of an attach stream."""

    process: SimProcess

    def pushed(self, message: ToPeer, now_s: float) -> None:
        """The sidecar sent a message."""


@dataclass(eq=False)
class _Liveness:
    """Stands for liveness.py: who is watched."""

    processes: dict[Peer, SimProcess] = field(default_factory=dict)

    def watches(self, peer: Peer) -> bool:
        return peer in self.processes

    def is_dead(self, peer: Peer) -> bool:
        process = self.processes.get(peer)
        return process is None or not process.alive

    def forget(self, peer: Peer) -> None:
        self.processes.pop(peer, None)


def validate(_register: RegisterRank, memories: dict[int, Any]) -> RankGeometry:
    """A rank's memory is its geometry here."""
    geometry: RankGeometry = memories[0]
    return geometry


def namespace_of(geometries: list[RankGeometry], version: bytes) -> bytes:
    """Return the namespace of the ranks of one model under one version."""
    whole = b"".join(geometry.digest for geometry in geometries) + version
    return hashlib.blake2b(whole, digest_size=16).digest()


class SimSidecar:
    """``down`` takes what is sent on the hot channel."""

    def __init__(
        self,
        epoch: int,
        pool: Any,
        memory: dict[int, int],
        stores: dict[str, Stored],
        rng: random.Random,
        down: Callable[[Peer, FromSidecar], None],
    ) -> None:
        self.epoch, self.rng, self.down = epoch, rng, down
        self.now_s = 0.0
        self.stopped_until_s = 0.0  # SIGSTOP
        self.drain_until_s = math.inf
        self.seen: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.copies = FakeCopies()
        self.copies.memory = memory
        self.tiers = [
            FakeTier(self.copies, pool.address, source=name, threads=2) for name in stores
        ]
        for tier in self.tiers:
            tier.stored = stores[tier.source]
        self._slow: dict[int, float] = {}  # copies that cannot end before that
        self.log = NullLog()
        self.streams: dict[Peer, Stream] = {}
        self.peers: dict[int, Peer] = {}  # by generation
        self._liveness = _Liveness()
        self.pipeline = Pipeline(
            tiers=[Tier(tier.name, tier.source, tier, "all") for tier in self.tiers],
            pool=HostTier(pool),
            copies=self.copies,
            send=down,
            limits=LIMITS,
            log=self.log,
        )
        self.registry = Registry(
            limits=LIMITS,
            events=self.pipeline,
            liveness=self._liveness,
            validate=validate,
            digest=namespace_of,
            push=self._push,
            log=self.log,
        )

    def runs(self, now_s: float) -> bool:
        """Whether it gets to run: it is not stopped."""
        return now_s >= self.stopped_until_s

    # --- attach ------------------------------------------------------------------------------

    def attach(
        self,
        stream: Stream,
        hello: Hello,
        offer: Offer,
        registration: RegisterEngine | RegisterRank,
        now_s: float,
    ) -> tuple[Peer, Registered] | Refused:
        """Hello, Welcome and the registration in one."""
        peer = self.registry.attach(Claim(hello, 1, stream.process.inode, offer), now_s)
        if isinstance(peer, Refused):
            return peer
        if not self._liveness.watches(peer):
            self._liveness.processes[peer] = stream.process
        elif any(key.generation == peer.generation for key in self.pipeline._jobs.open_parts()):
            self.seen["a half with jobs open attached again and kept its generation"] += 1
        self.peers[peer.generation] = peer
        answer = (
            self.registry.register_engine(peer, registration, now_s)
            if isinstance(registration, RegisterEngine)
            else self.registry.register_rank(peer, registration, now_s)
        )
        if isinstance(answer, Refused):
            self.registry.lost(peer, now_s)
            return answer
        self.streams[peer] = stream
        return peer, answer

    def settle(self, peer: Peer, now_s: float) -> None:
        """The answer to the registration is out."""
        self.registry.settle(peer, now_s)

    def lost(self, stream: Stream, now_s: float) -> None:
        """A stream ended."""
        for peer in [peer for peer, one in self.streams.items() if one is stream]:
            del self.streams[peer]
            self.registry.lost(peer, now_s)

    def heard(self, peer: Peer, message: Heartbeat | Rotate | Bye, now_s: float) -> None:
        """A message on a registered stream."""
        match message:
            case Heartbeat():
                self._push(peer, self.registry.beat(peer, message, now_s))
            case Rotate():
                self._push(peer, self.registry.rotate(peer, message, now_s))
            case Bye():
                del self.streams[peer]
                self.registry.bye(peer, now_s)

    def _push(self, peer: Peer, message: ToPeer) -> None:
        stream = self.streams.get(peer)
        if stream is not None:
            stream.pushed(message, self.now_s)

    # --- the loop ----------------------------------------------------------------------------

    def take(self, frame: SimFrame, now_s: float) -> None:
        """A hot frame came: as transport.py has it."""
        self.now_s = now_s
        epoch, generation = frame.key
        peer = self.peers.get(generation)
        if epoch != self.epoch or peer is None or self.registry.find(peer.routing_id) is not peer:
            self.seen["a foreign or stale frame came up"] += 1
            return
        if frame.garbled:
            self.down(peer, Error("malformed", "garbled", "none"))
            return
        self.pipeline.on_message(peer, frame.message, list(frame.raw), now_s)

    def turn(self, now_s: float, *, whole: bool = False) -> None:
        """One turn; ``whole``: everything that waits is looked at."""
        self.now_s = now_s
        for peer, process in list(self._liveness.processes.items()):
            if not process.alive and (whole or process.seen_s <= now_s):
                self._liveness.forget(peer)
                self.streams.pop(peer, None)
                self.registry.dead(peer, now_s)
        if whole or self.rng.random() < 0.7:
            self.pipeline.on_copies(now_s)
        if whole or self.rng.random() < 0.7:
            self.pipeline.on_stores(now_s)
        self.pipeline.on_tick(now_s)
        self.registry.tick(now_s)

    def finish_a_copy(self) -> None:
        """One running copy comes to its end, whichever, or turns out to be a slow one."""
        ticket = self.rng.choice(list(self.copies.running))
        if self.rng.random() < 0.01:
            self._slow[ticket] = self.now_s + self.rng.uniform(0, 1.2)
            self.faults["copy delayed"] += 1
        if self._slow.get(ticket, 0.0) > self.now_s:
            return
        luck = self.rng.random()
        status: CopyStatus | None = None
        if luck < 0.03:
            status = CopyStatus.FAILED
            self.faults["copy failed"] += 1
        elif luck < 0.9 and self.copies.running[ticket].cancelled:
            status = CopyStatus.DONE
            self.faults["copy done although cancelled"] += 1
        self.copies.finish(ticket, status)

    def finish_a_call(self, tier: FakeTier) -> None:
        """One call into a store returns; now and then the store is away, or loses everything."""
        luck = self.rng.random()
        if luck < 0.002:
            tier.answering = not tier.answering
            self.faults["store away"] += not tier.answering
        elif luck < 0.003:
            tier.stored.clear()
            self.faults["store emptied"] += 1
        if tier.open and luck < 0.3:
            tier.finish(self.rng.choice(list(tier.open)))

    def kill(self) -> None:
        """kill -9: running copies stop somewhere, and nothing more happens here."""
        for ticket in list(self.copies.running):
            self.copies.tear(ticket, self.rng.random())
        self.copies.close()

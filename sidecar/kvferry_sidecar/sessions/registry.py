"""Sessions and their halves: who may attach, under which generation, and when all are ready.

A generation is a number of this sidecar, never used twice in an epoch. It belongs to one life of
one half: the same process attaching again keeps its Peer and generation, and with them its jobs
and unacknowledged outcomes; another process gets the place only after the old one's proven death.
Owned by the control loop.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry_connector.wire.attach import (
    FieldRefusal,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Left,
    Ready,
    Refused,
    Registered,
    RegisterEngine,
    RegisterRank,
    Rotate,
    ToPeer,
)
from kvferry_connector.wire.names import NONCE_BYTES
from kvferry_native import Mapping
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.geometry.device import DeviceMemory
from kvferry_sidecar.geometry.identity import nearest_namespace
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.sessions import agreement, readiness
from kvferry_sidecar.sessions.events import SessionEvents
from kvferry_sidecar.sessions.identity import own_credentials, uid_allowed
from kvferry_sidecar.sessions.liveness import Liveness
from kvferry_sidecar.sessions.model import Peer, RankGeometry, Session, SessionKey
from kvferry_sidecar.sessions.rules import retention_of
from kvferry_sidecar.sessions.tenants import NOBODY_BOUND, Credentials, Tenants

leaving_check_s = 0.05  # how often left halves' copies and unmapping are asked for

Backing = tuple[int, int, int]  # (device, inode, bytes) of a memory
Memories = dict[int, Mapping | DeviceMemory]
Validate = Callable[[RegisterRank, Memories], RankGeometry | list[FieldRefusal]]
Digest = Callable[[list[RankGeometry], bytes], bytes]


@dataclass(slots=True)
class Offer:
    """The mapped memory of a Hello; it becomes the rank's once its registration is valid."""

    fence: Mapping | None = None
    memories: Memories = field(default_factory=dict)
    backing: dict[int, Backing] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """A Hello whose process is verified. ``life_inode``: see Life."""

    hello: Hello
    protocol: int
    life_inode: int
    offer: Offer
    who: Credentials = field(default_factory=own_credentials)


class Registry:
    """All sessions of this epoch.

    ``push`` sends a message on a half's attach stream, if it has a registered one.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        events: SessionEvents,
        liveness: Liveness,
        validate: Validate,
        digest: Digest,
        push: Callable[[Peer, ToPeer], None],
        log: Log,
        retention: str = "engine",
        tenants: Tenants = NOBODY_BOUND,
        shared_store: bool = False,
    ) -> None:
        self.tenants, self._shared_store = tenants, shared_store
        self._limits, self._retention = limits, retention
        self._events, self._liveness = events, liveness
        self._validate, self._digest = validate, digest
        self._push = push
        self._log = log
        self._generation = 0
        self._sessions: dict[SessionKey, Session] = {}
        self._by_routing_id: dict[bytes, Peer] = {}
        self._offers: dict[Peer, Offer] = {}
        self._leaving: list[Peer] = []  # gone, but their memory may still be mapped

    @property
    def sessions(self) -> list[Session]:
        """The sessions with at least one half."""
        return list(self._sessions.values())

    @property
    def leaving(self) -> int:
        """Halves that are gone and whose memory is still mapped."""
        return len(self._leaving)

    def set_retention(self, retention: str) -> None:
        """Another retention, for engines that register from now on."""
        self._retention = retention

    def find(self, routing_id: bytes) -> Peer | None:
        """Return the half of a ZeroMQ routing id."""
        return self._by_routing_id.get(routing_id)

    # --- attach ------------------------------------------------------------------------------

    def attach(self, claim: Claim, now_s: float) -> Peer | Refused:
        """Give a verified process its half's place: the old one, a free one, or a refusal.

        A returned Peer that liveness does not watch is new: the caller gives it the pidfd.
        """
        hello = claim.hello
        key = SessionKey(hello.engine_id, hello.instance_id)
        session = self._living(key, now_s)
        old = readiness.half_of(session, hello.rank) if session is not None else None
        if old is not None and old.life_inode != claim.life_inode:
            return agreement.taken(hello, old)
        if self.tenants.bound and session is not None and not readiness.of_user(session, claim.who):
            return Refused("uid", "another user's process is a half of this engine already")
        if old is not None:
            old.protocol, old.connected, old.last_beat_s = claim.protocol, True, now_s
            self._offers[old] = claim.offer
            return old
        if session is None:
            if len(self._sessions) >= self._limits.sessions_max:
                return Refused(
                    "sessions-max",
                    f"{self._limits.sessions_max} sessions are attached already; raise "
                    "limits.sessions_max or stop engines that are not needed",
                )
            if refused := self._no_share(claim.who):
                return refused
            session = self._sessions[key] = Session(key)
        elif hello.role == "worker" and len(session.workers) >= self._limits.ranks_max:
            return Refused(
                "ranks-max",
                f"{self._limits.ranks_max} ranks of this engine are attached already; raise "
                "limits.ranks_max",
            )
        return self._admit(session, claim, now_s)

    def _no_share(self, who: Credentials) -> Refused | None:
        """Return why a process of another user makes no further session, or None."""
        if uid_allowed(who.uid):
            return None
        firsts = [half for one in self._sessions.values() for half in readiness.halves(one)[:1]]
        others = (self.tenants.of(it.who) for it in firsts if not uid_allowed(it.who.uid))
        mine, most = self.tenants.of(who), self._limits.sessions_max
        return self.tenants.over_share(mine, others, most, "limits.sessions_max")

    def _living(self, key: SessionKey, now_s: float) -> Session | None:
        """Return the session after handling deaths that the loop has not come to yet."""
        session = self._sessions.get(key)
        for half in readiness.halves(session) if session is not None else []:
            if self._liveness.is_dead(half):
                self.dead(half, now_s)
        return self._sessions.get(key)

    def _admit(self, session: Session, claim: Claim, now_s: float) -> Peer:
        hello = claim.hello
        self._generation += 1
        peer = Peer(
            session=session,
            role=hello.role,
            rank=hello.rank,
            generation=self._generation,
            # Not to be guessed: another process of this user could take a live half's id over.
            routing_id=b"K" + self._generation.to_bytes(8, "big") + secrets.token_bytes(8),
            protocol=claim.protocol,
            life_inode=claim.life_inode,
            who=claim.who,
            pid=hello.pid,
            fence=claim.offer.fence,
            last_beat_s=now_s,
            host=hello.host,
            dp_rank=hello.dp_rank,
        )
        if hello.role == "scheduler":
            session.scheduler = peer
        else:
            session.workers[hello.rank] = peer
        self._by_routing_id[peer.routing_id] = peer
        self._offers[peer] = claim.offer
        return peer

    # --- registration ------------------------------------------------------------------------

    def register_engine(
        self, peer: Peer, message: RegisterEngine, now_s: float
    ) -> Registered | Refused:
        """Take (or confirm) the scheduler half's registration; ``settle`` comes after the reply."""
        session = peer.session
        if peer.role != "scheduler":
            return Refused("role", "a worker half registers with RegisterRank")
        others = [one for one in self._sessions.values() if one is not session]
        shared_store, ranks_max = self._shared_store, self._limits.ranks_max
        found = agreement.check_engine(
            session, message, ranks_max, shared_store=shared_store, others=others
        )
        if found:
            return Refused("engine-refused", "the engine's registration does not fit", found)
        rotated = bool(session.version) and session.version != message.version
        peer.registration = message
        session.life = message.life
        session.version = message.version
        session.ranks = tuple(sorted(message.ranks))
        session.scheduler_block_tokens = message.scheduler_block_tokens
        session.alignment_tokens = message.alignment_tokens
        session.retention_tokens = retention_of(
            self._retention, message.retention_tokens, message.scheduler_block_tokens
        )
        session.use_eagle = message.use_eagle
        session.reprefill_tokens = message.reprefill_tokens
        session.kv_events = message.kv_events
        if rotated:
            self._versioned(session, now_s)
        return self._registered(session)

    def register_rank(
        self, peer: Peer, message: RegisterRank, now_s: float
    ) -> Registered | Refused:
        """Take (or confirm) a worker half's registration; ``settle`` comes after the reply."""
        if peer.role != "worker":
            return Refused("role", "the scheduler half registers with RegisterEngine")
        own = uid_allowed(peer.who.uid)
        if refused := self.tenants.refusal(peer.who, message.identity, own=own):
            return refused
        offer = self._offers.get(peer, Offer())
        found = agreement.check_again(peer, message, offer.backing)
        if found:
            return Refused("rank-refused", "this rank registered before, differently", found)
        if peer.geometry is None or message != peer.registration:
            geometry = self._validate(message, offer.memories)
            if isinstance(geometry, list):
                return Refused("rank-refused", "the rank's KV memory cannot be served", geometry)
            found = agreement.check_rank(peer, message, geometry)
            found += agreement.check_digest(peer, message, geometry)
            if found:
                return Refused(
                    "rank-refused", "the rank differs from what its engine registered", found
                )
            peer.geometry, peer.registration = geometry, message
            peer.memories, peer.backing = offer.memories, offer.backing
            if peer.session.ready:  # its memory was mapped anew
                self._events.on_session_ready(peer.session, now_s)
        if offer.fence is not None:
            peer.fence = offer.fence
        self._offers.pop(peer, None)
        return self._registered(peer.session, peer)

    def settle(self, peer: Peer, now_s: float) -> None:
        """After an accepted registration was answered: tell Ready to whom it is news."""
        session = peer.session
        if session.ready:
            self._push(peer, self._ready_message(session))
            return
        if (geometries := readiness.complete(session)) is None:
            return
        session.ready = True
        self._name(session, geometries)
        self._log.info(
            "session ready",
            engine=session.key.engine_id,
            instance=session.key.instance_id,
            ranks=list(session.ranks),
            namespace=session.namespaces[session.version].hex(),
        )
        self._warn_near_miss(session)
        self._events.on_session_ready(session, now_s)
        for half in readiness.halves(session):
            self._push(half, self._ready_message(session))

    def rotate(self, peer: Peer, message: Rotate, now_s: float) -> Registered | Refused:
        """Change the session's namespace version; objects of the old one are misses from now on."""
        session = peer.session
        if peer.role != "scheduler" or not session.life:
            return Refused("rotate", "only a registered scheduler half holds the version")
        if len(message.version) != NONCE_BYTES:
            return Refused(
                "rotate", f"a version of {len(message.version)} bytes; it has {NONCE_BYTES}"
            )
        if message.version != session.version:
            session.version = message.version
            self._versioned(session, now_s)
        return self._registered(session)

    def beat(self, peer: Peer, message: Heartbeat, now_s: float) -> HeartbeatAck:
        """Take a heartbeat."""
        peer.last_beat_s = now_s
        self._events.on_beat(peer, message, now_s)
        return HeartbeatAck(message.seq)

    def _versioned(self, session: Session, now_s: float) -> None:
        if (geometries := readiness.complete(session)) is not None:
            self._name(session, geometries)
        self._events.on_version(session, now_s)

    def _name(self, session: Session, geometries: list[RankGeometry]) -> None:
        """Work out the namespace of the session's version; it stands last, the oldest goes."""
        names = session.namespaces
        names.pop(session.version, None)
        names[session.version] = self._digest(geometries, session.version)
        while len(names) > self._limits.versions_max:
            del names[next(iter(names))]

    # --- leaving -----------------------------------------------------------------------------

    def lost(self, peer: Peer, now_s: float) -> None:
        """The stream ended. A hint: a registered half keeps everything until its proven death."""
        peer.connected = False
        if peer.registration is None:  # it can have no jobs; nothing is lost with it
            self._leave(peer, now_s)

    def bye(self, peer: Peer, now_s: float) -> None:
        """The half left in order."""
        try:
            self._events.on_bye(peer, now_s)
        finally:
            self._leave(peer, now_s)

    def dead(self, peer: Peer, now_s: float) -> None:
        """The half's process has ended, proven by its pidfd."""
        facts = {"role": peer.role, "rank": peer.rank, "generation": peer.generation}
        self._log.info("half ended", engine=peer.session.key.engine_id, **facts)
        peer.connected = False
        try:
            self._events.on_peer_dead(peer, now_s)
        finally:
            self._leave(peer, now_s)

    def tick(self, _now_s: float) -> float:
        """Close the mappings of halves that left, once their session's copies have stopped.

        Who said Bye is told when nothing is mapped any more: its memory is its own again.
        """
        busy = self._events.busy
        staying = [one for one in self._leaving if busy(one.session) or not one.let_go()]
        for peer in self._leaving:
            if peer not in staying:
                peer.fence = None
                peer.memories, peer.backing = {}, {}
                self._push(peer, Left())
        self._leaving = staying
        return leaving_check_s if staying else math.inf

    def _leave(self, peer: Peer, now_s: float) -> None:
        """Take a half out of its session; its mappings stay until ``tick`` lets them go."""
        session = peer.session
        self._liveness.forget(peer)
        self._by_routing_id.pop(peer.routing_id, None)
        self._offers.pop(peer, None)
        if session.scheduler is peer:
            session.scheduler = None
            session.life, session.version, session.ranks = b"", b"", ()
        elif session.workers.get(peer.rank) is peer:
            del session.workers[peer.rank]
        session.ready = False
        self._leaving.append(peer)
        if not readiness.halves(session) and self._sessions.get(session.key) is session:
            del self._sessions[session.key]
        self.tick(now_s)

    # --- answers -----------------------------------------------------------------------------

    def _registered(self, session: Session, peer: Peer | None = None) -> Registered:
        return Registered(readiness.namespace_hex(session), readiness.save_rules(session, peer))

    def _ready_message(self, session: Session) -> Ready:
        return Ready(
            readiness.namespace_hex(session), list(session.ranks), readiness.save_rules(session)
        )

    def _warn_near_miss(self, session: Session) -> None:
        """Two engines that almost share: almost always a setting that somebody wants to know of."""
        others = {
            f"{other.key.engine_id}/{other.key.instance_id}": facts
            for other in self._sessions.values()
            if other is not session and other.ready and (facts := readiness.identity_of(other))
        }
        miss = nearest_namespace(readiness.identity_of(session), others)
        if miss is not None:
            self._log.warning("no shared hits", engine=session.key.engine_id, text=miss.text)

"""What every stage shares: the services it calls, and the counters of what it declined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry_connector.wire.hot import Error, FromSidecar

from kvferry_sidecar.engines.base import CopyEngine
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.masks.objects import Objects
from kvferry_sidecar.outcomes.ledger import Ledger
from kvferry_sidecar.outcomes.reasons import EXPLANATIONS, Decline, Reason
from kvferry_sidecar.outcomes.tombstones import Tombstones
from kvferry_sidecar.policies import UNBOUNDED, Bounds, Rule, bounds_of
from kvferry_sidecar.sessions.admissions import Admission, Admissions
from kvferry_sidecar.sessions.leases import LeaseTable
from kvferry_sidecar.sessions.model import Peer, Session, SessionKey
from kvferry_sidecar.stages.announce import Announcer
from kvferry_sidecar.stages.behind import WriteBehind
from kvferry_sidecar.stages.breaker import Breaker
from kvferry_sidecar.stages.journal import Journal
from kvferry_sidecar.stages.logs import Log
from kvferry_sidecar.stages.modes import LoadModes
from kvferry_sidecar.stages.outbox import Outbox
from kvferry_sidecar.stages.shadow import Shadows
from kvferry_sidecar.stages.shape import SessionShape, session_shape
from kvferry_sidecar.tiers.host import HostTier, Owner


@dataclass(slots=True)
class Core:
    """Services and tables of the pipeline; owned by the control loop."""

    pool: HostTier
    copies: CopyEngine
    send: Callable[[Peer, FromSidecar], None]
    namespace_of: Callable[[Session, bytes], bytes | None]
    limits: Limits
    modes: LoadModes
    log: Log
    ledger: Ledger
    outbox: Outbox
    tombstones: Tombstones
    admissions: Admissions
    leases: LeaseTable
    journal: Journal
    behind: WriteBehind
    announcer: Announcer
    breaker: Breaker
    shadows: Shadows
    rules: tuple[Rule, ...] = ()  # per namespace
    draining: bool = False
    saves_paused: bool = False
    declines: Counter[Reason] = field(default_factory=Counter)
    skips: Counter[Reason] = field(default_factory=Counter)
    damaged_chunks: int = 0  # dropped with or behind a checksum mismatch
    _shapes: dict[SessionKey, SessionShape] = field(default_factory=dict)

    def bounds_of(self, namespace: bytes) -> Bounds:
        """Return what the rules give a namespace."""
        if not self.rules:
            return UNBOUNDED
        known = self.journal.namespaces.find(namespace)
        facts = known.identity if known is not None else {}
        return bounds_of(self.rules, namespace, facts, self.pool.stats().total_bytes)

    def owner_of(self, namespace: bytes) -> Owner:
        """Return whose a namespace's new objects are."""
        return Owner(namespace, self.bounds_of(namespace).quota_bytes)

    def note_evictions(self) -> None:
        """Room was made in the pool: say whose objects have left it."""
        self.announcer.left(self.pool.take_evicted())

    def closed(self, session: Session) -> Reason | None:
        """Return why lookups of this session find nothing at all, or None."""
        if self.draining:
            return Reason.DRAINING
        if self.shadows.suspects(session):
            return Reason.QUARANTINED
        return None if session.ready else Reason.NOT_READY

    def withheld(
        self,
        session: Session,
        shape: SessionShape,
        admission: Admission,
        wanted: Sequence[Objects],
        span: tuple[int, int],
    ) -> Reason | None:
        """Return why the hit of the tokens ``span`` is not to be loaded, or None."""
        if self.breaker.withholds(session.key, span[1] - span[0]):
            return Reason.SLOWER
        watched = self.shadows.watches(session, shape, admission, wanted)
        return Reason.SHADOW if watched else None

    def shape(self, session: Session) -> SessionShape | None:
        """Return the session's groups and shards; None until every local rank registered."""
        if not session.ready:
            return None
        shape = self._shapes.get(session.key)
        if shape is None:
            shape = session_shape(session)
            if shape is not None:
                self._shapes[session.key] = shape
                self.journal.namespaces.learn(session, shape)
        return shape

    def forget_shape(self, session: Session) -> None:
        """Its ranks changed: work it out again when it is needed."""
        self._shapes.pop(session.key, None)

    def refuse_frame(
        self, peer: Peer, decline: Decline, *, job: int = 0, admission: int = 0
    ) -> None:
        """Answer a message that cannot be taken, and count it."""
        self.declines[decline.reason] += 1
        self.log.warning(
            "message refused",
            reason=str(decline.reason),
            detail=decline.detail,
            engine=peer.session.key.engine_id,
            rank=peer.rank,
        )
        remedy = EXPLANATIONS[decline.reason].remedy
        self.send(peer, Error(str(decline.reason), decline.detail, remedy, job, admission))

"""The stages in order, on one page.

    probe     hashes -> keys -> hint                          stages/probes.py
    stage     keys -> what slower tiers have -> the pool      stages/staging.py, stages/stores.py
    ask       keys -> hit -> lease -> answer                  stages/probes.py
    submit    job -> checks -> part of this rank              stages/jobs.py
      load      lease + tables -> extents (scatter, verified) stages/loads.py
      save      hashes + tables -> slots -> extents (gather)  stages/saves.py
    fence     the engine's step has come                      stages/copying.py
    copy      extents -> copy engine -> result                stages/copying.py
    end       part -> outcome, kept until acknowledged        stages/jobs.py, stages/outbox.py
    settle    all ranks terminal -> commit, abort or release  stages/loads.py, stages/saves.py
    behind    what was committed -> slower tiers              stages/behind.py

Everything happens in the control loop's thread, at a time that is passed in, and leaves through
one callable: the same code runs under a fake clock in tests/sim.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry_connector.wire.attach import Heartbeat
from kvferry_connector.wire.codec import ids_max
from kvferry_connector.wire.hot import (
    Ask,
    Cancel,
    FromHalf,
    FromSidecar,
    JobStatus,
    JobStatusName,
    OutcomeAck,
    Probe,
    Release,
    Submit,
)

from kvferry_sidecar.engines.base import CopyEngine
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.outcomes.ledger import Ledger
from kvferry_sidecar.outcomes.reasons import Decline, Reason
from kvferry_sidecar.outcomes.records import Records
from kvferry_sidecar.outcomes.tombstones import Tombstones
from kvferry_sidecar.policies import Rule
from kvferry_sidecar.sessions.admissions import Admissions
from kvferry_sidecar.sessions.leases import LeaseKey, LeaseTable
from kvferry_sidecar.sessions.model import Peer, Session
from kvferry_sidecar.stages.announce import Announcer
from kvferry_sidecar.stages.behind import WriteBehind
from kvferry_sidecar.stages.breaker import Breaker
from kvferry_sidecar.stages.core import Core
from kvferry_sidecar.stages.jobs import Jobs
from kvferry_sidecar.stages.journal import Journal
from kvferry_sidecar.stages.logs import Log
from kvferry_sidecar.stages.modes import DEFAULT_MODES, LoadModes
from kvferry_sidecar.stages.objects import Objects
from kvferry_sidecar.stages.outbox import Outbox
from kvferry_sidecar.stages.parts import End
from kvferry_sidecar.stages.probes import Probes
from kvferry_sidecar.stages.shadow import Shadows
from kvferry_sidecar.stages.snapshot import PipelineSnapshot
from kvferry_sidecar.stages.stores import StoreDesk, Tier
from kvferry_sidecar.stages.views import (
    GroupView,
    JobView,
    LeaseView,
    group_views,
    job_views,
    lease_views,
)
from kvferry_sidecar.stages.warm import Warmer
from kvferry_sidecar.tiers.host import HostTier

__all__ = ["Pipeline", "PipelineSnapshot"]


def _known_namespace(session: Session, version: bytes) -> bytes | None:
    return session.namespaces.get(version)


def _nothing(_namespace: bytes, _seen: str) -> None:
    """Nobody is told of differences."""


def _ids_of(message: FromHalf) -> int:
    """Return how many ids a message lists: the loop walks them in one turn."""
    if isinstance(message, Release):
        return len(message.admissions)
    return len(message.jobs) if isinstance(message, OutcomeAck) else 0


class Pipeline:
    """Everything that happens to requests and jobs. Owned by the control loop."""

    def __init__(
        self,
        *,
        pool: HostTier,
        copies: CopyEngine,
        send: Callable[[Peer, FromSidecar], None],
        limits: Limits,
        log: Log,
        namespace_of: Callable[[Session, bytes], bytes | None] = _known_namespace,
        tiers: Sequence[Tier] = (),
        modes: LoadModes = DEFAULT_MODES,
        quarantined: Sequence[bytes] = (),
        on_difference: Callable[[bytes, str], None] = _nothing,
        rules: tuple[Rule, ...] = (),
    ) -> None:
        self._stores = StoreDesk(tiers, limits, log)
        self._core = Core(
            pool=pool,
            copies=copies,
            send=send,
            namespace_of=namespace_of,
            limits=limits,
            modes=modes,
            log=log,
            ledger=Ledger(limits.sessions_max),
            outbox=Outbox(send, limits.outcome_resend_ms, limits.messages_per_turn_max),
            tombstones=Tombstones(limits.tombstones_max),
            admissions=Admissions(limits.admissions_max, limits.key_bytes_max),
            leases=LeaseTable(pool.release, limits.lease_idle_ms_max),
            journal=Journal(pool, limits),
            breaker=Breaker(enabled=modes.breaker),
            shadows=Shadows(pool, modes.shadow_percent, quarantined, on_difference),
            behind=WriteBehind(pool, self._stores, limits),
            announcer=Announcer(send, limits.announced_keys_max),
            rules=rules,
        )
        self.objects = Objects(self._core, self._stores)
        self.warmer = Warmer(self._core, self._stores)
        self._probes = Probes(self._core, self._stores)
        self._jobs = Jobs(self._core)
        self._sweep_at_s = 0.0
        self._drain_end_s = math.inf
        self._violations: list[str] = []

    # --- what halves say ----------------------------------------------------------------------

    def on_message(self, peer: Peer, message: FromHalf, raw: list[bytes], now_s: float) -> None:
        """Handle one hot message of a live peer whose epoch and generation were checked."""
        if isinstance(message, Probe | Ask | Release) and peer.role != "scheduler":
            what = f"a rank sent {type(message).__name__}"
            self._core.refuse_frame(peer, Decline(Reason.ROLE, what))
            return
        named = _ids_of(message)
        if named > ids_max:
            what = f"{named} ids in one {type(message).__name__}; at most {ids_max}"
            self._core.refuse_frame(peer, Decline(Reason.FRAMES, what))
            return
        match message:
            case Probe():
                self._probes.on_probe(peer, message, raw, now_s)
            case Ask():
                self._probes.on_ask(peer, message, now_s)
            case Release():
                self._probes.on_release(peer, message, now_s)
                for admission in message.admissions:
                    self._core.shadows.drop(LeaseKey(peer.session.life, admission))
            case Submit():
                self._jobs.on_submit(peer, message, raw, now_s)
            case Cancel():
                self._jobs.on_cancel(peer, message, now_s)
            case JobStatus():
                self._jobs.on_status(peer, message, now_s)
            case OutcomeAck():
                self._jobs.on_acknowledged(peer, message)

    def on_beat(self, peer: Peer, beat: Heartbeat, now_s: float) -> None:
        """Compare the leases a scheduler half still counts on with what is held for it.

        A worker half acknowledges here what no later message of its own did.
        """
        if beat.acks:
            jobs = beat.acks[:ids_max]
            self._jobs.on_acknowledged(peer, OutcomeAck(jobs))
        self._probes.on_beat(peer, beat, now_s)

    # --- what becomes of halves ---------------------------------------------------------------

    def on_session_ready(self, session: Session, now_s: float) -> None:  # noqa: ARG002 - one form
        """All local ranks are registered (again): work out groups and shards anew."""
        self._core.forget_shape(session)
        self._core.shape(session)  # a pool may be warmed before the first request

    def on_version(self, session: Session, now_s: float) -> None:  # noqa: ARG002 - one form
        """The version rotated: old admissions hit nothing any more; leases and jobs drain."""
        self._core.log.info("namespace version rotated", engine=session.key.engine_id)
        if (shape := self._core.shape(session)) is not None:
            self._core.journal.namespaces.learn(session, shape)

    def on_peer_dead(self, peer: Peer, now_s: float) -> None:
        """The half's process is proven dead."""
        self._gone(peer, Reason.PEER_DEAD, now_s)

    def on_bye(self, peer: Peer, now_s: float) -> None:
        """The half left in order; by its word nothing of it is in flight."""
        self._gone(peer, Reason.PEER_LEFT, now_s)

    def _gone(self, peer: Peer, reason: Reason, now_s: float) -> None:
        if peer.role == "scheduler":
            self._core.announcer.gone(peer)
            self._probes.on_gone(peer, now_s)
            self._core.shadows.drop_life(peer.session.life)
        else:
            self._jobs.on_gone(peer, reason, now_s)
        self._core.forget_shape(peer.session)  # last: settling jobs asks for it

    # --- what time and copies bring -----------------------------------------------------------

    def on_copies(self, now_s: float) -> None:
        """The copy engine announced results."""
        self._jobs.desk.collect(now_s)

    def on_stores(self, now_s: float) -> None:
        """Calls into slower tiers have returned."""
        self._stores.collect(now_s)

    def on_tick(self, now_s: float) -> float:
        """Read fences, and now and then the deadlines; returns seconds until wanted again."""
        return min(self._jobs_tick(now_s), self._tiers_tick(now_s), self.objects.tick(now_s))

    def _tiers_tick(self, now_s: float) -> float:
        staging_s = self._probes.staging.tick(now_s)
        self._core.behind.pump(now_s)
        self.warmer.pump(now_s)
        stores_s = self._stores.tick(now_s)
        return stores_s if staging_s is None else min(staging_s, stores_s)

    def _jobs_tick(self, now_s: float) -> float:
        self._jobs.desk.poll_fences(now_s)
        if now_s >= self._sweep_at_s:
            self._sweep(now_s)
            self._sweep_at_s = now_s + self._core.limits.sweep_ms / 1e3
        fence_s = self._jobs.desk.fence_wait_s(now_s)
        if fence_s is not None:
            return fence_s
        # Without an open job nothing has a deadline but what is kept for halves.
        kept = min(self._core.outbox.due_s(), self._core.leases.due_s())
        due_s = self._sweep_at_s if self._jobs.open_runs() else max(self._sweep_at_s, kept)
        return max(0.0, due_s - now_s)

    def _sweep(self, now_s: float) -> None:
        self._jobs.desk.sweep(now_s)
        self._jobs.sweep(now_s)
        self._core.leases.drop_idle(now_s)
        self._core.outbox.resend(now_s)
        if now_s >= self._drain_end_s:
            self._jobs.stop_all(End(JobStatusName.FAILED, Reason.DRAINED), now_s)
        if not self._jobs.open_parts() and not self._violations:
            self._violations = self._core.ledger.audit()
            for violation in self._violations:
                self._core.log.error("ledger", violation=violation)

    # --- the whole ----------------------------------------------------------------------------

    def busy(self, session: Session) -> bool:
        """Whether this session's memory is, or may still be, touched by a copy."""
        return self._jobs.touches(session)

    def set_limits(self, limits: Limits) -> None:
        """Other bounds from now on; those in config.HOT take effect."""
        self._core.limits = limits
        self._jobs.desk.limits = limits

    def set_breaker(self, *, enabled: bool) -> None:
        """Whether hits that would lose are withheld, from now on; what was measured is kept."""
        self._core.breaker.enabled = enabled

    def set_rules(self, rules: tuple[Rule, ...]) -> None:
        """Other rules per namespace from now on; a quota counts with the next object stored."""
        self._core.rules = rules

    def drain(self, now_s: float) -> None:
        """No new leases and saves; what is in flight ends, at the latest by drain_ms_max."""
        if not self._core.draining:
            self._core.draining = True
            self._drain_end_s = now_s + self._core.limits.drain_ms_max / 1e3

    def drained(self) -> bool:
        """Whether no job, no unacknowledged outcome and no promised load is left.

        Nor anything to be written to a tier that takes it; a call that hangs is not waited for.
        """
        return not self.left()

    def left(self) -> int:
        """How many things a drain waits for: jobs, outcomes, leases, asks, writes, calls."""
        core, desk = self._core, self._stores
        held = len(core.outbox) + len(core.leases) + self._probes.staging.held()
        return self._jobs.open_runs() + held + core.behind.waiting() + desk.calls_in_time()

    def pause_saves(self, *, paused: bool) -> None:
        """Refuse new saves from now on, or take them again; loads and open jobs go on."""
        self._core.saves_paused = paused

    def backlog(self) -> int:
        """Objects that are still to be written to slower tiers."""
        return sum(self._core.behind.backlog().values())

    def flush(self, now_s: float, *, count_only: bool) -> dict[str, int]:
        """Try paused tiers at once; return how many objects still wait for each tier."""
        if not count_only:
            self._stores.try_again(now_s)
        return self._core.behind.backlog()

    @property
    def records(self) -> Records:
        """What became of the last requests. Read only; its records may be read by any thread."""
        return self._core.journal.records

    def jobs(self, now_s: float) -> list[JobView]:
        """What is open, oldest first."""
        return job_views(self._jobs.runs(), now_s)

    def leases(self, now_s: float) -> list[LeaseView]:
        """What is leased, least recently confirmed first."""
        return lease_views(self._core.leases.all(), self.records, now_s)

    def groups(self, session: Session, total_tokens: int) -> list[GroupView]:
        """What a hit of this length needs of each group; none while a rank is missing."""
        shape = self._core.shape(session)
        return [] if shape is None else group_views(shape, total_tokens)

    def drop_stale_leases(self, idle_s: float, now_s: float, *, count_only: bool) -> int:
        """Drop leases that no job owns and nothing confirmed for ``idle_s``."""
        return self._core.leases.drop_stale(idle_s, now_s, count_only=count_only)

    def clear_pool(self) -> int:
        """Drop every object that is neither leased nor being written; return how many."""
        self._core.announcer.emptied()
        return self._core.pool.clear()

    def check(self) -> list[str]:
        """All violations, the pool's included: for tests and for the idle sidecar."""
        core = self._core
        return [
            *core.ledger.integrity(self._jobs.open_parts().keys()),
            *core.admissions.check(),
            *self._jobs.desk.check(),
            *self._stores.check(),
            *self._probes.staging.check(),
            *core.pool.check(),
        ]

    def snapshot(self, now_s: float = 0.0) -> PipelineSnapshot:
        """Return a reading of everything that is counted here; ``now_s`` gives ages."""
        core, lookups, ledger = self._core, self._probes.counters, self._core.ledger
        kinds = Counter(part.run.work.kind for part in self._jobs.open_parts().values())
        return PipelineSnapshot(
            draining=core.draining,
            saves_paused=core.saves_paused,
            jobs_open={"load": kinds["load"], "save": kinds["save"]},
            leases=len(core.leases),
            leased_entries=core.leases.entry_count(),
            admissions=core.admissions.count(),
            key_bytes=core.admissions.key_bytes,
            outcomes_unacked=len(core.outbox),
            tombstones=core.tombstones.count(),
            ledger=ledger.totals(),
            sessions=ledger.sessions(),
            outcomes_resent=core.outbox.resent,
            probes=lookups.probes,
            asks=lookups.asks,
            need_full=lookups.need_full,
            hit_requests=lookups.hit_requests,
            missed_requests=lookups.missed_requests,
            hit_tokens=lookups.hit_tokens,
            missed_tokens=lookups.missed_tokens,
            local_requests=lookups.local_requests,
            declines={str(reason): count for reason, count in core.declines.items()},
            skips={str(reason): count for reason, count in core.skips.items()},
            idle_falls=core.leases.idle_falls,
            beat_falls=core.leases.beat_falls,
            admissions_dropped=core.admissions.dropped,
            tombstone_collapses=core.tombstones.collapses,
            damaged_chunks=core.damaged_chunks,
            breaker=core.breaker.reading(),
            shadow=core.shadows.reading(),
            residence_seconds=core.pool.residence(),
            violations=list(self._violations),
            queues=self._jobs.desk.queues(),
            oldest_job_s=self._jobs.oldest_s(now_s),
            ends=ledger.ends(),
            stage_seconds=ledger.stage_seconds(),
            part_bytes=ledger.part_bytes(),
            journal=core.journal.reading(),
            tiers=self._stores.snapshots(),
            staging=dict(self._probes.staging.counts),
            stage_in_seconds=self._probes.staging.seconds(),
        )

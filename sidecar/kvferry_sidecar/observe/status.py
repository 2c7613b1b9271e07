"""The status document: what `kvferry status` shows and `--json` prints.

``format`` grows when a field changes its meaning; fields are only added. ``pipeline`` and ``loop``
are the snapshots of those parts as they are: readers take from them what they know. The document
is bounded, because it travels in one attach message.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import msgspec
from kvferry_connector.wire.attach import RegisterEngine, attach_bytes_max
from kvferry_native import Mapping as Mapped
from kvferry_native import PoolStats

from kvferry_sidecar.engines.base import GpuUse
from kvferry_sidecar.geometry.device import DeviceMemory
from kvferry_sidecar.geometry.identity import nearest_namespace
from kvferry_sidecar.observe.log import bounded
from kvferry_sidecar.observe.progress import WorkStatus
from kvferry_sidecar.observe.shapes import GeometryStatus, geometry_status
from kvferry_sidecar.sessions.model import Peer, Session

STATUS_FORMAT = 1
document_bytes_max = attach_bytes_max - (64 << 10)  # the message around it is small
identity_facts_max = 64  # shown per session


class HalfStatus(msgspec.Struct, frozen=True):
    """One half of an engine. ``beat_age_s``: seconds since its last heartbeat.

    ``message_age_s``: since its last message about a request or job; None: there was none.
    """

    role: str
    rank: int
    generation: int
    pid: int
    protocol: int
    connected: bool
    registered: bool
    beat_age_s: float
    serial: int = 0
    memory_bytes: int = 0
    payload_bytes: list[int] = []  # this rank's shard of one chunk, per group
    memory: str = ""  # where its KV memory is: "shared memory", "GPU 0"
    message_age_s: float | None = None
    position: list[int] = []  # tensor, pipeline and decode context parallel rank
    host: str = ""  # its pod's name, as a rule
    dp_rank: int = 0  # its engine's, among data-parallel ones


class SessionStatus(msgspec.Struct, frozen=True):
    """One engine. ``notes``: why it shares nothing with a session it nearly equals."""

    engine_id: str
    instance_id: str
    ready: bool
    ranks: list[int]
    namespace: str
    block_tokens: list[int]  # per group
    save_rules: list[str]  # per group
    halves: list[HalfStatus]
    identity: dict[str, str]
    notes: list[str] = []
    load_failure_policy: str = ""
    geometry: GeometryStatus | None = None  # once every local rank registered


class PoolStatus(msgspec.Struct, frozen=True):
    """The host pool's counters (kvferry_native.PoolStats)."""

    total_bytes: int
    used_bytes: int
    ready: int
    writing: int
    doomed: int
    leased: int
    keys_max: int
    evictions: int
    dropped_before_reuse: int
    slabs: int
    slabs_free: int
    quota_evictions: int = 0
    pinned_soft: int = 0
    pinned_hard: int = 0
    pinned_hard_bytes: int = 0


class TracesStatus(msgspec.Struct, frozen=True):
    """Where traces go. ``counts``: sent, failed, not_kept; ``error``: why the last were lost."""

    endpoint: str
    error: str
    counts: dict[str, int]


class Document(msgspec.Struct, frozen=True):
    """Everything. ``epoch`` is hexadecimal: JSON readers lose 64-bit numbers."""

    format: int
    kvferry: str
    epoch: str
    pid: int
    sessions: list[SessionStatus]
    pool: PoolStatus | None
    pipeline: Any
    loop: Any
    config: Any
    sessions_left_out: int = 0  # the document was at its bound without them
    state: str = ""  # ready, degraded or draining
    uptime_s: float = 0.0
    degraded: Mapping[str, str] = {}  # what is not well
    traces: TracesStatus | None = None  # None: off
    gpus: list[GpuUse] = []  # those that are used
    progress: list[WorkStatus] = []  # long work that is under way
    ended: list[WorkStatus] = []  # long work that ended last, oldest first


def document(  # noqa: PLR0917 - one caller; the order is the document's
    epoch: int,
    sessions: Iterable[Session],
    pipeline_snapshot: object,
    pool_stats: PoolStats | None,
    loop_stats: object,
    config_view: Mapping[str, object],
    now_s: float | None = None,
) -> Document:
    """Return the document.

    The snapshots may be anything msgspec encodes. ``now_s`` is the clock of the peers'
    ``last_beat_s`` (time.monotonic() by default).
    """
    now = time.monotonic() if now_s is None else now_s
    return Document(
        format=STATUS_FORMAT,
        kvferry=version("kvferry"),
        epoch=f"{epoch:016x}",
        pid=os.getpid(),
        sessions=_sessions(list(sessions), now),
        pool=None if pool_stats is None else _pool(pool_stats),
        pipeline=pipeline_snapshot,
        loop=loop_stats,
        config=config_view,
    )


def encode(document: Document) -> bytes:
    """Return the document as JSON, at most document_bytes_max long."""
    body = msgspec.json.encode(document)
    if len(body) > document_bytes_max:
        left_out = len(document.sessions)
        document = msgspec.structs.replace(document, sessions=[], sessions_left_out=left_out)
        body = msgspec.json.encode(document)
    if len(body) > document_bytes_max:
        body = msgspec.json.encode(msgspec.structs.replace(document, pipeline=None))
    return body


def read(body: bytes) -> Document:
    """Return the document. Raises msgspec.DecodeError when it is none this version reads."""
    return msgspec.json.decode(body, type=Document)


def session_name(session: Session) -> str:
    """Return a session's name for people."""
    return bounded(f"{session.key.engine_id}/{session.key.instance_id}")


def near_misses(sessions: Iterable[Session]) -> dict[str, str]:
    """Return, by session name, why a session shares nothing with one it nearly equals."""
    distinct: dict[tuple[tuple[str, str], ...], str] = {}  # one session stands for its equals
    members: dict[str, tuple[tuple[str, str], ...]] = {}
    for session in sessions:
        if facts := tuple(sorted(_identity(session).items())):
            members[session_name(session)] = facts
            distinct.setdefault(facts, session_name(session))
    others = {name: dict(facts) for facts, name in distinct.items()}
    notes = {
        facts: near.text for facts in distinct if (near := nearest_namespace(dict(facts), others))
    }
    return {name: notes[facts] for name, facts in members.items() if facts in notes}


def _sessions(sessions: list[Session], now_s: float) -> list[SessionStatus]:
    notes = near_misses(sessions)
    return [_session(session, notes.get(session_name(session)), now_s) for session in sessions]


def _session(session: Session, note: str | None, now_s: float) -> SessionStatus:
    workers = [session.workers[rank] for rank in sorted(session.workers)]
    halves = [session.scheduler, *workers] if session.scheduler else workers
    geometry = next((worker.geometry for worker in workers if worker.geometry), None)
    groups = geometry.groups if geometry else ()
    facts = sorted(_identity(session).items())[:identity_facts_max]
    namespace = session.namespaces.get(session.version, b"")
    engine = session.scheduler.registration if session.scheduler else None
    policy = engine.load_failure_policy if isinstance(engine, RegisterEngine) else ""
    return SessionStatus(
        engine_id=bounded(session.key.engine_id),
        instance_id=bounded(session.key.instance_id),
        ready=session.ready,
        ranks=list(session.ranks),
        namespace=namespace.hex(),
        block_tokens=[group.block_tokens for group in groups],
        save_rules=[group.save_rule for group in groups],
        halves=[_half(peer, now_s) for peer in halves],
        identity={bounded(name): bounded(value) for name, value in facts},
        notes=[note] if note else [],
        load_failure_policy=policy,
        geometry=geometry_status(session),
    )


def _half(peer: Peer, now_s: float) -> HalfStatus:
    geometry = peer.geometry
    return HalfStatus(
        role=peer.role,
        rank=peer.rank,
        generation=peer.generation,
        pid=peer.pid,
        protocol=peer.protocol,
        connected=peer.connected,
        registered=peer.registration is not None,
        beat_age_s=round(max(now_s - peer.last_beat_s, 0.0), 3) if peer.last_beat_s else 0.0,
        serial=geometry.serial if geometry else 0,
        memory_bytes=sum(memory.total_bytes for memory in peer.memories.values()),
        payload_bytes=[group.payload_bytes for group in geometry.groups] if geometry else [],
        message_age_s=(
            round(max(now_s - peer.last_message_s, 0.0), 3) if peer.last_message_s else None
        ),
        position=list(geometry.position) if geometry else [],
        host=bounded(peer.host),
        dp_rank=peer.dp_rank,
        memory=", ".join(sorted({_place(memory) for memory in peer.memories.values()})),
    )


def _place(memory: Mapped | DeviceMemory) -> str:
    return f"GPU {memory.ordinal}" if isinstance(memory, DeviceMemory) else "shared memory"


def _pool(stats: PoolStats) -> PoolStatus:
    return PoolStatus(
        total_bytes=stats.total_bytes,
        used_bytes=stats.used_bytes,
        ready=stats.ready,
        writing=stats.writing,
        doomed=stats.doomed,
        leased=stats.leased,
        keys_max=stats.keys_max,
        evictions=stats.evictions,
        dropped_before_reuse=stats.dropped_before_reuse,
        slabs=stats.slabs,
        slabs_free=stats.slabs_free,
        quota_evictions=stats.quota_evictions,
        pinned_soft=stats.pinned_soft,
        pinned_hard=stats.pinned_hard,
        pinned_hard_bytes=stats.pinned_hard_bytes,
    )


def _identity(session: Session) -> dict[str, str]:
    """Return the identity facts all ranks of a session agree on; empty before the first."""
    for worker in session.workers.values():
        if worker.geometry:
            return worker.geometry.identity
    return {}

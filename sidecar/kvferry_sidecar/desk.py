"""What operators may ask and do. Every method runs in the control loop's thread.

`status` on the attach socket and HTTP (by the mailbox) both come here, so they cannot disagree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.doctor.finding import Finding
from kvferry_sidecar.engines.base import GpuUse
from kvferry_sidecar.errors import RequestError
from kvferry_sidecar.faults.kit import FaultKit
from kvferry_sidecar.loop import Loop, Timed
from kvferry_sidecar.observe import log as logs
from kvferry_sidecar.observe import status
from kvferry_sidecar.observe.progress import Progress, countdown
from kvferry_sidecar.observe.reading import LoopView, Reading
from kvferry_sidecar.observe.status import Document, TracesStatus
from kvferry_sidecar.observe.traces import Traces
from kvferry_sidecar.outcomes.records import Record
from kvferry_sidecar.pipeline import Pipeline
from kvferry_sidecar.reload import Drift, Reloader
from kvferry_sidecar.sessions.attach import AttachServer
from kvferry_sidecar.sessions.registry import Registry
from kvferry_sidecar.stages.objects import Changed, Filter, NamespaceView, ObjectsPage, PinName
from kvferry_sidecar.stages.objects import Tiers as WhichTiers
from kvferry_sidecar.stages.snapshot import PipelineSnapshot
from kvferry_sidecar.stages.views import GroupView, JobView, LeaseView
from kvferry_sidecar.stages.warm import Wanted, WarmReading
from kvferry_sidecar.tiers.host import HostTier
from kvferry_sidecar.tiers.store import Listed
from kvferry_sidecar.transport import Transport


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that are read."""

    loop: Loop
    registry: Registry
    pipeline: Pipeline
    pool: HostTier
    attach: AttachServer
    transport: Transport
    copied: Timed


_Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
_Place = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class ReleaseStale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Drop leases that no job owns and that nothing confirmed for ``idle_s``."""

    idle_s: Annotated[float, msgspec.Meta(ge=0.0)] = 5.0
    dry_run: bool = False


class LogLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Change what is logged, until the next reload of the configuration."""

    level: Literal["debug", "info", "warning", "error"]
    dry_run: bool = False


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replace the rules of the fault kit, or only list them (null): docs/faults.md."""

    rules: str | None = None
    dry_run: bool = False


class PinObjects(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pin the objects that fit, on the page of the pool that begins at ``first``."""

    pin: PinName
    fits: Filter
    first: _Place = 0
    dry_run: bool = False


class DropObjects(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forget the objects that fit, on the page of the pool that begins at ``first``."""

    fits: Filter
    tiers: WhichTiers = "host"
    first: _Place = 0
    dry_run: bool = False


class Evict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Evict the coldest objects until at most ``to_percent`` of the pool is used."""

    to_percent: Annotated[int, msgspec.Meta(ge=0, le=100)]
    dry_run: bool = False


class Warm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bring these objects from slower tiers into the pool: (namespace, group, key) in hex."""

    objects: Annotated[list[tuple[_Hex32, _Place, _Hex32]], msgspec.Meta(max_length=1000)]
    dry_run: bool = False


class Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An action without parameters."""

    dry_run: bool = False


ACTIONS: Mapping[str, type[msgspec.Struct]] = {
    "drain": Plain,
    "clear-pool": Plain,
    "release-stale": ReleaseStale,
    "log-level": LogLevel,
    "faults": Faults,
    "reload": Plain,
    "pause-saves": Plain,
    "resume-saves": Plain,
    "flush": Plain,
    "pin-objects": PinObjects,
    "drop-objects": DropObjects,
    "evict": Evict,
    "warm": Warm,
}
SAVES = "saves"  # degraded while an operator has paused them


class Desk:
    """``drain`` is the composition root's; the rest is read from ``parts``."""

    def __init__(
        self,
        parts: Parts,
        *,
        epoch: int,
        reloader: Reloader,
        lines: logs.Lines,
        degraded: MutableMapping[str, str],
        findings: Sequence[Finding],
        drain: Callable[[float], None],
        faults: FaultKit,
        progress: Progress,
        gpus: Callable[[], list[GpuUse]],
        traces: Traces | None = None,
        log: Log,
    ) -> None:
        self._parts = parts
        self._epoch = epoch
        self._reloader = reloader
        self._lines = lines
        self._degraded = degraded
        self._findings = tuple(findings)
        self._drain = drain
        self._faults = faults
        self._progress = progress
        self._told = (-1.0, b"")
        self._gpus = gpus
        self._traces = traces
        self._log = log
        self._started_s = time.time()
        self._began_s = time.monotonic()

    # --- questions ----------------------------------------------------------------------------

    def reading(self, now_s: float) -> Reading:
        """Return a reading of everything, as it is now."""
        parts = self._parts
        view = self._loop_view()
        snapshot = parts.pipeline.snapshot(now_s)
        return Reading(
            document=self._document(snapshot, view, now_s),
            pipeline=snapshot,
            loop=view,
            taken_s=now_s,
            started_s=self._started_s,
            findings=self._findings,
            traces=self._traces.reading() if self._traces is not None else None,
        )

    def status(self, turn_s: float) -> bytes:
        """Return the status document as JSON: one for all who ask within a turn of the loop.

        It costs a millisecond, and one read of a stream may bring ten thousand questions.
        """
        if self._told[0] != turn_s:
            self._told = (turn_s, status.encode(self.reading(turn_s).document))
        return self._told[1]

    def records(self, _now_s: float) -> tuple[Record, ...]:
        """Return the last requests, oldest first."""
        return self._parts.pipeline.records.all()

    def jobs(self, now_s: float) -> list[JobView]:
        """Return what is open."""
        return self._parts.pipeline.jobs(now_s)

    def leases(self, now_s: float) -> list[LeaseView]:
        """Return what is leased."""
        return self._parts.pipeline.leases(now_s)

    def groups(self, engine: str, total_tokens: int) -> list[GroupView]:
        """Return what a hit of this length needs of each group. Raises RequestError."""
        for session in self._parts.registry.sessions:
            if "/".join(session.key) == engine:
                return self._parts.pipeline.groups(session, total_tokens)
        raise RequestError(f"no engine {engine!r} is attached", "see /api/v1/sessions")

    def namespaces(self) -> list[NamespaceView]:
        """Return what every namespace has in the pool."""
        return self._parts.pipeline.objects.namespaces()

    def warming(self) -> WarmReading:
        """Return how `kvferry warm` goes."""
        return self._parts.pipeline.warmer.reading()

    def objects(self, wanted: Filter, first: int, most: int) -> ObjectsPage:
        """Return objects of one page of the pool."""
        return self._parts.pipeline.objects.page(wanted, first, most)

    def on_disk(
        self, name: str, after: bytes, most: int, now_s: float
    ) -> Future[tuple[Listed, ...]]:
        """Ask a disk for its objects behind the key ``after``. Raises RequestError."""
        return self._parts.pipeline.objects.on_disk(name, after, most, now_s)

    def events(self) -> list[Mapping[str, object]]:
        """Return the last events of the log, oldest first. Any thread may ask."""
        return list(self._lines.recent.copy())

    def drift(self) -> Drift:
        """Return where the settings in effect are not those on disk. Any thread may ask."""
        return self._reloader.drift()

    def settings(self) -> list[tuple[str, str, str]]:
        """Return (key, value, origin) of every setting. Any thread may ask."""
        return self._reloader.loaded.rows()

    # --- actions ------------------------------------------------------------------------------

    def act(self, name: str, body: bytes, now_s: float) -> dict[str, object]:
        """Carry out one action, or say what it would do. Raises RequestError."""
        wanted = parameters(name, body)
        dry_run: bool = getattr(wanted, "dry_run")  # noqa: B009 - every action has it
        did = self._acted(name, wanted, dry_run, now_s)
        if not dry_run:
            self._log.info("action", action=name, **did)
        return {"action": name, "dry_run": dry_run, **did}

    def _acted(
        self, name: str, wanted: msgspec.Struct, dry_run: bool, now_s: float
    ) -> dict[str, object]:
        parts = self._parts
        if isinstance(wanted, ReleaseStale):
            dropped = parts.pipeline.drop_stale_leases(wanted.idle_s, now_s, count_only=dry_run)
            return {"leases": dropped}
        if isinstance(wanted, Warm):
            return self._warm(wanted, now_s)
        if isinstance(wanted, Evict):
            return self._evict(wanted)
        if isinstance(wanted, PinObjects | DropObjects):
            return msgspec.structs.asdict(self._change(wanted, now_s))
        if isinstance(wanted, Faults):
            rules = self._faults.act(wanted.rules, dry_run=dry_run)
            return {"rules": msgspec.to_builtins(rules)}
        if isinstance(wanted, LogLevel):
            if not dry_run:
                logs.set_level(wanted.level)
            return {"level": wanted.level}
        if name == "reload":
            return self._reloader.reload(dry_run)
        if name in ("pause-saves", "resume-saves"):
            return self._pause(dry_run, paused=name == "pause-saves")
        if name == "flush":
            return self._flush(dry_run, now_s)
        if name == "clear-pool":
            stats = parts.pool.stats()
            free = stats.ready - stats.leased if dry_run else parts.pipeline.clear_pool()
            return {"objects": max(0, free)}
        snapshot = parts.pipeline.snapshot(now_s)
        if not dry_run:
            self._drain(now_s)
        return {"jobs_open": sum(snapshot.jobs_open.values()), "leases": snapshot.leases}

    def _pause(self, dry_run: bool, *, paused: bool) -> dict[str, object]:
        if not dry_run:
            self._parts.pipeline.pause_saves(paused=paused)
            self._degraded.pop(SAVES, None)
            if paused:
                self._degraded[SAVES] = "paused by an operator: kvferry act resume-saves"
        return {"saves_open": self._parts.pipeline.snapshot().jobs_open["save"]}

    def _flush(self, dry_run: bool, now_s: float) -> dict[str, object]:
        """Say what waits to be written on, have paused tiers tried at once, and watch it go."""
        pipeline = self._parts.pipeline
        waiting = pipeline.flush(now_s, count_only=dry_run)
        total = sum(waiting.values())
        if total and not dry_run:
            self._progress.begin("write-behind", "objects", countdown(total, pipeline.backlog))
        return {"waiting": waiting}

    def _warm(self, wanted: Warm, now_s: float) -> dict[str, object]:
        warmer = self._parts.pipeline.warmer
        objects = [
            Wanted(bytes.fromhex(namespace), group, bytes.fromhex(key))
            for namespace, group, key in wanted.objects
        ]
        taken = warmer.add(objects, now_s, dry_run=wanted.dry_run)
        if not wanted.dry_run and warmer.waiting():
            self._progress.begin("warm", "objects", countdown(warmer.waiting(), warmer.waiting))
        return msgspec.structs.asdict(taken)

    def _evict(self, wanted: Evict) -> dict[str, object]:
        objects = self._parts.pipeline.objects
        over_bytes = objects.evict(wanted.to_percent, dry_run=wanted.dry_run)
        if over_bytes and not wanted.dry_run:
            self._progress.begin("evict", "bytes", countdown(over_bytes, objects.over_bytes))
        return {"bytes": over_bytes}

    def _change(self, wanted: PinObjects | DropObjects, now_s: float) -> Changed:
        objects, dry_run = self._parts.pipeline.objects, wanted.dry_run
        if isinstance(wanted, PinObjects):
            return objects.pin(wanted.fits, wanted.pin, wanted.first, dry_run=dry_run)
        return objects.drop(wanted.fits, wanted.tiers, wanted.first, now_s, dry_run=dry_run)

    # --- reading ------------------------------------------------------------------------------

    def _document(self, snapshot: PipelineSnapshot, view: LoopView, now_s: float) -> Document:
        document = status.document(
            self._epoch,
            self._parts.registry.sessions,
            snapshot,
            self._parts.pool.stats(),
            view,
            msgspec.to_builtins(self._reloader.loaded.config, enc_hook=str),
            now_s,
        )
        return msgspec.structs.replace(
            document,
            state=state_of(snapshot.draining, self._degraded),
            uptime_s=now_s - self._began_s,
            degraded=dict(self._degraded),
            traces=self._traces_status(),
            gpus=self._gpus(),
            progress=self._progress.reading(),
            ended=self._progress.ended(),
        )

    def _traces_status(self) -> TracesStatus | None:
        if self._traces is None:
            return None
        reading = self._traces.reading()
        return TracesStatus(reading.endpoint, reading.error, dict(reading.counts))

    def _loop_view(self) -> LoopView:
        parts, stats = self._parts, self._parts.loop.stats()
        return LoopView(
            turns=stats.turns,
            longest_turn_s=stats.longest_turn_s,
            handler_errors=stats.handler_errors,
            connections=parts.attach.connections,
            leaving_halves=parts.registry.leaving,
            attach_refused=dict(parts.attach.counters),
            frames_refused=dict(parts.transport.counters),
            log_lines_lost=self._lines.lost,
            turn_seconds=stats.turn_seconds,
            message_seconds=parts.transport.seconds() | {"Copied": parts.copied.reading()},
        )


def state_of(draining: bool, degraded: Mapping[str, str]) -> str:
    """Return the one word for a sidecar's state."""
    return "draining" if draining else "degraded" if degraded else "ready"


def parameters(name: str, body: bytes) -> msgspec.Struct:
    """Return the parameters of an action. Raises RequestError."""
    kind: type[Any] | None = ACTIONS.get(name)
    if kind is None:
        raise RequestError(f"there is no action {name!r}", f"one of {', '.join(ACTIONS)}")
    try:
        wanted: msgspec.Struct = msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise RequestError(
            f"{name}: {error}", f"send {', '.join(kind.__struct_fields__)}"
        ) from error
    return wanted

"""The composition root: everything is built here, in one order, and closed in the reverse one.

The lock comes before anything is bound or mapped, the sockets come last: whoever can connect finds
a sidecar that is complete.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import secrets
import signal
import sys
from collections.abc import Callable

import zmq
from kvferry_connector.wire.attach import Memory as AttachedMemory
from kvferry_connector.wire.attach import ToPeer
from kvferry_connector.wire.hot import FromSidecar
from kvferry_connector.wire.names import attach_path, control_endpoint
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar import locks, policies, threads
from kvferry_sidecar.config import Config, Loaded
from kvferry_sidecar.descriptors import raise_descriptor_limit
from kvferry_sidecar.desk import Desk, Parts
from kvferry_sidecar.doctor import report
from kvferry_sidecar.engines.base import CopyEngine, PoolSpan
from kvferry_sidecar.engines.cuda import GpuOptions
from kvferry_sidecar.engines.several import SeveralCopyEngines
from kvferry_sidecar.errors import ExitCode
from kvferry_sidecar.faults.kit import FaultKit
from kvferry_sidecar.front import Front
from kvferry_sidecar.geometry.device import DeviceMemory
from kvferry_sidecar.geometry.validate import validate_rank
from kvferry_sidecar.heap import keep_freed_pages
from kvferry_sidecar.keys.namespace import namespace_digest
from kvferry_sidecar.loop import READ, Loop, Signals, Timed, wait_s_max
from kvferry_sidecar.observe import log as logs
from kvferry_sidecar.observe.progress import Progress, countdown
from kvferry_sidecar.pipeline import Pipeline
from kvferry_sidecar.placement import placement, with_memory, with_threads
from kvferry_sidecar.quarantine import Quarantine
from kvferry_sidecar.reload import Reloader
from kvferry_sidecar.sessions import tenants
from kvferry_sidecar.sessions.attach import AttachServer
from kvferry_sidecar.sessions.liveness import Liveness
from kvferry_sidecar.sessions.model import Peer
from kvferry_sidecar.sessions.registry import Registry
from kvferry_sidecar.stages.stores import Tier
from kvferry_sidecar.tiers.segment import PoolSegment, held_bytes, open_pool, segment_path
from kvferry_sidecar.tiers.slow import SlowTiers
from kvferry_sidecar.tiers.store import Memory
from kvferry_sidecar.transport import Transport

socket_check_s = 1.0  # how often the files of the sockets are looked at
drain_grace_s = 1.0  # for the last outcomes to be taken after the pipeline ended its jobs
# How long another thread (HTTP, a store's) may keep the interpreter while the loop wants it.
# Python's own 5 ms would show in the time of a lookup.
thread_switch_s = 0.0005


def run(loaded: Loaded, read: Callable[[], Loaded]) -> int:
    """Serve until a signal; returns the exit code. Raises KvferryError when it cannot start.

    ``read`` reads the configuration again, as ``loaded`` was read.
    """
    sys.setswitchinterval(thread_switch_s)
    faulthandler.enable(2)  # last words of a crash, on stderr: a mapped file cut off, a bug
    keep_freed_pages()
    threads.check(loaded.config)
    lines = logs.configure(loaded.config.log.level, loaded.config.log.format)
    with contextlib.ExitStack() as stack:
        stack.callback(lines.flush)
        return App(loaded, read, logs.get_logger("serve"), stack, lines).run()


class App:
    """One sidecar. ``stack`` closes what was built, in reverse order."""

    def __init__(
        self,
        loaded: Loaded,
        read: Callable[[], Loaded],
        log: Log,
        stack: contextlib.ExitStack,
        lines: logs.Lines,
    ) -> None:
        self._config = config = loaded.config
        self._degraded: dict[str, str] = {}
        self._reloader = Reloader(loaded, read, self._apply, self._degraded, log)
        self._log = log
        self._lines = lines
        self._exit_code = ExitCode.OK
        self.epoch = secrets.randbits(64) or 1
        limits = config.limits
        self._findings = report.examine(config)
        report.tell(self._findings, logs.get_logger("doctor"))
        locks.prepare_run_dir(config.run_dir)
        stack.callback(locks.lock_run_dir(config.run_dir).release)
        stale = locks.remove_stale_sockets(config.run_dir)
        raise_descriptor_limit(limits)
        self._loop = Loop(self._on_error, idle_s_max=min(wait_s_max, limits.stall_ms_max / 4000))
        stack.callback(self._loop.close)
        self._progress = Progress(log)
        self._front = Front(
            loaded,
            self._loop,
            progress=self._progress,
            doctor=lambda: report.examine(self._config),
            degraded=self._degraded,
            log=log,
            stack=stack,
        )
        self._front.open_traces(config, self.epoch)
        self._placed = placement(config.tiers.host.numa, config.tiers.host.bytes)
        self._segment = self._open_pool(stack)
        stack.callback(self._loop.end_watch)  # after the copies stopped, before the pool goes
        self._faults = FaultKit(config.faults, self._loop, log)
        self._pool = self._faults.pool(self._segment.pool)
        self._front.watch_paths(self._pool.address, self._pool.stats().total_bytes)
        self._slow = self._open_slow_tiers(stack)
        self._copies = self._open_copies(stack)
        self._pipeline = self._build_pipeline()
        self._copied = Timed(lambda _, now_s: self._pipeline.on_copies(now_s))
        self._loop.watch(self._copies.wake_fd(), READ, self._copied)
        self._loop.watch(self._slow.wake_fd, READ, self._on_stores)
        self._build_sessions(stack)
        self._build_sockets(stack)
        self._build_desk()
        self._drain_until_s: float | None = None
        self._asked, self._socket_check_s = False, 0.0  # asked to end, by a signal
        self._add_tickers()
        self._faults.start(self._pipeline.on_copies)
        log.info(
            "serving",
            epoch=f"{self.epoch:016x}",
            run_dir=str(config.run_dir),
            pool=config.tiers.host.name,
            pool_bytes=config.tiers.host.bytes,
            warm=self._segment.warm,
            objects=self._pool.stats().ready,
            removed=stale,
        )

    def run(self) -> int:
        """Turn the loop until a signal ends it; returns the exit code."""
        self._loop.watch_progress(self._config.limits.stall_ms_max)
        with Signals(self._loop, self._on_signal):
            self._front.serve(self._desk)
            code = int(self._loop.run())
        self._front.close(self._pipeline.records.all())
        self._log.info("stopped", exit_code=code)
        return code

    # --- building ----------------------------------------------------------------------------

    def _build_desk(self) -> None:
        self._desk = Desk(
            Parts(
                self._loop,
                self._registry,
                self._pipeline,
                self._pool,
                self._attach,
                self._transport,
                self._copied,
            ),
            epoch=self.epoch,
            reloader=self._reloader,
            lines=self._lines,
            degraded=self._degraded,
            findings=self._findings,
            drain=self._drain,
            faults=self._faults,
            traces=self._front.traces,
            progress=self._progress,
            gpus=self._gpus,
            log=self._log,
        )

    def _apply(self, config: Config) -> None:
        """Make the settings in config.HOT count."""
        logs.set_level(config.log.level)
        self._pipeline.set_limits(config.limits)
        self._pipeline.set_breaker(enabled=config.loads.breaker)
        self._registry.set_retention(config.retention)
        self._front.set_traces(config)
        self._pipeline.set_rules(policies.parse(config.namespaces.rules))
        self._config = config

    def _open_pool(self, stack: contextlib.ExitStack) -> PoolSegment:
        host, threads = self._config.tiers.host, self._config.copy.threads
        path, size = segment_path(host.name, host.hugepages_dir), host.bytes
        with self._progress.during("pool", "bytes", lambda: (min(held_bytes(path), size), size)):
            segment = with_memory(self._placed, lambda: open_pool(
                host.name, arena_bytes=host.bytes, slab_bytes=host.slab_bytes,
                keys_max=host.keys_max, epoch=self.epoch, threads=threads, log=self._log,
                hugepages_dir=host.hugepages_dir,
            ))  # fmt: skip
        stack.callback(segment.close)
        if segment.warm:
            self._progress.took("restart scan", "keys", segment.pool.recovered[0], segment.scan_s)
        return segment

    def _open_copies(self, stack: contextlib.ExitStack) -> CopyEngine:
        config, segment = self._config, self._segment
        span = PoolSpan(
            self._pool.address, segment.segment_bytes, self._pool.stats().total_bytes,
            config.tiers.host.slab_bytes, segment.pool,
        )  # fmt: skip
        copy = config.copy
        options = GpuOptions(copy.gpu_mode, copy.gpu_share_percent, copy.threads, config.run_dir)
        engine = with_threads(self._placed, lambda: SeveralCopyEngines(
            copy.threads, span, self._log, gpu=copy.gpu, options=options
        ))  # fmt: skip
        stack.callback(engine.close)

        def open_device(memory: AttachedMemory, life: int, fd: int | None) -> DeviceMemory:
            done, total = engine.pinning()  # before: it may be over as soon as the device is open
            device = engine.open_device(memory, life, fd)
            if done < total or not total:
                self._progress.begin("pinning", "bytes", engine.pinning)
            return device

        self._open_device = open_device
        self._gpus, self._gpu_lost = engine.gpus, engine.lost
        return self._faults.copies(engine)

    def _open_slow_tiers(self, stack: contextlib.ExitStack) -> SlowTiers:
        memory = Memory(self._pool.address, self._segment.segment_bytes)
        slow = SlowTiers(self._config, memory, self._log)

        def close() -> None:
            if not slow.close():
                # A call hangs in a store and may still write to the pool: it stays mapped and
                # locked until the process has ended.
                self._log.warning("a call into a store hangs; ended without closing the pool")
                self._lines.flush()
                os._exit(self._exit_code)

        stack.callback(close)
        return slow

    def _build_pipeline(self) -> Pipeline:
        config = self._config
        quarantine = Quarantine(config.run_dir, self._degraded, self._log)
        return Pipeline(
            pool=self._pool,
            copies=self._copies,
            send=self._send,
            limits=config.limits,
            log=self._log,
            tiers=[
                Tier(t.name, t.source, t.runner, t.policy, reason=t.reason)
                for t in self._slow.tiers
            ],
            modes=config.loads,
            quarantined=quarantine.namespaces,
            on_difference=quarantine.add,
            rules=policies.parse(config.namespaces.rules),
        )

    def _build_sessions(self, stack: contextlib.ExitStack) -> None:
        config, limits, remote = self._config, self._config.limits, self._config.tiers.remote
        self._liveness = Liveness(self._loop, self._on_dead)
        stack.callback(self._liveness.close)
        self._registry = Registry(
            limits=limits,
            events=self._pipeline,
            liveness=self._liveness,
            validate=lambda register, memories: validate_rank(register, memories, limits=limits),
            digest=namespace_digest,
            push=self._push,
            log=self._log,
            retention=config.retention,
            tenants=tenants.parse(config.namespaces.bound),
            shared_store=bool(remote.url) and remote.policy != "none",
        )

    def _build_sockets(self, stack: contextlib.ExitStack) -> None:
        config = self._config
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        endpoint = control_endpoint(config.run_dir, self.epoch)
        self._transport = Transport(
            context,
            endpoint,
            epoch=self.epoch,
            limits=config.limits,
            find=self._registry.find,
            on_message=self._pipeline.on_message,
            log=self._log,
            # Then halves of other users, in the run directory's group, connect too.
            socket_mode=0o660 if config.namespaces.bound else 0o600,
            faults=self._faults.frames,
        )
        stack.callback(self._transport.close)
        self._loop.watch_pending(
            self._transport.fd, self._transport.on_readable, self._transport.pending
        )
        self._attach = AttachServer(
            attach_path(config.run_dir),
            loop=self._loop,
            registry=self._registry,
            liveness=self._liveness,
            limits=config.limits,
            epoch=self.epoch,
            endpoint=endpoint,
            status=lambda turn_s: self._desk.status(turn_s),  # noqa: PLW0108 - built after this
            open_device=self._open_device,
            log=self._log,
        )
        stack.callback(self._attach.close)

    def _add_tickers(self) -> None:
        """In the order of a turn: new work first, then what it may have ended."""
        self._loop.add_ticker("pipeline", self._pipeline.on_tick)
        self._loop.add_ticker("sessions", self._registry.tick)
        self._loop.add_ticker("attach", self._attach.tick)
        self._loop.add_ticker("end", self._end_tick)
        self._loop.add_ticker("drain", self._drain_tick)
        self._loop.add_ticker("reload", self._reloader.tick)
        self._loop.add_ticker("progress", self._progress.tick)

    # --- events ------------------------------------------------------------------------------

    def _send(self, peer: Peer, message: FromSidecar) -> None:
        self._transport.send(peer, message)

    def _on_dead(self, peer: Peer, now_s: float) -> None:
        self._registry.dead(peer, now_s)

    def _push(self, peer: Peer, message: ToPeer) -> None:
        self._attach.push(peer, message)

    def _on_stores(self, _events: int, now_s: float) -> None:
        self._slow.clear_wake()
        self._pipeline.on_stores(now_s)

    def _on_error(self, error: BaseException, what: str) -> None:
        with contextlib.suppress(Exception):  # an error that cannot be told must not end the loop
            self._log.error("handler failed", where=what, exc_info=error)

    def _on_signal(self, number: int, now_s: float) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            self._front.read_token_again(self._config.http.token_file)
            self._reloader.reload()
            return
        if self._asked:
            # Asked twice: whatever hangs must not keep the process. Its memory falls with it.
            self._log.warning("ended at once", signal=name)
            self._lines.flush()
            os._exit(128 + number)
        self._asked = True
        self._log.info("draining", signal=name, drain_s_max=self._config.limits.drain_ms_max / 1000)
        self._drain(now_s)

    def _drain(self, now_s: float) -> None:
        if self._drain_until_s is None:
            self._drain_until_s = now_s + self._config.limits.drain_ms_max / 1000 + drain_grace_s
            self._pipeline.drain(now_s)
            total = self._pipeline.left()
            self._progress.begin(
                "drain", "jobs, leases and writes", countdown(total, self._pipeline.left)
            )

    def _end_tick(self, now_s: float) -> float:
        """End where only a new process helps: whoever supervises us starts one."""
        if self._drain_until_s is not None:
            return math.inf
        if error := self._gpu_lost():
            return self._end(now_s, ExitCode.GPU, "a GPU is lost; draining to end", error=error)
        if now_s >= self._socket_check_s - socket_check_s / 2:  # early, where awake anyway
            self._socket_check_s = now_s + socket_check_s
            sockets = (self._attach, self._transport)
            if lost := [one.path for one in sockets if not one.owns_path()]:
                what = "a socket was removed or replaced; draining to end"
                remedy = "start it again, and keep others from deleting in run_dir"
                return self._end(now_s, ExitCode.RUN_DIR, what, path=str(lost[0]), remedy=remedy)
        return self._socket_check_s - now_s

    def _end(self, now_s: float, code: ExitCode, what: str, **facts: str) -> float:
        self._exit_code = code
        self._log.error(what, **facts)
        self._drain(now_s)
        return math.inf

    def _drain_tick(self, now_s: float) -> float:
        if self._drain_until_s is None:
            return math.inf
        if self._pipeline.drained():
            self._loop.stop(self._exit_code)
        elif now_s >= self._drain_until_s:
            self._log.warning("drain_ms_max is over; what is in flight is given up")
            self._loop.stop(self._exit_code)
        return min(self._drain_until_s - now_s, 0.05)

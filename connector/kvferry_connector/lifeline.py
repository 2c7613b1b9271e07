"""The lifeline thread: attach, register, beat, watch for death, attach again.

It owns the attach stream and the pidfds. What the hook thread may read are attributes that are
swapped whole (``published``, ``refusal``, ``state``, ``deaths.dead``); what the hook thread wants
are attributes it swaps (``live``, the plan) and an eventfd to say so.
"""

from __future__ import annotations

import logging
import os
import random
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

import zmq

from kvferry_connector.config import FerryConfig
from kvferry_connector.deaths import Deaths
from kvferry_connector.half import Half, MemoryHandle, introduce, refusal_text
from kvferry_connector.link import Counters, HotSocket, Link
from kvferry_connector.stream import AttachStream
from kvferry_connector.wire import attach
from kvferry_connector.wire.attach import RegisterEngine, RegisterRank
from kvferry_connector.wire.codec import WireError
from kvferry_connector.wire.names import attach_path
from kvferry_connector.wire.version import PROTOCOL_MAX, PROTOCOL_MIN

logger = logging.getLogger("kvferry.connector")

backoff_s_min = 0.05
backoff_s_max = 1.0
hot_connect_ms_max = 1000
M = TypeVar("M", attach.Welcome, attach.Registered)


@dataclass(frozen=True, slots=True)
class _Plan:
    registration: RegisterEngine | RegisterRank
    memories: tuple[MemoryHandle, ...]


class _DetachedError(Exception):
    """This attachment is over (stream ended, sidecar ended, or we want it so)."""


class _RefusedError(Exception):
    """The sidecar refused the attach or the registration."""

    def __init__(self, refused: attach.Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


class Lifeline:
    """The daemon thread of one half in one process. Client is its only user."""

    def __init__(
        self,
        config: FerryConfig,
        half: Half,
        registration: RegisterEngine | RegisterRank,
        memories: Sequence[MemoryHandle],
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        counters: Counters,
    ) -> None:
        self._config = config
        self._half = half
        self._plan = _Plan(registration, tuple(memories))
        self._context = context
        self._counters = counters
        self.published: Link | None = None
        self.handoff: deque[HotSocket] = deque()
        self.refusal: attach.Refused | None = None
        self.state = "away"
        self.live: tuple[int, list[int]] = (0, [])
        self.deaths = Deaths()
        self._last_ack_s = 0.0
        self._said = ""
        self._handed: tuple[tuple[int, int], str] | None = None
        self._commands: deque[str] = deque()
        self._stopping = False
        self._stream: AttachStream | None = None
        self._registration_sent = False
        self._epoch: int | None = None
        self._beat_s = 1.0
        self._inbox: deque[attach.ToPeer] = deque()
        self._beats = 0
        self._pidfd = os.pidfd_open(os.getpid())
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvferry-lifeline", daemon=True)

    # --- called by the hook thread -----------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ack_age_s(self) -> float:
        """Seconds since the sidecar last answered a heartbeat; infinite while not attached."""
        return float("inf") if self.published is None else time.monotonic() - self._last_ack_s

    def rotate(self, registration: RegisterEngine) -> None:
        """Send the registration's version, now if attached, and at every later attach."""
        self._plan = _Plan(registration, self._plan.memories)
        self._tell("rotate")

    def replace(self, registration: RegisterRank, memories: tuple[MemoryHandle, ...]) -> None:
        """Attach again with other memory."""
        self._plan = _Plan(registration, memories)
        self._tell("replace")

    def stop(self, wait_s: float) -> bool:
        """Say Bye and end the thread; True when it ended within ``wait_s`` seconds."""
        self._tell("stop")
        self._thread.join(wait_s)
        if self._thread.is_alive():
            return False
        os.close(self._wake)
        os.close(self._pidfd)
        return True

    def _tell(self, command: str) -> None:
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        backoff_s = backoff_s_min
        while not self._stopping:
            registered = False
            try:
                self._attach()
                registered = True
                self._keep()
            except _RefusedError as error:
                self._detach("refused", refusal_text(error.refused))
                self._counters.refusals += 1
                self.refusal = error.refused
                backoff_s = backoff_s_max
            except (_DetachedError, OSError, WireError, zmq.ZMQError) as error:
                self._detach("stopped" if self._stopping else "away", str(error))
            except Exception:  # a bug must not end the lifeline; the log has it
                logger.exception("lifeline of %s failed and starts again", self._half.role)
                self._detach("away", "an internal error, see above")
            if registered:
                backoff_s = backoff_s_min
            else:
                self._counters.attach_failures += 1
            self._rest(backoff_s)
            backoff_s = min(2 * backoff_s, backoff_s_max)
        self._detach("stopped", "closed")
        self._drop_unadopted()
        self.deaths.close()

    def _rest(self, backoff_s: float) -> None:
        jitter = random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries, protects nothing
        try:
            end = time.monotonic() + backoff_s * jitter
            while time.monotonic() < end and not self._stopping:
                self._pump(end)
        except _DetachedError:
            return  # asked to attach with something else, or to stop: no reason to rest

    def _attach(self) -> None:
        """Connect, introduce ourselves, register, and publish the link."""
        deadline = time.monotonic() + self._config.attach_ms_max / 1000
        plan = self._plan
        self._stream = stream = AttachStream(attach_path(self._config.run_path()))
        hello, fds = introduce(self._half, plan.memories, self._pidfd)
        stream.send(hello, fds)
        welcome = self._expect(attach.Welcome, deadline)
        if not PROTOCOL_MIN <= welcome.protocol <= PROTOCOL_MAX:
            raise WireError(f"the sidecar chose protocol {welcome.protocol}, which we do not speak")
        if not self.deaths.watch(welcome.epoch, stream.take_fd()):
            raise _DetachedError(
                "more sidecars than can be watched have not ended; end the old ones"
            )
        self._epoch = welcome.epoch
        self._registration_sent = True
        # An engine's version may have rotated meanwhile; a rank's memory belongs to its Hello.
        newest = self._plan.registration
        stream.send(newest if isinstance(newest, RegisterEngine) else plan.registration)
        registered = self._expect(attach.Registered, deadline)
        self._publish(welcome, registered, plan)

    def _publish(self, welcome: attach.Welcome, registered: attach.Registered, plan: _Plan) -> None:
        key = (welcome.epoch, welcome.generation)
        if self._handed != (key, welcome.endpoint):
            hot = HotSocket(self._context, welcome.endpoint, welcome.identity, key)
            if not hot.connected_within(hot_connect_ms_max):
                hot.close()
                raise _DetachedError(f"the sidecar does not answer at {welcome.endpoint}")
            self._drop_unadopted()
            self.handoff.append(hot)
            self._handed = (key, welcome.endpoint)
        registration = plan.registration
        self._last_ack_s = time.monotonic()
        self._beat_s = (self._config.heartbeat_ms or max(1, welcome.heartbeat_ms)) / 1000
        self._counters.attaches += 1
        self.refusal = None
        self._show("registered", f"epoch {welcome.epoch:x} generation {welcome.generation}")
        self.published = Link(
            epoch=welcome.epoch,
            generation=welcome.generation,
            protocol=welcome.protocol,
            namespace=registered.namespace,
            save_rules=tuple(registered.save_rules),
            serial=registration.serial if isinstance(registration, RegisterRank) else 0,
        )

    def _keep(self) -> NoReturn:
        """Beat and listen until the attachment ends, which is an exception."""
        beat_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= beat_at:
                self._beat()
                beat_at = now + self._beat_s
            while self._inbox:
                self._handle(self._inbox.popleft())
            self._pump(beat_at)

    def _beat(self) -> None:
        stream = self._stream
        if stream is None or stream.unsent:
            self._counters.heartbeats_skipped += 1  # a stopped sidecar; silent() tells
            return
        as_of, live = self.live
        self._beats += 1
        stream.send(attach.Heartbeat(seq=self._beats, as_of=as_of, live=live))

    def _handle(self, message: attach.ToPeer) -> None:
        link = self.published
        match message:
            case attach.HeartbeatAck():
                self._last_ack_s = time.monotonic()
            case attach.Ready() if link is not None:
                self._show("ready", f"ranks {message.ranks}, namespace {message.namespace}")
                self.published = replace(
                    link,
                    ready=True,
                    ranks=tuple(message.ranks),
                    namespace=message.namespace,
                    save_rules=tuple(message.save_rules),
                )
            case attach.Registered() if link is not None:
                self.published = replace(
                    link, namespace=message.namespace, save_rules=tuple(message.save_rules)
                )
            case attach.Refused():
                raise _RefusedError(message)
            case _:
                raise WireError(f"the sidecar sent {type(message).__name__}, which fits nowhere")

    def _expect(self, kind: type[M], deadline: float) -> M:
        """Return the next message of ``kind``. Raises _DetachedError at the deadline."""
        while True:
            while self._inbox:
                message = self._inbox.popleft()
                if isinstance(message, kind):
                    return message
                if isinstance(message, attach.Refused):
                    raise _RefusedError(message)
                if not isinstance(message, attach.HeartbeatAck):
                    raise WireError(f"{type(message).__name__} came instead of {kind.__name__}")
            if time.monotonic() >= deadline:
                raise _DetachedError(f"no {kind.__name__} within {self._config.attach_ms_max} ms")
            self._pump(deadline)

    def _pump(self, until: float) -> None:
        """Wait for anything until the monotonic time ``until``, and take it in."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for pidfd in self.deaths.fds():
            poller.register(pidfd, select.POLLIN)
        stream = self._stream
        if stream is not None:
            poller.register(
                stream.fileno(), select.POLLIN | (select.POLLOUT if stream.unsent else 0)
            )
        wait_ms = max(0.0, until - time.monotonic()) * 1000
        fired = dict(poller.poll(wait_ms + 1))
        self._collect_deaths()
        if self._wake in fired:
            self._obey()
        if stream is not None and stream.fileno() in fired:
            self._inbox.extend(stream.receive())
            stream.flush()

    def _collect_deaths(self) -> None:
        for epoch in self.deaths.collect():
            self._counters.deaths += 1
            if epoch == self._epoch:
                raise _DetachedError("the sidecar ended (its pidfd says so)")

    def _obey(self) -> None:
        os.eventfd_read(self._wake)
        while self._commands:
            command = self._commands.popleft()
            if command == "rotate":
                self._send_version()
                continue
            if command == "stop":
                self._stopping = True
                self._say_bye()
            raise _DetachedError(
                "the engine leaves" if command == "stop" else "KV memory was re-mapped"
            )

    def _send_version(self) -> None:
        registration = self._plan.registration
        sendable = self._registration_sent and self._stream is not None
        if sendable and self._stream is not None and isinstance(registration, RegisterEngine):
            self._stream.send(attach.Rotate(version=registration.version))

    def _say_bye(self) -> None:
        if self._stream is None:
            return
        try:
            self._stream.send(attach.Bye())
        except (OSError, WireError):
            logger.debug("no Bye: the sidecar is gone already")

    def _detach(self, state: str, reason: str) -> None:
        self.published = None
        self._epoch = None
        self._registration_sent = False
        self._inbox.clear()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._show(state, reason)

    def _drop_unadopted(self) -> None:
        """Close a socket the hook thread has not taken; a pop that succeeds is ours."""
        while self.handoff:
            try:
                self.handoff.popleft().close()
            except IndexError:
                return

    def _show(self, state: str, reason: str) -> None:
        """Set the state; log it when it changed, not at every retry."""
        said = f"{state}: {reason}" if state == "refused" else state
        self.state = state
        if said == self._said:
            logger.debug("still %s: %s", state, reason)
            return
        self._said = said
        level = logging.WARNING if state in ("away", "refused") else logging.INFO
        logger.log(
            level,
            "kvferry %s half rank %d is %s: %s",
            self._half.role,
            self._half.rank,
            state,
            reason,
        )

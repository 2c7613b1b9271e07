"""The lifeline thread: attach, register, beat, watch for death, attach again.

It owns the attach stream and the pidfds. What the hook thread may read are attributes that are
swapped whole (``published``, ``refusal``, ``state``) or looked up in (``unproven``); what the hook
thread wants are attributes that it swaps (``live``, the registration) or shares (``acks``), and an
eventfd to say so.
"""

from __future__ import annotations

import logging
import math
import os
import random
import select
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn, TypeVar

import msgspec
import zmq

from kvferry_connector.acks import Acks
from kvferry_connector.config import FerryConfig
from kvferry_connector.half import STATE_TEXTS, Half, MemoryHandle, introduce, refusal_text
from kvferry_connector.link import HotSocket, Link, start_threads
from kvferry_connector.loan import Loan
from kvferry_connector.log import LOGGER
from kvferry_connector.stream import AttachStream, UntrustedError
from kvferry_connector.wire import attach
from kvferry_connector.wire.attach import RegisterEngine, RegisterRank
from kvferry_connector.wire.codec import WireError, ids_max
from kvferry_connector.wire.names import attach_path
from kvferry_connector.wire.version import LEFT_SINCE, PROTOCOL_MAX, PROTOCOL_MIN

backoff_s_min = 0.05
backoff_s_max = 1.0
hot_connect_ms_max = 1000
unproven_epochs_max = 8
leave_s_max = 1.0  # an engine that ends waits so long until its memory is closed
M = TypeVar("M", attach.Welcome, attach.Registered)


logger = logging.getLogger(LOGGER)


class _DetachedError(Exception):
    """This attachment is over (stream ended, sidecar ended, or we want it so)."""


class _RefusedError(Exception):
    """The sidecar refused the attach or the registration, or we refused it ("untrusted")."""

    def __init__(self, refused: attach.Refused) -> None:
        super().__init__(refusal_text(refused))
        self.refused = refused


class Lifeline:
    """The daemon thread of one half in one process. Client is its only user.

    ``unproven`` holds the pidfd of every sidecar met whose end is not proven, by epoch. A pidfd
    becomes readable when the last thread of the process has exited; a closed stream, a lock or a
    missed heartbeat say nothing of the sort, so an epoch stays in it after its stream ended.
    """

    def __init__(
        self,
        config: FerryConfig,
        half: Half,
        registration: RegisterEngine | RegisterRank,
        memories: tuple[MemoryHandle, ...],
    ) -> None:
        self._config, self._half, self._memories = config, half, memories
        self._registration = registration
        self.published: Link | None = None
        self.refusal: attach.Refused | None = None
        self.state = "stopped"
        self.unproven: dict[int, int] = {}
        self.live: tuple[int, list[int]] = (0, [])
        self.token_ns = 0
        self.acks = Acks()
        self.last_ack_s = 0.0
        self.counts: Counter[str] = Counter()
        self.loan = Loan()
        self._said = ""
        self._stopping = self._parting = False
        self._leave_by_s = math.inf
        self._protocol = self._mute_epoch = 0  # the latter: who has our Bye and does not answer it
        self._thread: threading.Thread | None = None
        self._stream: AttachStream | None = None
        self._inbox: deque[attach.ToPeer] = deque()
        self._epoch = 0  # attached to; 0 for none
        self._registered: RegisterEngine | RegisterRank | None = None  # what went out, if it did
        self._hot: tuple[HotSocket, tuple[int, int, str]] | None = None
        self._beats = 0
        self._beat_s = backoff_s_max

    # --- called by the hook thread -----------------------------------------------------------

    def start(self) -> None:
        """Start the thread, once. Raises OSError without a pidfd, RuntimeError without a thread."""
        if self._thread is not None:
            return
        self._pidfd = os.pidfd_open(os.getpid())
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        thread = threading.Thread(target=self._run, name="kvferry-lifeline", daemon=True)
        thread.start()
        self._thread = thread

    def rotate(self, version: bytes) -> None:
        """Send the version, now if attached, and at every later attach."""
        self._registration = msgspec.structs.replace(self._registration, version=version)
        self.prod()

    def prod(self) -> None:
        """Have the thread look at once at what is wanted of it."""
        if self._thread is not None and not self._stopping:
            os.eventfd_write(self._wake, 1)

    def stop(self, wait_s: float) -> None:
        """Say Bye and end the thread; what it owns is closed if it ends within ``wait_s``."""
        thread = self._thread
        if thread is None or self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        thread.join(wait_s)
        if not thread.is_alive():
            for fd in (self._wake, self._pidfd, *self.unproven.values()):
                os.close(fd)
            # Whatever sockets are left: term() waits for ever for one that a link still holds.
            self._context.destroy(0)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        # ZeroMQ's threads are born of this one and inherit it: a wake-up of theirs never takes the
        # core from the hook that sends. Where it is refused, sends are as slow as they were.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        backoff_s = backoff_s_min
        while not self._stopping:
            attached = self.loan.back
            try:
                try:
                    if self.loan.back:
                        self._slumber()
                        continue
                    if self.loan.asleep and self._mute_epoch in self.unproven:
                        self._rest(backoff_s_max)  # only its end tells that it has nothing
                        continue
                    self._attach()
                    attached, backoff_s = True, backoff_s_min
                    self._keep()
                except _RefusedError as error:
                    backoff_s = backoff_s_max
                    self._detach("refused", str(error), error.refused)
                    self.counts["refusals"] += 1
                except (_DetachedError, OSError, WireError, zmq.ZMQError) as error:
                    self._detach("asleep" if self.loan.back else "away", str(error))
            except Exception:  # also of a handler: nobody else would learn of deaths
                with suppress(Exception):  # also of a log's handler
                    logger.exception("lifeline of %s failed and starts again", self._half.name)
                with suppress(Exception):
                    self._detach("away", "an internal error, see above")
            self.counts["attach_failures"] += not attached
            self._rest(backoff_s)
            backoff_s = min(2 * backoff_s, backoff_s_max)
        self._detach("stopped", "closed")

    def _slumber(self) -> None:
        """Nobody has our memory: say so, and wait for other memory."""
        self._show("asleep", "closed there")
        loaned = self.loan.settle()
        if loaned is not None:
            self._registration, self._memories = loaned
        else:
            self._rest(backoff_s_max)

    def _rest(self, backoff_s: float) -> None:
        """Wait, and notice deaths meanwhile."""
        end = time.monotonic() + backoff_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        while time.monotonic() < end and not self._stopping:
            if self.loan.due:
                return
            try:
                self._pump(end)
            except Exception:  # as above
                with suppress(Exception):
                    logger.exception("lifeline of %s failed while it waits", self._half.name)
                time.sleep(backoff_s)

    def _attach(self) -> None:
        """Connect, introduce ourselves, register, and publish the link."""
        deadline = time.monotonic() + self._config.attach_ms_max / 1000
        try:
            self._stream = stream = AttachStream(attach_path(self._config.run_path()))
        except UntrustedError as error:
            raise _RefusedError(attach.Refused("untrusted", str(error))) from error
        if self._hot is None:  # and somebody is there: without a sidecar nothing is started
            start_threads(self._context)
        hello, fds = introduce(self._half, self._memories, self._pidfd)
        stream.send(hello, fds)
        welcome = self._expect(attach.Welcome, deadline)
        if not PROTOCOL_MIN <= welcome.protocol <= PROTOCOL_MAX:
            raise WireError(f"the sidecar chose protocol {welcome.protocol}, which we do not speak")
        self._watch(welcome.epoch, stream.take_pidfd())
        self._epoch = welcome.epoch
        self._protocol = welcome.protocol
        hot = self._connect(welcome)  # first: who is registered is given jobs at once
        self._registered = self._registration
        registered = self._register(stream, deadline)
        self.last_ack_s = time.monotonic()
        self._beat_s = (self._config.heartbeat_ms or max(1, welcome.heartbeat_ms)) / 1000
        self.counts["attaches"] += 1
        self.refusal = None
        self._show("registered", f"epoch {welcome.epoch:x} generation {welcome.generation}")
        rules = tuple(registered.save_rules)
        link = Link(welcome.epoch, welcome.generation, welcome.protocol, rules, hot=hot)
        self.published = None if self.loan.asleep or self._parting else link

    def _register(self, stream: AttachStream, deadline: float) -> attach.Registered:
        """Register; from here on the sidecar has our memory, unless it refuses a first time."""
        first = self._epoch not in self.loan.lent
        if self._half.role == "worker":
            self.loan.lent.add(self._epoch)
        stream.send(self._registered or self._registration)
        try:
            return self._expect(attach.Registered, deadline)
        except _RefusedError:
            if first:
                self.loan.lent.discard(self._epoch)
            raise

    def _watch(self, epoch: int, pidfd: int) -> None:
        """Take over the pidfd of the sidecar of ``epoch``."""
        if epoch in self.unproven:
            os.close(pidfd)
        elif len(self.unproven) < unproven_epochs_max:
            self.unproven[epoch] = pidfd
        else:
            os.close(pidfd)
            raise _DetachedError(
                f"{len(self.unproven)} sidecars before this one have not ended; end the old ones"
            )

    def _connect(self, welcome: attach.Welcome) -> HotSocket:
        """Return the hot socket: the one we have when only the stream is another."""
        key = (welcome.epoch, welcome.generation, welcome.endpoint)
        if self._hot is not None and self._hot[1] == key:
            return self._hot[0]
        hot = HotSocket(self._context, welcome.endpoint, welcome.identity)
        if not hot.connected_within(hot_connect_ms_max):
            raise _DetachedError(f"the sidecar does not answer at {welcome.endpoint}")
        self._hot = (hot, key)
        return hot

    def _keep(self) -> NoReturn:
        """Beat and listen until the attachment ends, which is an exception."""
        beat_at = time.monotonic()
        self._obey()
        while True:
            now = time.monotonic()
            if now >= self._leave_by_s:
                raise _DetachedError("the sidecar has not closed the memory of an engine that ends")
            if now >= beat_at:
                if not self._parting:
                    self._beat()
                beat_at = now + self._beat_s
            while self._inbox:
                self._handle(self._inbox.popleft())
            self._pump(min(beat_at, self._leave_by_s))

    def _beat(self) -> None:
        stream = self._stream
        if stream is None or stream.unsent:
            self.counts["heartbeats_skipped"] += 1  # a stopped sidecar; silent() tells
            return
        self._beats += 1
        acks = self.acks.take(ids_max)
        stream.send(attach.Heartbeat(self._beats, *self.live, acks, self.token_ns))

    def _handle(self, message: attach.ToPeer) -> None:
        link = self.published
        match message:
            case attach.HeartbeatAck():
                self.last_ack_s = time.monotonic()
            case attach.Ready() if link is not None:
                self._show("ready", f"ranks {message.ranks}, namespace {message.namespace}")
                self.published = replace(link, ready=True, save_rules=tuple(message.save_rules))
            case attach.Registered() if link is not None:
                self.published = replace(link, save_rules=tuple(message.save_rules))
            case attach.Left():
                self.loan.lent.discard(self._epoch)
                raise _DetachedError("the memory is back")
            case attach.Ready() | attach.Registered():
                pass  # on their way when we said Bye
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
        stream = self._stream
        for fd in (self._wake, *self.unproven.values()):
            poller.register(fd, select.POLLIN)
        if stream is not None:
            events = select.POLLIN | (select.POLLOUT if stream.unsent else 0)
            poller.register(stream.fileno(), events)
        wait_ms = max(0.0, until - time.monotonic()) * 1000
        fired = dict(poller.poll(wait_ms + 1))
        for epoch in [e for e, fd in self.unproven.items() if fired.get(fd, 0) & select.POLLIN]:
            os.close(self.unproven.pop(epoch))
            self.loan.lent.discard(epoch)
            if epoch == self._epoch:
                raise _DetachedError("the sidecar ended (its pidfd says so)")
        if self._wake in fired:
            os.eventfd_read(self._wake)
            self._obey()
        if stream is not None and stream.fileno() in fired:
            self._inbox.extend(stream.receive())
            stream.flush()

    def _obey(self) -> None:
        """Do what the hook thread wants: leave, or send another version."""
        if self._stream is None:
            return
        if self._stopping or self.loan.asleep:
            if self._registered is not None:
                self._say_bye(self._stream)
            elif not self._parting:
                raise _DetachedError("the engine leaves")
            if self._stopping and self._leave_by_s == math.inf:
                self._leave_by_s = time.monotonic() + leave_s_max
            return
        newest = self._registration
        if isinstance(newest, RegisterEngine) and self._registered not in (None, newest):
            self._registered = newest
            self._stream.send(attach.Rotate(version=newest.version))

    def _say_bye(self, stream: AttachStream) -> None:
        """Leave; who lent memory stays until it has it back (Left), if the sidecar says so."""
        self.published = self._registered = None
        self._parting = True
        stream.send(attach.Bye())
        if self._epoch not in self.loan.lent or self._protocol < LEFT_SINCE:
            self._mute_epoch = self._epoch
            raise _DetachedError("the engine leaves")

    def _detach(self, state: str, reason: str, refused: attach.Refused | None = None) -> None:
        self.published = self._registered = None
        self._parting = False
        self._epoch = 0
        self.refusal = refused or self.refusal
        self._inbox.clear()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._show(state, reason)

    def _show(self, state: str, reason: str) -> None:
        """Set the state; log it when it changed, not at every retry."""
        said = f"{state}: {reason}" if state == "refused" else state
        self.state = state
        level = logging.WARNING if state in ("away", "refused") else logging.INFO
        if said == self._said or self._stopping:
            level = logging.DEBUG
        self._said = said
        folder = self._config.run_path()
        untrusted = state == "refused" and self.refusal and self.refusal.code == "untrusted"
        text = STATE_TEXTS["untrusted" if untrusted else state]
        logger.log(level, text, self._half.name, folder, reason, folder)

"""A proxy between a half and the sidecar that loses, doubles or holds single frames.

It serves a run directory of its own: the attach stream passes through unchanged, descriptors
included, except that Welcome names the proxy's endpoint; every hot message is decoded, and the
first rule that fits decides. The proxy must live in the half's own process: the sidecar checks
that the process that connects is the one of the passed pidfd.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from kvferry_connector.wire import attach, codec
from kvferry_connector.wire.attach import ToPeer, Welcome
from kvferry_connector.wire.hot import FromHalf, FromSidecar
from kvferry_connector.wire.names import attach_path

Message = FromHalf | FromSidecar


@dataclass(slots=True)
class Rule:
    """What happens to the next ``times`` messages of a kind. ``action``: drop, double or hold."""

    kind: type
    action: str
    times: int
    held: list[tuple[bytes, list[bytes]]] = field(default_factory=list)


class FrameProxy:
    """All traffic of the halves that attach through ``run_dir``."""

    def __init__(self, run_dir: Path) -> None:
        self._sidecar_dir = run_dir
        self.run_dir = Path(tempfile.mkdtemp(prefix="kvf-"))
        self.passed: Counter[str] = Counter()  # by kind, when it was sent on
        self.dropped: Counter[str] = Counter()
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._endpoint = f"ipc://{self.run_dir}/hot.sock"
        self._target = ""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}
        self._ends: list[socket.socket] = []
        self._wake, self._stop = os.pipe()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(attach_path(self.run_dir)))
        self._listener.listen(8)
        self._threads = [threading.Thread(target=self._accept), threading.Thread(target=self._hot)]
        for thread in self._threads:
            thread.start()

    # --- rules -------------------------------------------------------------------------------

    def drop(self, kind: type, times: int = 1) -> Rule:
        """Lose the next messages of a kind."""
        return self._add(Rule(kind, "drop", times))

    def double(self, kind: type, times: int = 1) -> Rule:
        """Deliver the next messages of a kind twice."""
        return self._add(Rule(kind, "double", times))

    def hold(self, kind: type, times: int = 1) -> Rule:
        """Keep the next messages of a kind back until ``release``: late, or out of order."""
        return self._add(Rule(kind, "hold", times))

    def release(self, rule: Rule) -> None:
        """Let what a rule holds go, and the rule with it."""
        with self._lock:
            rule.times = 0
            rule.action = "release"
        os.write(self._stop, b"r")

    def _add(self, rule: Rule) -> Rule:
        with self._lock:
            self._rules.append(rule)
        return rule

    # --- the attach stream -------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                half, _ = self._listener.accept()
            except OSError:  # closed: the end
                return
            sidecar = socket.socket(socket.AF_UNIX)
            try:
                sidecar.connect(str(attach_path(self._sidecar_dir)))
            except OSError:
                half.close()
                sidecar.close()
                continue
            self._ends += [half, sidecar]
            for source, sink, rewrite in ((half, sidecar, False), (sidecar, half, True)):
                thread = threading.Thread(target=self._relay, args=(source, sink, rewrite))
                self._threads.append(thread)
                thread.start()

    def _relay(self, source: socket.socket, sink: socket.socket, rewrite: bool) -> None:
        reassembler = attach.Reassembler()
        with suppress(OSError):
            while True:
                data, fds, _, _ = socket.recv_fds(source, 1 << 16, attach.attach_fds_max)
                if not data:
                    break
                if rewrite:
                    bodies = reassembler.feed(data)
                    data = b"".join(map(self._rewritten, map(attach.read_to_peer, bodies)))
                if fds:
                    data = data[socket.send_fds(sink, [data], fds) :]
                    for fd in fds:
                        os.close(fd)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _rewritten(self, message: ToPeer) -> bytes:
        if isinstance(message, Welcome):
            self._target = message.endpoint
            message = msgspec.structs.replace(message, endpoint=self._endpoint)
        return attach.encode(message)

    # --- the hot channel ---------------------------------------------------------------------

    def _hot(self) -> None:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.bind(self._endpoint)
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._wake in ready and os.read(self._wake, 1) == b"s":
                    return
                self._let_go(router)
                if router in ready:
                    identity, *frames = router.recv_multipart()
                    dealer = self._dealers.get(identity)
                    if dealer is None:
                        dealer = self._dealers[identity] = self._context.socket(zmq.DEALER)
                        dealer.setsockopt(zmq.ROUTING_ID, identity)
                        dealer.connect(self._target)
                        poller.register(dealer, zmq.POLLIN)
                    self._deliver(router, identity, frames, codec.read_from_half(frames[1]))
                for identity, dealer in self._dealers.items():
                    if dealer in ready:
                        frames = dealer.recv_multipart()
                        message = codec.read_from_sidecar(frames[1])
                        self._deliver(router, identity, frames, message)
        finally:
            router.close(linger=0)
            for dealer in self._dealers.values():
                dealer.close(linger=0)

    def _deliver(
        self, router: zmq.Socket[bytes], identity: bytes, frames: list[bytes], message: Message
    ) -> None:
        name = type(message).__name__
        with self._lock:
            rule = next((r for r in self._rules if r.times and isinstance(message, r.kind)), None)
            if rule is not None:
                rule.times -= 1
                if rule.action == "drop":
                    self.dropped[name] += 1
                    return
                if rule.action == "hold":
                    rule.held.append((identity, frames))
                    return
        for _ in range(2 if rule is not None else 1):
            self._pass_on(router, identity, frames)
            self.passed[name] += 1

    def _let_go(self, router: zmq.Socket[bytes]) -> None:
        with self._lock:
            ready = [rule for rule in self._rules if rule.action == "release"]
            self._rules = [rule for rule in self._rules if rule.action != "release"]
        for rule in ready:
            for identity, frames in rule.held:
                self._pass_on(router, identity, frames)

    def _pass_on(self, router: zmq.Socket[bytes], identity: bytes, frames: list[bytes]) -> None:
        try:
            codec.read_from_sidecar(frames[1])
        except codec.WireError:
            self._dealers[identity].send_multipart(frames)
        else:
            router.send_multipart([identity, *frames])

    def close(self) -> None:
        """End all threads and remove the run directory."""
        os.write(self._stop, b"s")
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a thread of the proxy hangs"
        for end in self._ends:
            end.close()
        self._context.term()
        os.close(self._wake)
        os.close(self._stop)
        shutil.rmtree(self.run_dir)


@contextmanager
def proxied(run_dir: Path) -> Iterator[FrameProxy]:
    """Yield a proxy in front of the sidecar of ``run_dir``."""
    proxy = FrameProxy(run_dir)
    try:
        yield proxy
    finally:
        proxy.close()

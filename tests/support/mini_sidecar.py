"""A sidecar of one page that speaks the wire and can be killed: the client's opposite in tests.

As a script it serves ``RUN_DIR`` until it is told to end; what happens is told on stdout, one
JSON document a line, and what it shall do is read from stdin the same way. ``MiniSidecar`` runs
it in a process of its own, so that SIGKILL, SIGSTOP and pidfds are the real thing.
"""

from __future__ import annotations

import argparse
import array
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import zmq
from kvferry_connector.wire import attach, codec, hot, names
from kvferry_connector.wire.version import PROTOCOL_MAX

Event = dict[str, Any]


class MiniSidecar:
    """The process, and the events it has told so far."""

    def __init__(self, run_dir: Path, epoch: int, *flags: str) -> None:
        self.epoch = epoch
        command = [sys.executable, __file__, str(run_dir), str(epoch), *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._text = b""
        self._events: list[Event] = []

    def events(self, kind: str) -> list[Event]:
        """Return the events of one kind so far."""
        assert self.process.stdout is not None
        while data := self.process.stdout.read(1 << 16):
            self._text += data
        *lines, self._text = self._text.split(b"\n")
        self._events += [json.loads(line) for line in lines]
        return [event for event in self._events if event["kind"] == kind]

    def do(self, **command: Any) -> None:
        """Have the process do something (see _obey)."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; harmless on one that has ended."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


# --- the process -----------------------------------------------------------------------------


class _Peer:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.reassembler = attach.Reassembler()
        self.fds: list[int] = []
        self.generation = 0

    def say(self, message: attach.ToPeer, fds: tuple[int, ...] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with contextlib.suppress(ConnectionError):  # it hangs up when that is read
            self.connection.sendmsg([attach.encode(message)], rights)


class _Server:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        run_dir = Path(options.run_dir)
        self.path = names.attach_path(run_dir)
        self.path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        own = os.geteuid()
        os.seteuid(own if options.listen_uid is None else options.listen_uid)
        self.listener.listen(8)  # now the kernel notes who it is that peers connect to
        os.seteuid(own)
        self.endpoint = options.endpoint or names.control_endpoint(run_dir, options.epoch)
        self.router = zmq.Context.instance().socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.bind(self.endpoint)
        self.peers: dict[int, _Peer] = {}
        self.generations: dict[tuple[str, int, int], int] = {}
        self.poller = zmq.Poller()
        for watched in (self.listener, sys.stdin, self.router):
            self.poller.register(watched, zmq.POLLIN)
        self.tell("listening")

    def tell(self, kind: str, **facts: Any) -> None:
        sys.stdout.write(json.dumps({"kind": kind, **facts}) + "\n")
        sys.stdout.flush()

    def run(self) -> None:
        while True:
            for watched, _ in self.poller.poll():
                if watched is self.router:
                    self.hear_hot()
                elif watched == self.listener.fileno():
                    self.accept()
                elif watched == sys.stdin.fileno():
                    self.obey(json.loads(sys.stdin.buffer.raw.readline() or b'{"end": 1}'))
                elif watched in self.peers:
                    self.hear(self.peers[watched])

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        self.peers[connection.fileno()] = _Peer(connection)
        self.poller.register(connection.fileno(), zmq.POLLIN)

    def hang_up(self, peer: _Peer) -> None:
        self.poller.unregister(peer.connection.fileno())
        del self.peers[peer.connection.fileno()]
        peer.connection.close()
        self.tell("hung up")

    def hear(self, peer: _Peer) -> None:
        data, fds = b"", list[int]()
        with contextlib.suppress(ConnectionError):
            data, fds, _, _ = socket.recv_fds(peer.connection, 1 << 16, attach.attach_fds_max)
        peer.fds += fds
        if not data:
            self.hang_up(peer)
            return
        for body in peer.reassembler.feed(data):
            self.handle(peer, attach.read_from_peer(body))

    def handle(self, peer: _Peer, message: attach.FromPeer) -> None:
        if isinstance(message, attach.Hello):
            self.welcome(peer, message)
        elif isinstance(message, attach.RegisterEngine | attach.RegisterRank):
            self.register(peer, message)
        elif isinstance(message, attach.Heartbeat):
            self.tell("beat", seq=message.seq, as_of=message.as_of, live=message.live,
                      pace=message.token_ns)  # fmt: skip
            peer.say(attach.HeartbeatAck(message.seq))
        elif isinstance(message, attach.Rotate):
            self.tell("rotate", version=message.version.hex())
        elif isinstance(message, attach.Bye):
            self.tell("bye")
            if not self.options.keeps_memory:
                peer.say(attach.Left())

    def welcome(self, peer: _Peer, hello: attach.Hello) -> None:
        inode = os.fstat(peer.fds[0]).st_ino
        kinds = [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in peer.fds]
        sizes = [os.fstat(fd).st_size for fd in peer.fds]
        self.tell(
            "hello", role=hello.role, rank=hello.rank, pid=hello.pid, kinds=kinds, sizes=sizes
        )
        if self.options.refuse_hello:
            peer.say(attach.Refused("busy", "no room for another engine"))
            self.hang_up(peer)
            return
        who = (hello.role, hello.rank, inode)
        fresh = len(self.generations) + self.options.first_generation
        peer.generation = self.generations.setdefault(who, fresh)
        pidfd = os.memfd_create("no pidfd") if self.options.no_pidfd else os.pidfd_open(os.getpid())
        identity = b"half-%d" % peer.generation
        peer.say(
            attach.Welcome(self.options.protocol, self.options.epoch, peer.generation,
                           self.endpoint, identity, self.options.heartbeat_ms), (pidfd,)
        )  # fmt: skip
        os.close(pidfd)

    def register(self, peer: _Peer, message: attach.RegisterEngine | attach.RegisterRank) -> None:
        engine = isinstance(message, attach.RegisterEngine)
        facts = {"version": message.version.hex()} if engine else {"serial": message.serial}
        self.tell("register", generation=peer.generation, **facts)
        if self.options.refuse_registration:
            field = attach.FieldRefusal("kind", "mla", "full", "serve another model")
            peer.say(attach.Refused("geometry", "the groups do not fit", [field]))
            self.hang_up(peer)
            return
        peer.say(attach.Registered("ab" * 16, ["all"]))
        if not self.options.never_ready:
            peer.say(attach.Ready("ab" * 16, [0], ["all"]))

    def hear_hot(self) -> None:
        identity, *frames = self.router.recv_multipart()
        header = codec.read_header(frames)
        message = codec.read_from_half(frames[1])
        raw = [base64.b64encode(frame).decode() for frame in frames[2:]]
        self.tell("hot", identity=identity.decode(), epoch=header.epoch, text=str(message),
                  generation=header.generation, raw=raw)  # fmt: skip

    def send_hot(self, frames: list[Any]) -> None:
        """Send to a half that may have connected without the ROUTER knowing of it yet."""
        while True:
            try:
                self.router.send_multipart(frames)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.router.poll(10)
            else:
                return

    def obey(self, command: dict[str, Any]) -> None:
        match command:
            case {"hint": admission, "epoch": epoch, "generation": generation, "to": to}:
                message = hot.Hint(admission=admission, hit_tokens=64, total=4)
                frames = codec.pack(message, [b"raw"], protocol=PROTOCOL_MAX, epoch=epoch,
                                    generation=generation)  # fmt: skip
                self.send_hot([to.encode(), *frames])
            case {"garbage": text, "to": to}:
                self.send_hot([to.encode(), text.encode(), b"x"])
            case {"hang_up": _}:
                for peer in list(self.peers.values()):
                    self.hang_up(peer)
            case {"hold": _}:
                child = subprocess.Popen(
                    ["sleep", "60"], pass_fds=list(self.peers),
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                )  # fmt: skip
                self.tell("held", pid=child.pid)
            case {"let_go": _}:
                for peer in self.peers.values():
                    peer.say(attach.Left())
            case {"end": _}:
                raise SystemExit


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("epoch", type=int)
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--first-generation", type=int, default=1)
    parser.add_argument("--listen-uid", type=int)
    parser.add_argument("--heartbeat-ms", type=int, default=20)
    parser.add_argument("--refuse-hello", action="store_true")
    parser.add_argument("--refuse-registration", action="store_true")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--no-pidfd", action="store_true")
    parser.add_argument("--keeps-memory", action="store_true")
    parser.add_argument("--protocol", type=int, default=PROTOCOL_MAX)
    _Server(parser.parse_args()).run()


if __name__ == "__main__":
    main()

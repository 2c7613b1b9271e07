"""The connector's own client as a half that tests drive message by message."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvferry_connector.client import Client, Half, Link, MemoryHandle
from kvferry_connector.config import FerryConfig
from kvferry_connector.wire.attach import Memory
from kvferry_connector.wire.hot import FromHalf, FromSidecar
from support.hot_engine import HotEngine
from support.raw_half import DEADLINE_S, KvMemory, engine_registration
from support.waiting import wait_until

M = TypeVar("M")


class GoneError(Exception):
    """The sidecar is gone, and the test does not want to wait for the next one."""


class ClientHalf:
    """One Client; ``send`` and ``receive`` as support.hot_engine wants them.

    ``gone`` says that the sidecar has ended: then nothing waits for a link, but raises GoneError.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.gone: Callable[[], bool] = lambda: False
        self.heard: list[FromSidecar] = []

    def ready_link(self, beyond_epoch: int = 0) -> Link:
        """Wait for a link that is ready, of another epoch than the given one."""

        def ready() -> Link | None:
            if self.gone():
                raise GoneError
            link = self.client.link()
            return link if link and link.ready and link.epoch != beyond_epoch else None

        link = wait_until(ready, f"the half is ready ({self.client.state})")
        assert link is not None  # wait_until returns what is true
        return link

    def send(self, message: FromHalf, *raw: bytes) -> None:
        """Send one message on the current link; if that ends meanwhile, on the next one."""
        while not self.client.send(link := self.ready_link(), message, raw):
            wait_until(lambda old=link: self.client.link() is not old, "what takes nothing ends")

    def receive(
        self, kind: type[M], which: Callable[[M], bool] = lambda _: True, what: str = ""
    ) -> M:
        """Wait for a message of this kind, and keep the others in ``heard``."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            self.take()
            for at, message in enumerate(self.heard):
                if isinstance(message, kind) and which(message):
                    del self.heard[at]
                    return message
            assert time.monotonic() < end_s, f"no {kind.__name__} {what}; heard {self.heard[-9:]}"

    def take(self) -> None:
        """Put into ``heard`` what has come."""
        link = self.client.link()
        if link is not None:
            self.heard += [message for message, _ in self.client.receive(link, wait_us=2_000)]


class ClientEngine(HotEngine):
    """An engine of one rank over two Clients."""

    def __init__(
        self,
        run_dir: Path,
        memory: KvMemory,
        engine_id: str,
        heartbeat_ms: int,
        instance_id: str = "one",
        *,
        kv_events: bool = False,
        wait: bool = True,
    ) -> None:
        life = os.urandom(16)
        config = FerryConfig(run_dir=str(run_dir), heartbeat_ms=heartbeat_ms)
        handle = MemoryHandle(Memory(0, memory.total_bytes), memory.fd)
        halves = (
            ClientHalf(
                Client(
                    config,
                    Half("scheduler", engine_id, instance_id),
                    engine_registration([0], life, kv_events=kv_events),
                )
            ),
            ClientHalf(
                Client(
                    config,
                    Half("worker", engine_id, instance_id, rank=0, fence_fd=memory.fence_fd),
                    memory.registration(0, 1),
                    [handle],
                )
            ),
        )
        super().__init__(*halves, memory, life)
        self.scheduler_half, self.worker_half = halves
        for half in halves:
            half.client.start()
        if wait:
            self.wait_ready()

    def wait_ready(self, beyond_epoch: int = 0) -> int:
        """Wait until both halves are ready at another epoch; return it."""
        for half in (self.scheduler_half, self.worker_half):
            half.ready_link(beyond_epoch)
        return self.worker_half.ready_link(beyond_epoch).epoch

    def close(self) -> None:
        """Say Bye."""
        self.worker_half.client.close()
        self.scheduler_half.client.close()


@contextmanager
def client_engine(
    run_dir: Path,
    *,
    engine_id: str = "client",
    instance_id: str = "one",
    heartbeat_ms: int = 100,
    kv_events: bool = False,
    **memory: int,
) -> Iterator[ClientEngine]:
    """Yield an engine of real clients that is ready. ``memory``: of KvMemory."""
    kv = KvMemory(**memory)
    try:
        engine = ClientEngine(
            run_dir, kv, engine_id, heartbeat_ms, instance_id, kv_events=kv_events
        )
        try:
            yield engine
        finally:
            engine.close()
    finally:
        kv.close()

"""What a worker half sees of a sidecar, as a test writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry_connector import worker_half
from kvferry_connector.acks import Acks
from kvferry_connector.config import FerryConfig
from kvferry_connector.jobs import JobOrder
from kvferry_connector.link import Link
from kvferry_connector.wire import hot
from kvferry_connector.worker_half import WorkerHalf
from support.parallel import parallel_config

EPOCH = 5


class ScriptedClient:
    """What a worker half sees of a sidecar."""

    def __init__(self) -> None:
        self.current: Link | None = Link(EPOCH, 1, 1, ("all",), ready=True)
        self.dead: set[int] = set()
        self.takes = self.gives_back = True
        self.sent: list[tuple[hot.FromHalf, list[bytes]]] = []
        self.inbox: list[hot.FromSidecar] = []
        self.polls = 0
        self.calls: list[str] = []
        self.acks = Acks()
        self.news: Counter[str] = Counter()

    def tell(self, count: Callable[[str, int], None]) -> None:
        while self.news:
            count(*self.news.popitem())

    def set_acks(self, acks: Acks) -> None:
        self.acks = acks

    def start(self) -> None:
        self.calls.append("start")

    def close(self) -> None:
        self.calls.append("close")

    def withdraw(self, wait_s: float) -> bool:
        self.current = None
        self.calls.append("withdraw")
        return self.gives_back

    def lend(self, registration: Any, memories: Any) -> None:
        self.calls.append("lend")

    def link(self) -> Link | None:
        return self.current

    def is_dead(self, epoch: int) -> bool:
        return epoch in self.dead

    def send(self, link: Link, message: hot.FromHalf, raw: Any = ()) -> bool:
        if self.takes:
            self.sent.append((message, list(raw)))
        return self.takes

    def receive(self, link: Link, wait_us: int = 0) -> list[tuple[hot.FromSidecar, list[bytes]]]:
        self.polls += 1
        taken, self.inbox = self.inbox, []
        return [(message, []) for message in taken]

    def kinds(self, kind: type) -> list[Any]:
        return [message for message, _ in self.sent if isinstance(message, kind)]


def order(job: int, epoch: int = EPOCH) -> JobOrder:
    return JobOrder(job, f"req-{job}", epoch, b"body-%d" % job, (b"tables-%d" % job,))


def worker_half_over(
    client: ScriptedClient,
    patch: pytest.MonkeyPatch,
    describe: Callable[..., Any] = lambda *_, **__: None,
) -> WorkerHalf:
    """Return a registered worker half of rank 3 that talks to ``client``."""
    patch.setattr(worker_half, "describe_rank", describe)
    patch.setattr(worker_half, "Client", lambda *_: client)
    vllm_config = SimpleNamespace(
        parallel_config=parallel_config(3),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
        instance_id="i",
    )
    half = WorkerHalf(vllm_config, None, FerryConfig(job_ask_ms=1000))
    half.register({})
    return half

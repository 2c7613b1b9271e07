"""Clients of a MiniSidecar: registrations, and waiting for a link."""

from __future__ import annotations

from collections.abc import Callable

from kvferry_connector.client import Client, Half, Link
from kvferry_connector.wire import attach
from kvferry_connector.wire.names import NO_VERSION
from support.mini_sidecar import MiniSidecar
from support.waiting import wait_until

ENGINE = attach.RegisterEngine(
    life=bytes(range(16)), version=NO_VERSION, ranks=[0], hash_block_tokens=16,
    scheduler_block_tokens=16, alignment_tokens=16, load_failure_policy="recompute",
)  # fmt: skip
RANK = attach.RegisterRank(
    serial=1, shard=attach.Shard(), identity={}, num_blocks=8, layout="LBNHC", groups=[],
    placements=[], hash_block_tokens=16,
)  # fmt: skip
SCHEDULER = Half("scheduler", "engine", "instance")

Serve = Callable[..., MiniSidecar]
Attach = Callable[..., Client]


def ready_link(client: Client, epoch: int) -> Link:
    def found() -> Link | None:
        link = client.link()
        return link if link is not None and link.epoch == epoch and link.ready else None

    return wait_until(found, f"a ready link of epoch {epoch}")

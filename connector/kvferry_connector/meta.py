"""What travels between the halves through vLLM, which pickles it: plain data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry_connector.config import FerryConfig, volume_of
from kvferry_connector.half import Half
from kvferry_connector.jobs import JobOrder, Report
from kvferry_connector.wire import hot
from kvferry_connector.wire.attach import RegisterEngine

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


# The number of an ask with the admissions that hold leases after it, and what a token costs in ns.
Beat = tuple[tuple[int, tuple[int, ...]], int]


class Relay(NamedTuple):
    """Scheduler half to its deputies on further nodes: ``engines`` by deputy's rank, if new.

    ``messages`` with their raw frames are for every node's sidecar, in this order. Heartbeats to
    them say what this node's say: the ``beat``.
    """

    engines: Mapping[int, RegisterEngine]
    messages: tuple[tuple[hot.FromHalf, tuple[bytes, ...]], ...]
    beat: Beat


class NodeState(NamedTuple):
    """A deputy's sidecar: its epoch while it may be asked, else 0; ``trouble``: why it refused."""

    epoch: int
    save_rules: tuple[str, ...] = ()
    trouble: str = ""


class Heard(NamedTuple):
    """What the sidecar of ``epoch`` said to the deputy of this rank."""

    rank: int
    epoch: int
    message: hot.Hint | hot.Answer | hot.NeedFull | hot.Error


@dataclass(frozen=True)
class FerryMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not followed
    """Scheduler half to worker halves: the number of the step and its jobs.

    ``rotation`` counts the namespace versions: what a load of an older one brought is stale.
    ``relay``: what deputies on further nodes are to do. ``doubtful``: the ranks are to say
    that the step has ended. Steps with nothing to do share an object, numbered 0.
    """

    step: int
    loads: tuple[JobOrder, ...] = ()
    saves: tuple[JobOrder, ...] = ()
    rotation: int = 0
    relay: Relay | None = None
    doubtful: bool = False


@dataclass
class FerryWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not followed
    """Worker halves to scheduler half: reports by job, and what deputies learned.

    ``nodes``: states of sidecars that changed, by deputy's rank. ``ended_step``: the number of the
    step that this output is of, where that was asked for.
    """

    reports: dict[int, list[Report]] = field(default_factory=dict)
    nodes: dict[int, NodeState] = field(default_factory=dict)
    heard: list[Heard] = field(default_factory=list)
    ended_step: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FerryWorkerMetadata:
        """Return the reports of both. Raises TypeError for another connector's metadata."""
        if not isinstance(other, FerryWorkerMetadata):
            raise TypeError(f"cannot aggregate {type(other).__name__} with kvferry's reports")
        merged = {job: list(reports) for job, reports in self.reports.items()}
        for job, reports in other.reports.items():
            merged.setdefault(job, []).extend(reports)
        ended = max(self.ended_step, other.ended_step)  # of one step: all ranks, or none
        nodes, heard = self.nodes | other.nodes, self.heard + other.heard
        return FerryWorkerMetadata(merged, nodes, heard, ended)


@dataclass(frozen=True)
class FerryHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not followed
    """Where a rank lives. ``host_id``: its host's boot, and the volume of ``run_dir`` there.

    ``session``: the ids its halves attach under; each start of vLLM has its own.
    """

    rank: int
    host_id: str
    run_dir: str
    session: tuple[str, str]

    @staticmethod
    def of(rank: int, config: FerryConfig, half: Half) -> FerryHandshake:
        """Return a rank's handshake; ``half``: any of its session. Raises OSError without /proc."""
        run_dir = config.run_path()
        host_id = f"{_BOOT_ID.read_text().strip()} {volume_of(run_dir)}"
        return FerryHandshake(rank, host_id, str(run_dir), (half.engine_id, half.instance_id))

"""What the control loop knows of engines: sessions, their halves, what each rank registered.

Owned by the control loop; nothing else writes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry_connector.wire.attach import RegisterEngine, RegisterRank
from kvferry_native import Layout, Mapping

from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory
from kvferry_sidecar.sessions.tenants import Credentials


class SessionKey(NamedTuple):
    """One engine on this node."""

    engine_id: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One group on one rank, validated: what a copy needs."""

    group: int
    kind: str
    block_tokens: int
    layout: (
        Layout | CudaLayout | None
    )  # None: no layers of this group on this rank (pipeline parallel)
    payload_bytes: int  # this rank's shard of one chunk; 0 without a layout
    num_blocks: int
    save_rule: str  # "all" | "held" | "hand-offs" | "none"
    window_tokens: int = 0
    window_extra_tokens: int = 0
    chunk_tokens: int = 0
    scratch_blocks: int = 0
    eagle: bool = False
    tp_replicas: int = 1  # consecutive TP ranks that hold the same bytes
    layers: int = 0  # of this rank
    spec: str = ""  # equal for groups whose specs vLLM takes for equal


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """Everything a rank registered, validated and mapped."""

    serial: int
    groups: tuple[RankGroup, ...]
    identity: dict[str, str]
    digest: bytes  # over identity and geometry without the rank's own number: equal on all ranks
    hash_block_tokens: int
    # (tp, pp, dcp) rank: which shard of a stripe it holds. Not in the digest, in the namespace.
    position: tuple[int, int, int] = (0, 0, 0)


@dataclass(slots=True, eq=False)
class Peer:
    """One half of an engine that is attached (or was, and is not proven dead)."""

    session: Session
    role: str  # "scheduler" | "worker"
    rank: int  # -1 for the scheduler half
    generation: int
    routing_id: bytes
    protocol: int
    life_inode: int  # pidfs inode of the process: the same process keeps its generation
    pid: int
    fence: Mapping | None = None
    memories: dict[int, Mapping | DeviceMemory] = field(default_factory=dict)
    geometry: RankGeometry | None = None
    who: Credentials = field(default_factory=lambda: Credentials(0, 0))  # of its process
    connected: bool = True  # the lifeline stream is open (a hint, never a proof)
    last_beat_s: float = 0.0
    last_message_s: float = 0.0  # on the hot channel; 0: none yet
    registration: RegisterEngine | RegisterRank | None = None  # as last accepted
    host: str = ""  # where it says it lives, and as which data-parallel engine: only shown
    dp_rank: int = 0
    # What the memories are, whatever descriptor they came by: buffer -> (device, inode, bytes).
    backing: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def let_go(self) -> bool:
        """Have the memory unmapped, behind the loop's back; return whether it is: ask again."""
        self.geometry = None  # its layouts use the memory
        gone = [one.let_go() for one in self.memories.values() if isinstance(one, Mapping)]
        return all(gone)


@dataclass(slots=True, eq=False)
class Session:
    """One engine on this node at this epoch."""

    key: SessionKey
    scheduler: Peer | None = None
    workers: dict[int, Peer] = field(default_factory=dict)
    life: bytes = b""
    version: bytes = b""
    ranks: tuple[int, ...] = ()
    scheduler_block_tokens: int = 0
    alignment_tokens: int = 0
    retention_tokens: int | None = 0
    use_eagle: bool = False
    reprefill_tokens: int = 0
    kv_events: bool = False
    ready: bool = False
    namespaces: dict[bytes, bytes] = field(default_factory=dict)  # version -> 16-byte digest

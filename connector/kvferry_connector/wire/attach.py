"""Messages of the lifeline (AF_UNIX stream ``RUN_DIR/attach.sock``), both directions.

Framing: u32 little-endian length, then one msgpack message. File descriptors travel as
SCM_RIGHTS with the first bytes of the message that names them. The stream stays open for the
life of the attachment: identity and registration first, heartbeats after. ZeroMQ can carry
neither descriptors nor credentials; that is why this socket exists.
"""

from __future__ import annotations

import struct

import msgspec

from kvferry_connector.wire.codec import WireError, brief

LENGTH = struct.Struct("<I")
attach_bytes_max = 4 << 20
attach_fds_max = 18

# --- what a rank and an engine say about themselves ------------------------------------------


class CudaMemory(msgspec.Struct, frozen=True):
    """Memory of a GPU as the driver hands it to another process.

    ``handle`` (64 bytes; empty where a descriptor does it) maps the whole allocation of
    ``allocation_bytes``, in which the buffer begins at ``offset``. ``device`` is the GPU's UUID (16
    bytes): ordinals differ by process. ``buffer_id`` is the driver's number of the allocation in
    process ``pid``: handles of two allocations may have equal bytes.
    """

    handle: bytes
    offset: int
    allocation_bytes: int
    device: bytes
    buffer_id: int
    pid: int


class Memory(msgspec.Struct, frozen=True):
    """One KV buffer of a rank.

    ``kind`` is "memfd" or "cuda-fd" (its descriptor travels with Hello, in this order), or "cuda"
    (opened by its handle).
    """

    buffer: int
    total_bytes: int
    kind: str = "memfd"
    cuda: CudaMemory | None = None


class Group(msgspec.Struct, frozen=True):
    """A KV cache group as this rank sees it; ids are the scheduler's, global over ranks.

    ``kind``: "full", "mla", "indexer", "swa", "swa-mla", "chunked" or "mamba"; anything else is
    refused by name with ``detail`` in the text. ``block_tokens`` is the effective block size B_g.
    ``spec`` holds every fact of the group's specs that changes bytes (part of the namespace).
    ``window_tokens`` is the sliding window, ``window_extra_tokens`` what lookups need below it,
    ``chunk_tokens`` the attention chunk; 0 where the kind has none. ``tp_replicas``: so many
    consecutive tensor-parallel ranks hold the same bytes of this group. ``scratch_blocks`` close
    each table of a "mamba" group and belong to no chunk.
    """

    group: int
    kind: str
    block_tokens: int
    spec: dict[str, str]
    layers: list[str]
    cacheable: bool = True
    eagle: bool = False
    detail: str = ""
    window_tokens: int = 0
    window_extra_tokens: int = 0
    chunk_tokens: int = 0
    tp_replicas: int = 1
    scratch_blocks: int = 0


class Placement(msgspec.Struct, frozen=True):
    """Where the pages of some layers lie: ``base + offset + l * layer_stride + b * block_stride``.

    ``page_bytes`` carries data; in each page the data are ``runs`` runs of ``run_bytes`` bytes,
    ``run_stride`` apart (one run for dense pages).
    """

    group: int
    layers: list[str]
    buffer: int
    offset: int
    layer_stride: int
    block_stride: int
    page_bytes: int
    runs: int = 1
    run_bytes: int = 0
    run_stride: int = 0


class Shard(msgspec.Struct, frozen=True):
    """Which part of the model's KV this rank holds."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1


# --- half -> sidecar -------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message. Descriptors in order: pidfd of the half, [fence page], memories.

    ``role`` is "scheduler" or "worker"; ``rank`` is the global rank, -1 for the scheduler half.
    Only shown: ``host``, the name of its host (its pod's), and ``dp_rank``, the engine's place
    among data-parallel ones.
    """

    protocol_min: int
    protocol_max: int
    role: str
    engine_id: str
    instance_id: str
    rank: int
    pid: int
    fence: bool = False
    memories: list[Memory] = []
    software: str = ""
    host: str = ""
    dp_rank: int = 0


class RegisterEngine(msgspec.Struct, frozen=True, tag="engine"):
    """The scheduler half's registration.

    ``life``: its 16-byte nonce, inside every job; ``version``: the 16-byte namespace version
    (zeros as loaded, random after a reset); ``ranks``: global ranks that live on this node.
    ``retention_tokens``: distance of the boundaries at which sliding windows are kept; 0 only
    where a request can resume, None at every aligned one. ``kv_events``: it wants to be told what
    its saves stored and what of it left. ``reprefill_tokens`` at the end of what
    is computed may still be rewritten. ``nodes`` over which the engine's ranks are spread.
    """

    life: bytes
    version: bytes
    ranks: list[int]
    hash_block_tokens: int
    scheduler_block_tokens: int
    alignment_tokens: int
    load_failure_policy: str
    retention_tokens: int | None = 0
    use_eagle: bool = False
    reprefill_tokens: int = 0
    kv_events: bool = False
    nodes: int = 1


class RegisterRank(msgspec.Struct, frozen=True, tag="rank"):
    """A worker half's registration: identity facts, groups, placements.

    ``identity`` holds every fact that must agree for two engines to share bytes (model,
    revision, dtype, hash algorithm and seed probe, ...), by name. ``serial`` grows with every
    re-mapping of the KV memory.
    """

    serial: int
    shard: Shard
    identity: dict[str, str]
    num_blocks: int
    layout: str
    groups: list[Group]
    placements: list[Placement]
    hash_block_tokens: int


class Rotate(msgspec.Struct, frozen=True, tag="rotate"):
    """The scheduler half's namespace version from now on (weights or cache were reset)."""

    version: bytes


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Alive, and these admissions (asked up to ``as_of`` asks) still hold their leases.

    A lease of an ask numbered ``<= as_of`` that is not in ``live`` is freed: a lost release heals.
    ``acks``: outcomes of these jobs arrived, as in OutcomeAck. ``token_ns``: what a token of
    prefill costs the engine, 0 while it does not know.
    """

    seq: int
    as_of: int
    live: list[int]
    acks: list[int] = []
    token_ns: int = 0


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The half leaves in order, or takes its KV memory back: what runs on it is to stop.

    Answered by Left from protocol 2 on.
    """


class StatusQuery(msgspec.Struct, frozen=True, tag="status?"):
    """Ask for the sidecar's state (`kvferry status`); needs no Hello."""


FromPeer = Hello | RegisterEngine | RegisterRank | Rotate | Heartbeat | Bye | StatusQuery

# --- sidecar -> half -------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Accepted. One descriptor: the sidecar's pidfd.

    ``endpoint`` is the ZeroMQ address of this epoch, ``identity`` the routing id to use.
    """

    protocol: int
    epoch: int
    generation: int
    endpoint: str
    identity: bytes
    heartbeat_ms: int


class FieldRefusal(msgspec.Struct, frozen=True):
    """One field that does not fit: its name, both values, and what to change."""

    field: str
    theirs: str
    ours: str
    remedy: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Not accepted, field by field; the stream is closed after it unless it can be mended."""

    code: str
    message: str
    fields: list[FieldRefusal] = []


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """This registration is valid. ``save_rules`` per group: which new blocks a save names.

    "all": every one. "held": those that the table still holds. "tail:N": of those, the N before
    each boundary where a request can resume. "hand-offs": states named by the engine. "none".
    """

    namespace: str
    save_rules: list[str]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """All local ranks of the session are registered at this epoch (latched)."""

    namespace: str
    ranks: list[int]
    save_rules: list[str]


class HeartbeatAck(msgspec.Struct, frozen=True, tag="ack"):
    """The loop handled heartbeat ``seq``."""

    seq: int


class StatusReply(msgspec.Struct, frozen=True, tag="status"):
    """The sidecar's state as a JSON document (observe/status.py holds its struct)."""

    document: bytes


class Left(msgspec.Struct, frozen=True, tag="left"):
    """Of the half that said Bye no copy runs any more, and its memory is closed (protocol 2)."""


ToPeer = Welcome | Refused | Registered | Ready | HeartbeatAck | StatusReply | Left

_encoder = msgspec.msgpack.Encoder()
_from_peer: msgspec.msgpack.Decoder[FromPeer] = msgspec.msgpack.Decoder(FromPeer)
_to_peer: msgspec.msgpack.Decoder[ToPeer] = msgspec.msgpack.Decoder(ToPeer)


def encode(message: FromPeer | ToPeer) -> bytes:
    """Return the framed bytes of one message."""
    body = _encoder.encode(message)
    if len(body) > attach_bytes_max:
        raise WireError(f"attach message of {len(body)} bytes is over {attach_bytes_max}")
    return LENGTH.pack(len(body)) + body


def read_from_peer(body: bytes) -> FromPeer:
    """Decode a body sent by a half. Raises WireError when it is no such message."""
    try:
        return _from_peer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no attach message of ours: {brief(error)}") from error


def read_to_peer(body: bytes) -> ToPeer:
    """Decode a body sent by the sidecar. Raises WireError when it is no such message."""
    try:
        return _to_peer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no attach message of ours: {brief(error)}") from error


class Reassembler:
    """Cut a byte stream back into message bodies, keeping at most one partial message."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes and return the complete bodies. Raises WireError over the bound."""
        self._buffer += data
        bodies: list[bytes] = []
        while len(self._buffer) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer)
            if size > attach_bytes_max:
                raise WireError(f"attach message of {size} bytes is over {attach_bytes_max}")
            end = LENGTH.size + size
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[LENGTH.size : end]))
            del self._buffer[:end]
        return bodies

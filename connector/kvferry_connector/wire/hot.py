"""Messages of the hot channel (ZeroMQ DEALER <-> ROUTER), by direction.

One ZeroMQ message is ``[header, body, *raw]``: see codec.py. Raw frames carry bulk numbers
(hashes, block ids) so that they are never re-encoded. Every kind says which raw frames it has.
"""

from __future__ import annotations

import enum

import msgspec

# --- jobs: encoded once by the scheduler half, forwarded byte for byte by the workers ---------


class TableSlice(msgspec.Struct, frozen=True, array_like=True):
    """Block ids of one group: chunks ``[start, start + count)`` of the manager's table.

    A load names all slots of a table (``start`` 0) where they are not one per chunk: states, which
    end in scratch, and tables without their null blocks.

    The ids themselves stand in the job's raw table frame (int32, little endian), slices one
    after the other in the order of ``tables``.
    """

    group: int
    start: int
    count: int


class HandOff(msgspec.Struct, frozen=True, array_like=True):
    """A state block named by the engine: it holds the state after exactly ``end_tokens``."""

    group: int
    block: int
    end_tokens: int


class LoadJob(msgspec.Struct, frozen=True, array_like=True, tag="L"):
    """Bring the leased prefix ``[local_tokens, total_tokens)`` into the engine's blocks.

    Raw frames: [tables]. ``step`` is the value of the fence word ``bound_step`` to wait for.
    """

    job: int
    life: bytes
    version: bytes
    request: str
    admission: int
    step: int
    local_tokens: int
    total_tokens: int
    tables: list[TableSlice]


class SaveJob(msgspec.Struct, frozen=True, array_like=True, tag="S"):
    """Store the chunks that end in ``(start_tokens, end_tokens]``, and the ``hand_offs``.

    Raw frames: [tables, hashes]. ``hashes`` holds the prefix hashes number ``first_hash`` and on
    (``hash_bytes`` each); ``step`` is the value of the fence word ``done_step`` to wait for.
    A table holds 0 where the engine has no block any more (sliding windows) or keeps none.
    ``prefill_tokens``: what this admission's prefill computes; a resend resumes below its end.
    ``junction_tokens``: where the request left a prefix it shares with another one, or 0.
    ``tail_tokens``: a boundary inside a block at which a request can resume, or 0: attention is
    kept up to there too.
    """

    job: int
    life: bytes
    version: bytes
    request: str
    admission: int
    step: int
    start_tokens: int
    end_tokens: int
    first_hash: int
    hash_bytes: int
    tables: list[TableSlice]
    hand_offs: list[HandOff] = []
    prefill_tokens: int = 0
    junction_tokens: int = 0
    tail_tokens: int = 0


Job = LoadJob | SaveJob

# --- half -> sidecar -------------------------------------------------------------------------


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Prefix hashes ``[start, total)`` of a request, raw frame [hashes].

    ``admission`` is unique in the life of the scheduler half and grows. Of a request that starts
    anew (after a preemption or a failed load) the first ``start`` hashes are all of admission
    ``former``'s; ``predecessor`` is hash number ``start - 1`` (empty at 0). A gap or another chain
    is answered by ``NeedFull``. ``trace`` is the request's W3C traceparent, if it has one.
    """

    request: str
    admission: int
    version: bytes
    start: int
    total: int
    num_tokens: int
    hash_bytes: int
    predecessor: bytes
    trace: str = ""
    former: int = 0


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Take (or confirm) the lease of an admission; asking again is free and never doubles it.

    ``local_tokens`` is what the engine has itself, ``max_tokens`` the cap of the hit (the last
    aligned boundary below ``num_tokens``). ``seq`` grows with every ask of this half.
    """

    admission: int
    seq: int
    local_tokens: int
    max_tokens: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Forget these admissions: hashes, hints and leases that no job owns."""

    admissions: list[int]


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """One rank's copy of a job. ``job`` is the encoded Job, raw frames are the job's own."""

    job: bytes


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Stop a job early; its copies drain, then each rank gets its outcome."""

    job: int


class JobStatus(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """What became of this job on my rank? Answered by Outcome or JobState."""

    job: int


class OutcomeAck(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """These outcomes arrived; the sidecar may forget them."""

    jobs: list[int]


FromHalf = Probe | Ask | Release | Submit | Cancel | JobStatus | OutcomeAck

# --- sidecar -> half -------------------------------------------------------------------------


class Hint(msgspec.Struct, frozen=True, array_like=True, tag="H"):
    """What a probe found, unleased: tokens of the longest prefix, over ``total`` hashes."""

    admission: int
    hit_tokens: int
    total: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="A"):
    """Answer to Ask ``seq``: ``hit_tokens`` are leased (0: nothing is).

    ``sources`` splits the tokens of ``(local_tokens, hit_tokens]`` by tier name; ``reason`` says
    why it is not more (reasons.py of the sidecar).
    """

    admission: int
    seq: int
    hit_tokens: int
    sources: dict[str, int]
    reason: str = ""


class NeedFull(msgspec.Struct, frozen=True, array_like=True, tag="N"):
    """Nothing is known of this admission, or not what its probe continues: send it from 0."""

    admission: int


class Outcome(msgspec.Struct, frozen=True, array_like=True, tag="O"):
    """The one end of a job on one rank, sent until acknowledged, after its copies stopped.

    ``status`` is one of "done", "failed", "cancelled"; ``shorter_tokens`` the longest shorter
    prefix that is still complete in all groups (failed loads).
    """

    job: int
    rank: int
    status: str
    reason: str
    moved_bytes: int
    seconds: float
    shorter_tokens: int = 0


class JobState(msgspec.Struct, frozen=True, array_like=True, tag="J"):
    """Answer to JobStatus: "running", or "unknown" (a late submit of it will be refused)."""

    job: int
    state: str


class Error(msgspec.Struct, frozen=True, array_like=True, tag="E"):
    """A frame was refused or its handler failed: what, why, and the remedy."""

    code: str
    message: str
    remedy: str
    job: int = 0
    admission: int = 0


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="T"):
    """The save committed these objects, by group and end token; none where all were stored before.

    Only for an engine that asked (RegisterEngine.kv_events), so an older half never meets it.
    """

    job: int
    ends: dict[int, list[int]]


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="D"):
    """Objects of the engine's saves left the pool, by group and prefix hash; as Stored."""

    hashes: dict[int, list[bytes]]


FromSidecar = Stored | Removed | Hint | Answer | NeedFull | Outcome | JobState | Error


class JobStatusName(enum.StrEnum):
    """The three ends of a job on a rank."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

"""What a save names: per group the objects to store, their keys and the blocks they lie in."""

from __future__ import annotations

import msgspec
import numpy as np
from kvferry_connector.wire.hot import SaveJob
from numpy.typing import NDArray

from kvferry_sidecar.masks.kinds import FULL_FAMILY
from kvferry_sidecar.masks.objects import handed_over, partial_tail
from kvferry_sidecar.masks.rules import Rules
from kvferry_sidecar.masks.store import kept_boundaries, kept_chunks
from kvferry_sidecar.outcomes.reasons import Decline, Reason
from kvferry_sidecar.plan.chunk_keys import keys_of_ends, keys_of_run
from kvferry_sidecar.plan.tables import Fault, Table, blocks_of_run, held_chunks, pick_blocks
from kvferry_sidecar.stages.shape import GroupShape, SessionShape

_hash_bytes_max = 64


class GroupPlan(msgspec.Struct, frozen=True):
    """Objects (n,) of one group: their ends, keys (n, 16) and the engine's blocks."""

    shape: GroupShape
    ends: NDArray[np.int64]  # tokens of the objects' ends, ascending
    keys: NDArray[np.uint8]
    blocks: NDArray[np.int32]


def form_fault(
    job: SaveJob, raw: list[bytes], shape: SessionShape, hashes_max: int
) -> Decline | None:
    """Return why the job's own numbers do not fit, or None."""
    if len(raw) != 2:
        return Decline(Reason.FRAMES, f"a save has 2 raw frames, {len(raw)} came")
    if not 1 <= job.hash_bytes <= _hash_bytes_max or len(raw[1]) % job.hash_bytes:
        return Decline(
            Reason.HASHES, f"{len(raw[1])} bytes are no hashes of {job.hash_bytes} bytes"
        )
    if not 0 <= job.start_tokens <= job.end_tokens or job.first_hash < 0:
        span = f"({job.start_tokens}, {job.end_tokens}] from hash {job.first_hash}"
        return Decline(Reason.TABLES, f"tokens {span} are no range")
    hashes = job.first_hash + len(raw[1]) // job.hash_bytes
    if hashes > hashes_max:
        return Decline(Reason.HASHES_MAX, f"hashes from {job.first_hash} on end over the bound")
    if job.end_tokens > hashes * shape.hash_block_tokens:
        return Decline(Reason.HASHES, f"the hashes end before token {job.end_tokens}")
    kinds = {g.group: g for g in shape.groups} if job.hand_offs else {}
    for hand_off in job.hand_offs:
        shaped = kinds.get(hand_off.group)
        if shaped is None or not 1 <= hand_off.block < shaped.num_blocks:
            what = f"block {hand_off.block} of group {hand_off.group}"
            return Decline(Reason.TABLES, f"hand-off of {what}, which does not exist")
        if shaped.save_rule != "hand-offs":
            return Decline(Reason.TABLES, f"group {hand_off.group} takes no hand-offs")
    return None


def plan_group(
    rules: Rules,
    shaped: GroupShape,
    namespace: bytes,
    job: SaveJob,
    bulk: tuple[dict[int, Table], bytes],
) -> GroupPlan | Decline:
    """Return what a save stores of a group; ``bulk``: the job's tables and hashes."""
    if shaped.save_rule == "hand-offs":
        return _plan_states(rules, shaped, namespace, job, bulk[1])
    whole = shaped.kind in FULL_FAMILY and shaped.block_tokens % rules.hash_block == 0
    if whole and shaped.save_rule == "all" and not job.tail_tokens:
        return _plan_run(rules, shaped, namespace, job, bulk)
    return _plan_kept(rules, shaped, namespace, job, bulk)


def _plan_run(
    rules: Rules,
    shaped: GroupShape,
    namespace: bytes,
    job: SaveJob,
    bulk: tuple[dict[int, Table], bytes],
) -> GroupPlan | Decline:
    """Full attention keeps every chunk: numbers instead of masks, as it saves block by block."""
    tables, hashes = bulk
    block, per_chunk = shaped.block_tokens, shaped.block_tokens // rules.hash_block
    first = job.start_tokens // block
    last = max(first, job.end_tokens // block)
    ends = np.arange((first + 1) * block, (last + 1) * block, block)
    if first == last:
        return GroupPlan(shaped, ends, np.empty((0, 16), np.uint8), np.empty(0, np.int32))
    blocks = blocks_of_run(tables, shaped.group, (first, last), shaped.num_blocks)
    if isinstance(blocks, Fault):
        return Decline(Reason.TABLES, blocks.text)
    keys = keys_of_run(
        namespace, shaped.group, hashes, (first, last), per_chunk,
        hash_bytes=job.hash_bytes, first_hash=job.first_hash,
    )  # fmt: skip
    if isinstance(keys, Fault):
        return Decline(Reason.HASHES, keys.text)
    return GroupPlan(shaped, ends, keys, blocks)


def _plan_kept(
    rules: Rules,
    shaped: GroupShape,
    namespace: bytes,
    job: SaveJob,
    bulk: tuple[dict[int, Table], bytes],
) -> GroupPlan | Decline:
    tables, hashes = bulk
    chunks = kept_chunks(
        rules,
        shaped.group,
        start_tokens=job.start_tokens,
        tokens=job.end_tokens,
        boundaries=kept_boundaries(rules, job.prefill_tokens, job.junction_tokens),
    )
    ends = (chunks + 1) * shaped.block_tokens
    if job.tail_tokens:
        chunks, ends = _with_tail(rules, shaped, job, (chunks, ends))
    if shaped.save_rule != "all":  # what left the window is gone, and no fault
        held = np.isin(chunks, held_chunks(tables, shaped.group, chunks))
        chunks, ends = chunks[held], ends[held]
    blocks = pick_blocks(tables, shaped.group, chunks, shaped.num_blocks)
    if isinstance(blocks, Fault):
        return Decline(Reason.TABLES, blocks.text)
    return _keyed(rules, shaped, namespace, job, (ends, blocks, hashes))


def _with_tail(
    rules: Rules,
    shaped: GroupShape,
    job: SaveJob,
    whole: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return chunks and ends with what is kept of a chunk that a request can resume inside."""
    tail = partial_tail(
        rules,
        shaped.group,
        boundary=job.tail_tokens,
        computed_tokens=job.end_tokens,
        hashed_tokens=job.end_tokens,
    )
    inside = tail.ends % shaped.block_tokens != 0  # the last one, if any: the others are whole
    chunks, ends = whole
    return np.append(chunks, tail.chunks[inside]), np.append(ends, tail.ends[inside])


def _plan_states(
    rules: Rules, shaped: GroupShape, namespace: bytes, job: SaveJob, hashes: bytes
) -> GroupPlan | Decline:
    """States come by hand-off only: no table says which boundary a slot's state is at."""
    states = [state for state in job.hand_offs if state.group == shaped.group]
    for state in states:
        refused = handed_over(
            rules,
            shaped.group,
            block=state.block,
            end_tokens=state.end_tokens,
            prefill_tokens=job.prefill_tokens,
        )
        if refused is not None:
            return Decline(Reason.TABLES, refused.reason)
    ends = np.array([state.end_tokens for state in states], dtype=np.int64)
    blocks = np.array([state.block for state in states], dtype=np.int32)
    return _keyed(rules, shaped, namespace, job, (ends, blocks, hashes))


def _keyed(
    rules: Rules,
    shaped: GroupShape,
    namespace: bytes,
    job: SaveJob,
    found: tuple[NDArray[np.int64], NDArray[np.int32], bytes],
) -> GroupPlan | Decline:
    """Return the plan of objects by their end tokens (n,), blocks (n,), and the job's hashes."""
    ends, blocks, hashes = found
    if not len(ends):
        return GroupPlan(shaped, ends, np.empty((0, 16), np.uint8), blocks)
    keys = keys_of_ends(
        namespace,
        shaped.group,
        hashes,
        ends // rules.hash_block - 1,
        hash_bytes=job.hash_bytes,
        first_hash=job.first_hash,
    )
    if isinstance(keys, Fault):
        return Decline(Reason.HASHES, keys.text)
    return GroupPlan(shaped, ends, keys, blocks)

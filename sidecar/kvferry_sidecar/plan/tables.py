"""Block tables of a job: cut the raw frame, pick the blocks that a mask names.

Full tables are indexed by chunk, so expansion is a lookup; a table with fewer slots than chunks
must have exactly those of the load mask (masks/expand.py), or it is refused. Block id 0 is vLLM's
null block and never the end of a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from kvferry_connector.wire.hot import TableSlice
from numpy.typing import NDArray

from kvferry_sidecar.masks.expand import expand_load
from kvferry_sidecar.masks.kinds import Kind
from kvferry_sidecar.masks.load import needed_chunks
from kvferry_sidecar.masks.rules import GroupRule, Refused

_ID_BYTES = 4
_FEW = 32  # numbers that Python compares in less time than NumPy needs to begin


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a job's tables or hashes cannot be used."""

    text: str


class Table(msgspec.Struct, frozen=True, gc=False):
    """Block ids (count,) int32 of the chunks from ``start`` on, of one group."""

    group: int
    start: int
    ids: NDArray[np.int32]


def read_tables(slices: Sequence[TableSlice], raw: bytes) -> dict[int, Table] | Fault:
    """Cut the raw table frame into one table per group."""
    tables: dict[int, Table] = {}
    at = 0
    for piece in slices:
        if piece.start < 0 or piece.count < 0:
            return Fault(f"group {piece.group}: slice {piece.start}+{piece.count}")
        if piece.group in tables:
            return Fault(f"group {piece.group} has two slices")
        end = at + piece.count * _ID_BYTES
        if end > len(raw):
            return Fault(f"the slices name more ids than the {len(raw)} bytes hold")
        ids = np.frombuffer(raw, dtype="<i4", count=piece.count, offset=at)
        tables[piece.group] = Table(piece.group, piece.start, ids.astype(np.int32, copy=False))
        at = end
    if at != len(raw):
        return Fault(f"the slices name {at} bytes of ids, the frame has {len(raw)}")
    return tables


def held_chunks(
    tables: Mapping[int, Table], group: int, chunks: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return those of ``chunks`` (ascending) for which the group's table names a block."""
    table = tables.get(group)
    if table is None:
        return chunks[:0]
    named = chunks[(chunks >= table.start) & (chunks < table.start + len(table.ids))]
    held: NDArray[np.int64] = named[table.ids[named - table.start] != 0]
    return held


def pick_blocks(
    tables: Mapping[int, Table], group: int, chunks: NDArray[np.int64], num_blocks: int
) -> NDArray[np.int32] | Fault:
    """Return the block id of each chunk (n,), every one in ``1 .. num_blocks - 1``."""
    if not len(chunks):
        return np.empty(0, dtype=np.int32)
    table = tables.get(group)
    if table is None:
        return Fault(f"group {group} has no table")
    first, last = int(chunks[0]), int(chunks[-1])
    if first < table.start or last >= table.start + len(table.ids):
        return Fault(
            f"group {group}: chunks {first}..{last} are needed, the table covers "
            f"{table.start}..{table.start + len(table.ids) - 1}"
        )
    return _in_range(group, chunks, table.ids[chunks - table.start], num_blocks)


def blocks_of_run(
    tables: Mapping[int, Table], group: int, chunks: tuple[int, int], num_blocks: int
) -> NDArray[np.int32] | Fault:
    """Return the block ids of the chunks ``first <= i < last``, at least one, in place."""
    table, (first, last) = tables.get(group), chunks
    if table is not None and table.start <= first and last - table.start <= len(table.ids):
        ids = table.ids[first - table.start : last - table.start]
        least, most = least_most(ids)
        if least >= 1 and most < num_blocks:
            return ids
    return pick_blocks(tables, group, np.arange(first, last), num_blocks)  # which says why not


def least_most(numbers: NDArray[np.integer]) -> tuple[int, int]:
    """Return the least and the greatest of some numbers; there is at least one."""
    if len(numbers) <= _FEW:
        few = numbers.tolist()
        return min(few), max(few)
    return int(numbers.min()), int(numbers.max())


def load_blocks(
    tables: Mapping[int, Table],
    group: int,
    rule: GroupRule,
    *,
    span: tuple[int, int],
    scratch_slots: int,
    num_blocks: int,
) -> NDArray[np.int32] | Fault:
    """Return where a load of the tokens ``span`` (local, total) puts each chunk that it needs.

    A table that is not one slot per chunk comes whole, and is expanded by the load mask.
    """
    local, total = span
    chunks = needed_chunks(rule, local_tokens=local, total_tokens=total)
    table = tables.get(group)
    positional = table is None or table.start or len(table.ids) >= -(-total // rule.block)
    if table is None or (positional and rule.kind is not Kind.MAMBA):
        return pick_blocks(tables, group, chunks, num_blocks)
    if table.start:
        return Fault(f"group {group}: the table of a {rule.kind} group must come whole")
    blocks = expand_load(
        rule, table.ids, total_tokens=total, local_tokens=local, scratch_slots=scratch_slots
    )
    if isinstance(blocks, Refused):
        return Fault(f"group {group}: {blocks.reason}")
    return _in_range(group, blocks.chunks, blocks.ids.astype(np.int32), num_blocks)


def _in_range(
    group: int, chunks: NDArray[np.int64], blocks: NDArray[np.int32], num_blocks: int
) -> NDArray[np.int32] | Fault:
    if not len(blocks):  # all of the load is there already
        return blocks
    least, most = least_most(blocks)
    if least < 1 or most >= num_blocks:
        at = int(np.flatnonzero((blocks < 1) | (blocks >= num_blocks))[0])
        return Fault(
            f"group {group}: chunk {int(chunks[at])} has block {int(blocks[at])}, "
            f"not one of 1..{num_blocks - 1}"
        )
    return blocks

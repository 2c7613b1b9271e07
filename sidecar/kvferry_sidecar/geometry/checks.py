"""Checks of a registration, from the outside in; each returns the refusals it found.

Order matters: sizes bound what the later checks loop over, groups say which layers exist, and
placements say where each lies. Every check assumes that the ones before it found nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from kvferry_connector.wire.attach import FieldRefusal, Group, Placement, RegisterRank

from kvferry_sidecar.geometry.digest import run_bytes
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.masks.kinds import REFUSED_KINDS, WINDOWED, Kind

# Block ids travel as int32 and offsets as int64; addresses of a process end far below that.
NUM_BLOCKS_MAX = 2**31 - 1
BLOCK_TOKENS_MAX = 1 << 24
OFFSET_MAX = 2**62
BLOCK_MIN = 2  # block 0 is null and never copied: one block is no cache

_REPORT = "this is a defect of the connector's description: report it with this text"
SERVED_KINDS = tuple(kind for kind in Kind if kind is not Kind.RING)
SCRATCH_BLOCKS_MAX = 1 << 10  # of one request: one per speculative token
_NO_WAY = "run this model without kvferry"


class Sized(Protocol):
    """Something mapped, of a known size."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the mapping."""


def check_sizes(register: RegisterRank, limits: Limits) -> list[FieldRefusal]:
    """Bound everything that is looped over or kept."""
    found: list[FieldRefusal] = []
    layers = sum(len(group.layers) for group in register.groups)
    placed = sum(len(place.layers) for place in register.placements)
    for name, count, bound, key in (
        ("groups", len(register.groups), limits.groups_max, "groups_max"),
        ("groups[].layers", layers, limits.layers_max, "layers_max"),
        ("placements", len(register.placements), limits.layers_max, "layers_max"),
        ("placements[].layers", placed, limits.layers_max, "layers_max"),
        ("identity", len(register.identity), limits.facts_max, "facts_max"),
        *((f"groups[{group.group}].spec", len(group.spec), limits.facts_max, "facts_max")
          for group in register.groups),
    ):  # fmt: skip
        if count > bound:
            found.append(
                FieldRefusal(name, f"{count} entries", f"at most {bound}", f"raise limits.{key}")
            )
    if found:
        return found
    longest = max((len(text) for text in _texts(register)), default=0)
    if longest > limits.text_chars_max:
        remedy = "shorten the longest layer name or identity value, or raise limits.text_chars_max"
        ours = f"at most {limits.text_chars_max}"
        found.append(FieldRefusal("text", f"{longest} characters", ours, remedy))
    return found


def check_numbers(register: RegisterRank) -> list[FieldRefusal]:
    """Check the numbers that hold for the whole rank."""
    shard = register.shard
    found = list(
        _outside(
            ("serial", register.serial, 0, OFFSET_MAX),
            ("num_blocks", register.num_blocks, BLOCK_MIN, NUM_BLOCKS_MAX),
            ("hash_block_tokens", register.hash_block_tokens, 1, BLOCK_TOKENS_MAX),
            ("shard.tp_size", shard.tp_size, 1, 1 << 16),
            ("shard.pp_size", shard.pp_size, 1, 1 << 16),
            ("shard.dcp_size", shard.dcp_size, 1, 1 << 16),
            ("shard.tp_rank", shard.tp_rank, 0, shard.tp_size - 1),
            ("shard.pp_rank", shard.pp_rank, 0, shard.pp_size - 1),
            ("shard.dcp_rank", shard.dcp_rank, 0, shard.dcp_size - 1),
        )
    )
    if not found and shard.tp_size % shard.dcp_size:
        ours = f"a divisor of tp_size {shard.tp_size}"
        found.append(FieldRefusal("shard.dcp_size", str(shard.dcp_size), ours, _REPORT))
    return found


def check_groups(register: RegisterRank) -> list[FieldRefusal]:
    """Check ids, kinds, block sizes and layer names of the groups."""
    ids = [group.group for group in register.groups]
    if ids != list(range(len(ids))):
        return [FieldRefusal("groups[].group", str(ids), str(list(range(len(ids)))), _REPORT)]
    if not any(group.cacheable for group in register.groups):
        remedy = f"{_NO_WAY}: it has no group whose blocks can be shared"
        return [FieldRefusal("groups", "no cacheable group", "at least one", remedy)]
    found: list[FieldRefusal] = []
    owner: dict[str, int] = {}
    for group in register.groups:
        if group.cacheable:
            found += _check_group(group, register)
        for layer in group.layers:
            if layer in owner:
                name = f"groups[{group.group}].layers"
                ours = f"once; it is also in group {owner[layer]}"
                found.append(FieldRefusal(name, layer, ours, _REPORT))
            owner[layer] = group.group
    return found


def check_placements(register: RegisterRank, memories: Mapping[int, Sized]) -> list[FieldRefusal]:
    """Check each placement by itself, and that every layer is placed exactly once.

    Groups that are not cacheable are never read or written: their placements are not looked at.
    """
    found: list[FieldRefusal] = []
    groups = {group.group: group for group in register.groups}
    missing = {(g.group, layer) for g in register.groups if g.cacheable for layer in g.layers}
    buffers: dict[int, int] = {}
    for index, place in enumerate(register.placements):
        name = f"placements[{index}]"
        group = groups.get(place.group)
        if group is None:
            ours = f"one of {sorted(groups)}"
            found.append(FieldRefusal(f"{name}.group", str(place.group), ours, _REPORT))
            continue
        if not group.cacheable:
            continue
        for layer in place.layers:
            if (place.group, layer) not in missing:
                why = "placed once" if layer in group.layers else f"a layer of group {place.group}"
                found.append(FieldRefusal(f"{name}.layers", layer, why, _REPORT))
            missing.discard((place.group, layer))
        memory = memories.get(place.buffer)
        if memory is None:
            ours = f"one of {sorted(memories)}"
            found.append(FieldRefusal(f"{name}.buffer", str(place.buffer), ours, _REPORT))
        elif buffers.setdefault(place.group, place.buffer) != place.buffer:
            ours = f"{buffers[place.group]}, like the group's other layers"
            found.append(FieldRefusal(f"{name}.buffer", str(place.buffer), ours, _REPORT))
        else:
            found += _check_placement(name, place, register.num_blocks, memory.total_bytes)
    for number, layer in sorted(missing):
        found.append(FieldRefusal(f"groups[{number}].layers", layer, "a placement for it", _REPORT))
    return found


def _check_group(group: Group, register: RegisterRank) -> list[FieldRefusal]:
    name = f"groups[{group.group}]"
    hash_block_tokens, tp_size = register.hash_block_tokens, register.shard.tp_size
    if group.kind not in SERVED_KINDS:
        detail = f" ({group.detail})" if group.detail else ""
        why = REFUSED_KINDS.get(group.kind, "its masks are not known")
        served = f"one of {', '.join(SERVED_KINDS)}: {why}"
        return [FieldRefusal(f"{name}.kind", f"{group.kind}{detail}", served, _NO_WAY)]
    found = list(_outside((f"{name}.block_tokens", group.block_tokens, 1, BLOCK_TOKENS_MAX)))
    if not found and group.block_tokens % hash_block_tokens:
        ours = f"a multiple of hash_block_tokens {hash_block_tokens}"
        remedy = "choose a --block-size that the hash block size divides"
        theirs = str(group.block_tokens)
        found.append(FieldRefusal(f"{name}.block_tokens", theirs, ours, remedy))
    if group.tp_replicas < 1 or tp_size % group.tp_replicas:
        ours = f"a divisor of tp_size {tp_size}"
        theirs = str(group.tp_replicas)
        found.append(FieldRefusal(f"{name}.tp_replicas", theirs, ours, _REPORT))
    return found or list(_kind_numbers(name, group))


def _kind_numbers(name: str, group: Group) -> Iterator[FieldRefusal]:
    """Check the numbers that a kind has, and that it has no others."""
    most = BLOCK_TOKENS_MAX
    windowed, chunked = group.kind in WINDOWED, group.kind == Kind.CHUNKED
    scratch_max = SCRATCH_BLOCKS_MAX if group.kind == Kind.MAMBA else 0
    yield from _outside(
        (f"{name}.window_tokens", group.window_tokens, int(windowed), most if windowed else 0),
        (f"{name}.window_extra_tokens", group.window_extra_tokens, 0, most if windowed else 0),
        (f"{name}.chunk_tokens", group.chunk_tokens, int(chunked), most if chunked else 0),
        (f"{name}.scratch_blocks", group.scratch_blocks, 0, scratch_max),
    )


def _check_placement(
    name: str, place: Placement, num_blocks: int, total_bytes: int
) -> list[FieldRefusal]:
    """Check the numbers of one placement, then that its last byte lies inside the mapping."""
    found = list(
        _outside(
            (f"{name}.offset", place.offset, 0, total_bytes),
            (f"{name}.page_bytes", place.page_bytes, 1, total_bytes),
            (f"{name}.block_stride", place.block_stride, 1, OFFSET_MAX),
            (f"{name}.layer_stride", place.layer_stride, 0, OFFSET_MAX),
            (f"{name}.runs", place.runs, 1, total_bytes),
            (f"{name}.run_bytes", run_bytes(place), 1, place.page_bytes),
            (f"{name}.run_stride", place.run_stride, 0, OFFSET_MAX),
        )
    )
    if found:
        return found
    data_bytes = place.runs * run_bytes(place)
    if data_bytes > place.page_bytes:
        theirs = f"{place.runs} runs of {run_bytes(place)} bytes = {data_bytes}"
        ours = f"at most page_bytes {place.page_bytes}"
        return [FieldRefusal(f"{name}.runs", theirs, ours, _REPORT)]
    spread = (place.runs - 1) * place.run_stride + run_bytes(place)
    # Dense pages end with page_bytes. Where heads lie outside the blocks, runs spread beyond it.
    page_end = spread if spread > place.page_bytes else place.page_bytes
    last = (max(len(place.layers), 1) - 1) * place.layer_stride
    end = place.offset + last + (num_blocks - 1) * place.block_stride + page_end
    if end > total_bytes:
        theirs = f"last byte of block {num_blocks - 1} at {end - 1}"
        ours = f"inside buffer {place.buffer} of {total_bytes} bytes"
        found.append(FieldRefusal(name, theirs, ours, _REPORT))
    return found


def _outside(*rules: tuple[str, int, int, int]) -> Iterator[FieldRefusal]:
    """Yield a refusal per (field, value, least, most) whose value is outside."""
    for name, value, least, most in rules:
        if not least <= value <= most:
            yield FieldRefusal(name, str(value), f"{least} to {most}", _REPORT)


def _texts(register: RegisterRank) -> Iterable[str]:
    yield register.layout
    for facts in (register.identity, *(group.spec for group in register.groups)):
        for key, value in facts.items():
            yield key
            yield value
    for group in register.groups:
        yield from (group.kind, group.detail, *group.layers)
    for place in register.placements:
        yield from place.layers

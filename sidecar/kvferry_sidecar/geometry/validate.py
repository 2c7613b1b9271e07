"""From a rank's registration to what a copy needs, or to a refusal field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
from kvferry_connector.wire.attach import FieldRefusal, Group, Placement, RegisterRank
from kvferry_native import Layout
from kvferry_native import Mapping as HostMemory
from numpy.typing import NDArray

from kvferry_sidecar.geometry import checks
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory, make_layout
from kvferry_sidecar.geometry.digest import geometry_digest, run_bytes
from kvferry_sidecar.geometry.runs import Run, find_overlap, merge
from kvferry_sidecar.keys import canonical
from kvferry_sidecar.limits import DEFAULT_LIMITS, Limits
from kvferry_sidecar.masks.kinds import FULL_FAMILY, Kind
from kvferry_sidecar.sessions.model import RankGeometry, RankGroup

Memory = HostMemory | DeviceMemory

# Facts of a group that vLLM's comparison of specs does not know.
_NOT_SPEC = frozenset({"backends", "kernel_blocks", "members"})


class MakeLayout(Protocol):
    """The constructor of a layout for the engine that reaches the memory."""

    def __call__(
        self,
        mapping: Memory,
        offsets: NDArray[np.int64],
        strides: NDArray[np.int64],
        lengths: NDArray[np.int64],
        num_blocks: int,
    ) -> Layout | CudaLayout:
        """Return the layout; ValueError when a run leaves the mapping."""


def validate_rank(
    register: RegisterRank,
    memories: Mapping[int, Memory],
    *,
    limits: Limits = DEFAULT_LIMITS,
    make_layout: MakeLayout = make_layout,
) -> RankGeometry | list[FieldRefusal]:
    """Check a registration against the mapped memory and build its geometry.

    ``memories``: the rank's mapped buffers by number. Returns the geometry, or every refusal of
    the first check that found any: field, their value, what fits, remedy. Payload order is the
    group's order of layers, then the order of a page's runs.
    """
    found = (
        checks.check_sizes(register, limits)
        or checks.check_numbers(register)
        or checks.check_groups(register)
        or checks.check_placements(register, memories)
    )
    if found:
        return found
    placed = {
        (place.group, layer): place for place in register.placements for layer in place.layers
    }
    groups: list[RankGroup] = []
    for group in register.groups:
        built = _build_group(register, group, memories, limits, make_layout)
        if isinstance(built, FieldRefusal):
            found.append(built)
        else:
            groups.append(built)
    if found:
        return found
    shard = register.shard
    return RankGeometry(
        serial=register.serial,
        groups=tuple(groups),
        identity=dict(register.identity),
        digest=geometry_digest(register, placed),
        hash_block_tokens=register.hash_block_tokens,
        position=(shard.tp_rank, shard.pp_rank, shard.dcp_rank),
    )


def _build_group(
    register: RegisterRank,
    group: Group,
    memories: Mapping[int, Memory],
    limits: Limits,
    make_layout: MakeLayout,
) -> RankGroup | FieldRefusal:
    """Return the group with its layout; groups alias the same bytes, layers of one must not."""
    places = [place for place in register.placements if place.group == group.group]
    layout = None
    if group.cacheable and group.layers:
        name = f"groups[{group.group}].layers"
        count = sum(place.runs * len(place.layers) for place in places)
        if count > limits.runs_max:
            bound = f"at most {limits.runs_max}"
            return FieldRefusal(name, f"{count} runs a block", bound, "raise limits.runs_max")
        runs = list(_runs_of(group, places))
        if overlap := find_overlap(runs, register.num_blocks):
            return _overlap_refusal(name, *overlap)
        runs = merge(runs)
        try:
            layout = make_layout(
                memories[places[0].buffer],
                np.array([run.offset for run in runs], dtype=np.int64),
                np.array([run.stride for run in runs], dtype=np.int64),
                np.array([run.length for run in runs], dtype=np.int64),
                register.num_blocks,
            )
        except ValueError as error:  # its own bounds test, kept as the last word
            return FieldRefusal(name, str(error), "runs inside the mapping", "report this text")
    return RankGroup(
        group=group.group,
        kind=group.kind,
        block_tokens=group.block_tokens,
        layout=layout,
        payload_bytes=layout.payload_bytes if layout else 0,
        num_blocks=register.num_blocks,
        save_rule=_save_rule(group),
        window_tokens=group.window_tokens,
        window_extra_tokens=group.window_extra_tokens,
        chunk_tokens=group.chunk_tokens,
        scratch_blocks=group.scratch_blocks,
        eagle=group.eagle,
        tp_replicas=group.tp_replicas,
        layers=len(group.layers),
        spec=canonical.encode(
            {name: value for name, value in group.spec.items() if name not in _NOT_SPEC}
        ).hex(),
    )


def _save_rule(group: Group) -> str:
    if not group.cacheable:
        return "none"
    if group.kind == Kind.MAMBA:
        return "hand-offs"
    # Of generated tokens R-SWA keeps a window, so its table has holes behind the prompt.
    return "all" if group.kind in FULL_FAMILY - {Kind.RSWA} else "held"


def _runs_of(group: Group, places: list[Placement]) -> Iterator[Run]:
    """Yield the runs of one block in payload order."""
    where = {layer: (place, index) for place in places for index, layer in enumerate(place.layers)}
    for layer in group.layers:
        place, index = where[layer]
        start = place.offset + index * place.layer_stride
        for number in range(place.runs):
            offset = start + number * place.run_stride
            yield Run(offset, place.block_stride, run_bytes(place), layer)


def _overlap_refusal(name: str, one: Run, two: Run) -> FieldRefusal:
    def text(run: Run) -> str:
        return f"{run.layer}: {run.length} bytes at {run.offset} + block * {run.stride}"

    theirs = text(one) if one == two else f"{text(one)}; {text(two)}"
    what = "blocks" if one.layer == two.layer else "layers"
    remedy = "a wrong stride or offset in the connector's description: report it with this text"
    return FieldRefusal(name, theirs, f"{what} that share no byte", remedy)

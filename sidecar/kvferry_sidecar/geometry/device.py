"""Memory of a GPU as this process sees it, and where one block's bytes lie in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kvferry_native import Layout, Mapping
from numpy.typing import NDArray

_pitch_max = (1 << 31) - 1  # of a 2-D copy


class DeviceMemory:
    """``total_bytes`` of a GPU from ``address`` on, as this process sees them."""

    def __init__(self, ordinal: int, address: int, total_bytes: int) -> None:
        self.ordinal, self.address, self.total_bytes = ordinal, address, total_bytes


@dataclass(frozen=True, slots=True)
class Rect:
    """``count`` runs of ``length`` bytes that lie ``pitch`` apart in every block."""

    offset: int
    stride: int
    length: int
    count: int
    pitch: int


class CudaLayout:
    """Where one block's bytes lie in a GPU's memory: kvferry_native.Layout for device memory.

    Runs are joined to rectangles, which one 2-D copy moves.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        offsets: NDArray[np.int64],
        strides: NDArray[np.int64],
        lengths: NDArray[np.int64],
        num_blocks: int,
    ) -> None:
        """Raise ValueError when a run is empty or leaves the memory in any block."""
        if not len(offsets) == len(strides) == len(lengths) or not len(offsets):
            raise ValueError("layout refused: offsets, strides and lengths must be equally many")
        runs = list(zip(offsets.tolist(), strides.tolist(), lengths.tolist(), strict=True))
        for number, (offset, stride, length) in enumerate(runs):
            ends = (offset, offset + (num_blocks - 1) * stride)
            if length <= 0 or min(ends) < 0 or max(ends) + length > memory.total_bytes:
                raise ValueError(
                    f"layout refused: run {number} (offset {offset}, stride {stride}, length "
                    f"{length}) leaves the memory of {memory.total_bytes} bytes"
                )
        self.memory, self.num_blocks = memory, num_blocks
        self.payload_bytes = int(lengths.sum())
        self.rects = _rects(runs)


def _rects(runs: list[tuple[int, int, int]]) -> list[Rect]:
    rects: list[Rect] = []
    for offset, stride, length in runs:
        last = rects[-1] if rects else None
        if last is not None and (last.stride, last.length) == (stride, length):
            pitch = offset - last.offset if last.count == 1 else last.pitch
            follows = offset == last.offset + last.count * pitch
            if follows and length <= pitch <= _pitch_max:
                rects[-1] = Rect(last.offset, stride, length, last.count + 1, pitch)
                continue
        rects.append(Rect(offset, stride, length, 1, length))
    return rects


def make_layout(
    mapping: Mapping | DeviceMemory,
    offsets: NDArray[np.int64],
    strides: NDArray[np.int64],
    lengths: NDArray[np.int64],
    num_blocks: int,
) -> Layout | CudaLayout:
    """Return the layout for the engine that reaches this memory. Raises ValueError."""
    if isinstance(mapping, DeviceMemory):
        return CudaLayout(mapping, offsets, strides, lengths, num_blocks)
    return Layout(mapping, offsets, strides, lengths, num_blocks)

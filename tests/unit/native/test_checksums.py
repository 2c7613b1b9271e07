"""Checksums behind the caller; native/tests/test_checksums.cpp has the rest."""

from __future__ import annotations

import numpy as np
import pytest
from kvferry_native import Checksums, crc32c


def test_checksums_of_several_threads_are_those_of_one() -> None:
    data = np.random.default_rng(3).integers(0, 256, 3 << 20, np.uint8)
    starts = np.array([0, 5, 1 << 20], np.uint64)
    sizes = np.array([1 << 20, 70, (2 << 20) - 1], np.uint64)
    seeds = np.array([1, 2, 3], np.uint32)
    checksums = Checksums(3)
    assert checksums.end() == []
    checksums.begin(starts + np.uint64(data.ctypes.data), sizes, seeds)
    with pytest.raises(RuntimeError, match="have not ended"):
        checksums.begin(starts, sizes, seeds)
    assert checksums.end() == [
        crc32c(data[start : start + size], seed)
        for start, size, seed in zip(starts.tolist(), sizes.tolist(), seeds.tolist(), strict=True)
    ]
    assert checksums.end() == []


def test_what_cannot_be_summed_is_refused() -> None:
    with pytest.raises(ValueError, match="0 threads; 1 to 256 are possible"):
        Checksums(0)
    one = np.zeros(1, np.uint64)
    with pytest.raises(ValueError, match="1 addresses, 1 sizes, 2 seeds"):
        Checksums(1).begin(one, one, np.zeros(2, np.uint32))

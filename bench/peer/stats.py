"""Medians over rounds, and a confidence interval of a median that assumes nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

RESAMPLES = 5000


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each key over the rounds."""
    return {key: statistics.median(float(one[key]) for one in rounds) for key in rounds[0]}


def median_interval(values: Sequence[float], percent: float = 95.0) -> tuple[float, float]:
    """Return the bootstrap confidence interval of the median; the same for the same values."""
    numbers = np.asarray(values, dtype=float)
    picks = np.random.default_rng(1).integers(0, len(numbers), (RESAMPLES, len(numbers)))
    found = np.median(numbers[picks], axis=1)
    rest = (100.0 - percent) / 2
    low, high = np.percentile(found, [rest, 100.0 - rest])
    return float(low), float(high)

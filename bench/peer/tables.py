"""The table of each row, made of what was measured, and how often that was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.peer import (
    row_first_tokens,
    row_hybrids,
    row_lookups,
    row_moves,
    row_recovery,
    row_steps,
)
from bench.peer.figures import Row

Measured = Mapping[str, Any]

TABLES: dict[int, Callable[[Any], list[Row]]] = {
    1: row_steps.rows,
    2: row_lookups.rows,
    3: row_moves.rows,
    4: row_first_tokens.rows,
    6: row_recovery.rows,
    7: row_hybrids.rows,
}

RUNS: dict[int, Callable[[Any], str]] = {
    1: lambda measured: f"Medians of {measured['rounds']} rounds.",
    2: row_lookups.runs,
    3: lambda measured: f"Medians of {measured['rounds']} rounds; memory once, at their end.",
    4: row_first_tokens.runs,
    6: row_recovery.runs,
    7: lambda _: "A single run of each model: nothing is timed here.",
}

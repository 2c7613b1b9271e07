"""One line of the comparison, and the table made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

LEVEL = 1.05


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both caches.

    ``ahead`` is how many times better kvferry is (above 1: better), None where a ratio says
    nothing; ``target`` is what it should at least be; ``reference`` is the engine without a
    connector. Values may be words ("never", "no").
    """

    name: str
    unit: str
    ferry: float | str
    lmcache: float | str
    ahead: float | None = None
    target: float | None = None
    reference: float | None = None
    note: str = ""

    def verdict(self) -> str:
        """Return "ahead", "level", "behind" or "ahead, short of 5x"; "" where nothing is promised.

        Level is what differs by less than such figures differ between two runs.
        """
        if self.ahead is None or self.target is None:
            return ""
        if 1 / LEVEL < self.ahead < LEVEL:
            return "level"
        if self.ahead < 1:
            return "**behind**"
        return "ahead" if self.ahead >= self.target else f"ahead, short of {self.target:g}x"


def compared(
    name: str, unit: str, ferry: float, lmcache: float, *, larger: bool = False,
    target: float | None = 1.0, reference: float | None = None, note: str = "", why: str = "",
) -> Row:  # fmt: skip
    """Return a row of two numbers; smaller is better unless ``larger``.

    ``why`` is told where kvferry is not ahead, or not by as much as it should be.
    """
    over, under = (ferry, lmcache) if larger else (lmcache, ferry)
    # Net of a floor, a figure may end at or below 0: then no ratio is honest.
    ahead = over / under if over > 0 and under > 0 else None
    if ahead is None:
        note = note or "within the noise of the floor"
    row = Row(name, unit, ferry, lmcache, ahead, target, reference, note)
    told = why and row.verdict() not in ("", "ahead")
    return replace(row, note="; ".join(filter(None, (note, why)))) if told else row


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows for the report."""
    return [asdict(row) | {"verdict": row.verdict()} for row in rows]


def markdown(sections: Mapping[str, Iterable[Row]]) -> str:
    """Return one Markdown table per section."""
    lines = []
    for title, rows in sections.items():
        lines += [f"### {title}", "", "| figure | kvferry | LMCache | no connector | better by | |",
                  "|---|---|---|---|---|---|"]  # fmt: skip
        for row in rows:
            ahead = "" if row.ahead is None else f"{row.ahead:,.2f}x"
            end = row.verdict() + (f" ({row.note})" if row.note else "")
            reference = "" if row.reference is None else _shown(row.reference, row.unit)
            lines.append(
                f"| {row.name} | {_shown(row.ferry, row.unit)} | {_shown(row.lmcache, row.unit)}"
                f" | {reference} | {ahead} | {end.strip()} |"
            )
        lines.append("")
    return "\n".join(lines)


def _shown(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value.replace("|", "\\|")
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {unit}".strip()

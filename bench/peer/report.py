"""What the comparison measured, as Markdown and plots.

``python -m bench.peer.report`` makes both again from bench/results/peer.json.

A report is a JSON object: ``rows`` by title, each with the date, machine and versions of the run
that measured it, its ``table`` and what was ``measured``; a row that failed has an ``error``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.peer.charts import CHARTS
from bench.peer.figures import Row, as_json, markdown
from bench.peer.tables import RUNS, TABLES
from bench.plots import panels

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "peer.json"
DOCS, IMAGES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "images"
BEGIN, END = "<!-- bench-peer writes from here -->", "<!-- to here -->"
Report = Mapping[str, Any]


def merged(before: Report, now: Report) -> dict[str, Any]:
    """Return ``before`` with the rows that were measured now; one that failed replaces none."""
    new = {title: row for title, row in now["rows"].items() if "error" not in row}
    rows = {**before["rows"], **new}
    return {"rows": {title: rows[title] for title in sorted(rows)}}


def as_text(report: Report) -> str:
    """Return the report as Markdown; plots are named, not drawn."""
    parts = [_origins(report)]
    for title, row in report["rows"].items():
        if "error" in row:
            parts.append(f"{title} failed: {row['error'].splitlines()[0]}\n")
            continue
        table = markdown({title: [_row(one) for one in row["table"]]})
        if "measured" in row:
            heading, rest = table.split("\n", 1)
            table = f"{heading}\n\n{RUNS[_number(title)](row['measured'])}\n{rest}"
        parts.append(table)
        if chart := CHARTS.get(_number(title)):
            parts.append(f"![{title}](images/{chart[0]}.svg)\n")
    return "\n".join(parts)


def draw(report: Report, folder: Path = IMAGES) -> list[Path]:
    """Draw the rows that have plots. Raises ImportError without matplotlib."""
    drawn = []
    for title, row in report["rows"].items():
        if "measured" in row and (chart := CHARTS.get(_number(title))):
            name, above, of = chart
            drawn.append(panels(folder / f"{name}.svg", of(row["measured"]), title=above))
    return drawn


def write(report: Report) -> None:
    """Write the document's part and the plots, those only where matplotlib is."""
    DOCS.write_text(replaced(DOCS.read_text(), as_text(report)))
    try:
        draw(report)
    except ImportError as error:
        print(f"no plots ({error}): pip install -e '.[bench]', then python -m bench.peer.report")


def replaced(text: str, table: str) -> str:
    """Return the document with another table between its marks. Raises ValueError without them."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{DOCS} lacks {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n\n{table.strip()}\n\n{END}{after}"


def tabled(report: Report) -> dict[str, Any]:
    """Return the report with its tables made anew of what was measured."""
    rows = {
        title: {**row, "table": as_json(TABLES[_number(title)](row["measured"]))}
        for title, row in report["rows"].items()
    }
    return {"rows": rows}


def _number(title: str) -> int:
    return int(title.split(maxsplit=1)[0].rstrip("."))  # "3 and 5. ..." is row 3


def _row(stored: Mapping[str, Any]) -> Row:
    return Row(**{name: value for name, value in stored.items() if name != "verdict"})


def _origins(report: Report) -> str:
    """Return which rows were measured when, where and of what: one line per run."""
    runs: dict[str, list[str]] = {}
    for title, row in report["rows"].items():
        box = row["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        told = (
            f"{row['date']}, {box['cpu']}, {box['cores']} cores, load"
            f" {box['load_average']:.1f} at the start; {versions}."
        )
        runs.setdefault(told, []).append(title.partition(".")[0])
    return "".join(
        f"* Row{'s' * (len(of) > 1)} {', '.join(of)}: {run}\n" for run, of in runs.items()
    )


def main() -> None:
    """Make tables and plots again of what is stored."""
    report = tabled(json.loads(RESULTS.read_text()))
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    write(report)


if __name__ == "__main__":
    main()

"""The comparison with LMCache: its statistics, its ratios and verdicts, its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.peer import report, run, tables
from bench.peer.charts import CHARTS
from bench.peer.figures import Row, as_json, compared, markdown
from bench.peer.report import BEGIN, DOCS, END, IMAGES, RESULTS, as_text, merged, replaced, tabled
from bench.peer.rig import turns
from bench.peer.row_recovery import over
from bench.peer.run import main
from bench.peer.stats import median_interval, medians
from bench.plots import Panel


@pytest.mark.parametrize(
    ("row", "ahead", "verdict"),
    [
        (compared("smaller wins", "us", 2.0, 12.0), 6.0, "ahead"),
        (compared("smaller wins", "us", 2.0, 12.0, target=5.0), 6.0, "ahead"),
        (compared("smaller wins", "us", 2.0, 8.0, target=5.0), 4.0, "ahead, short of 5x"),
        (compared("larger wins", "GB/s", 8.0, 2.0, larger=True), 4.0, "ahead"),
        (compared("behind", "us", 12.0, 3.0), 0.25, "**behind**"),
        (compared("level", "us", 1.02, 1.0), 1 / 1.02, "level"),
        (compared("nothing promised", "us", 2.0, 1.0, target=None), 0.5, ""),
    ],
)
def test_ratios_and_verdicts(row: Row, ahead: float, verdict: str) -> None:
    assert row.ahead == pytest.approx(ahead)
    assert row.verdict() == verdict


@pytest.mark.parametrize(("ferry", "lmcache"), [(-0.5, 3.0), (1.0, 0.0), (0.0, 0.0)])
def test_no_ratio_at_or_below_the_floor(ferry: float, lmcache: float) -> None:
    row = compared("net of a floor", "us", ferry, lmcache)
    assert row.ahead is None
    assert row.verdict() == ""
    assert row.note == "within the noise of the floor"


def test_a_row_says_why_it_is_not_ahead_enough() -> None:
    def told(lmcache: float, note: str = "") -> str:
        return compared("hooks", "us", 1.0, lmcache, target=5.0, note=note, why="because").note

    assert told(6.0) == ""
    assert told(6.0, "so") == "so"
    assert told(4.0) == told(1.0) == told(0.5) == "because"
    assert told(4.0, "so") == "so; because"


def test_runs_of_a_kill_are_summed_up_truthfully() -> None:
    base = {"usual_gap_ms": 5.0, "share": 1.0, "server_start_s": 0.5, "hung": 0, "failed": 0,
            "subject": "length", "engine_died": ""}  # fmt: skip
    runs = [base | {"longest_gap_ms": gap, "back_s": gap} for gap in (3.0, 9.0, 4.0)]
    once, all_back = over(runs[:1]), over(runs)
    assert once == runs[0] | {"runs": 1, "back": 1}
    assert (all_back["back_s"], all_back["longest_gap_ms"], all_back["runs"]) == (4.0, 4.0, 3)
    lost = base | {"longest_gap_ms": 60.0, "share": 0.0, "hung": 2, "engine_died": "it fell"}
    mixed = over([*runs[:2], lost])
    assert "back_s" not in mixed
    assert (mixed["back"], mixed["hung"], mixed["engine_died"]) == (2, 2, "it fell")
    rows = tables.TABLES[6]({"idle": {"kvferry": mixed, "LMCache": all_back}})
    assert rows[0].ferry == "not within 60 s; in 2 of 3 runs"
    assert tables.RUNS[6]({"idle": {"kvferry": once}}).startswith("A single run")
    assert tables.RUNS[6]({"idle": {"kvferry": mixed}}).startswith("Medians of 3 runs")


def test_medians_are_per_key() -> None:
    rounds = [{"a": 1.0, "b": 9}, {"a": 5.0, "b": 7}, {"a": 2.0, "b": 8}]
    assert medians(rounds) == {"a": 2.0, "b": 8.0}


def test_interval_holds_the_median_and_narrows_with_more_pairs() -> None:
    few = [float(number % 10) for number in range(20)]
    low, high = median_interval(few)
    assert low <= 4.5 <= high
    closer = median_interval(few * 20)
    assert closer[1] - closer[0] < high - low
    assert median_interval([3.0] * 20) == (3.0, 3.0)
    assert median_interval(few) == (low, high), "the same values give the same interval"


def test_everyone_begins_equally_often() -> None:
    orders = [turns(("a", "b", "c"), number) for number in range(6)]
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]


def row(table=(), date="2026-01-01"):
    return {
        "date": date,
        "machine": {"cpu": "some processor", "cores": 2, "load_average": 0.25},
        "versions": {"kvferry": "1", "LMCache": "2"},
        "table": as_json(table),
    }


def test_the_table_says_it_all() -> None:
    rows = [
        compared("hooks", "us", 5.0, 100.0, target=5.0, reference=1.0),
        Row("hits are back after", "s", 4.2, "not within 60 s", note="servers took 1, 9 s"),
    ]
    report = {"rows": {"1. Steps": row(rows), "2. Other": row(date="2026-02-02")}}
    report["rows"]["2. Other"] |= {"error": "it fell\nover"}
    text = as_text(report)
    box = "some processor, 2 cores, load 0.2 at the start; kvferry 1, LMCache 2."
    assert f"* Row 1: 2026-01-01, {box}\n* Row 2: 2026-02-02, {box}" in text
    assert "| hooks | 5 us | 100 us | 1 us | 20.00x | ahead |" in text
    assert "| 4.2 s | not within 60 s |  |  | (servers took 1, 9 s) |" in text
    assert "2. Other failed: it fell" in text
    assert "(images/peer-steps.svg)" in text
    # A pipe in a value would open another column.
    assert "x \\| y" in markdown({"": [Row("n", "", "x | y", "z")]})


def test_the_table_replaces_the_last_one() -> None:
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = replaced(document, "new\n")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert replaced(once, "new\n") == once
    assert replaced(DOCS.read_text(), "new") != DOCS.read_text(), "docs/benchmarks.md has the marks"
    with pytest.raises(ValueError, match="lacks"):
        replaced("no marks", "new")


def test_unknown_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["99"])
    assert "no row [99]" in capsys.readouterr().err


def test_a_run_of_some_rows_keeps_the_others() -> None:
    before = {"rows": {"1. a": row(date="old"), "7. b": row(date="old"), "2. c": row(date="old")}}
    failed = row(date="new") | {"error": "it fell"}
    now = {"rows": {"7. b": row(date="new"), "2. c": failed, "3. d": row(date="new")}}
    made = merged(before, now)["rows"]
    assert {title: one["date"] for title, one in made.items()} == {
        "1. a": "old", "2. c": "old", "3. d": "new", "7. b": "new",
    }  # fmt: skip
    assert list(made) == sorted(made)


STORED = json.loads(RESULTS.read_text())


def test_the_document_shows_what_is_stored() -> None:
    """Its tables are made of the results, and every plot that it shows is there."""
    document = DOCS.read_text()
    assert tabled(STORED)["rows"] == STORED["rows"], "python -m bench.peer.report"
    assert replaced(document, as_text(STORED)) == document
    for name, _, _ in CHARTS.values():
        assert (IMAGES / f"{name}.svg").is_file()


@pytest.mark.parametrize("number", sorted(CHARTS))
def test_plots_show_the_table_s_numbers(number: int) -> None:
    (stored,) = [one for title, one in STORED["rows"].items() if title.startswith(f"{number}")]
    for panel in CHARTS[number][2](stored["measured"]):
        assert {"kvferry", "LMCache"} <= {name.partition(",")[0] for name in panel.up_values}
        for values in panel.up_values.values():
            assert len(values) == len(panel.places)
    # The first panel's first place, and the table's row of it.
    panel = CHARTS[number][2](stored["measured"])[0]
    first = stored["table"][0]
    side = next(name for name in panel.up_values if name.startswith("kvferry"))
    assert panel.up_values[side][0] == pytest.approx(first["ferry"])


def test_a_panel_needs_a_value_for_every_place() -> None:
    with pytest.raises(ValueError, match="2 values for 3 places"):
        Panel("us", [1, 2, 3], {"kvferry": [1.0, 2.0]})


def test_what_is_measured_is_written_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program over rows that are made up: what it keeps, replaces and says."""
    results, docs = tmp_path / "peer.json", tmp_path / "docs.md"
    docs.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    monkeypatch.setattr(run, "RESULTS", results)
    monkeypatch.setattr(run, "PART", tmp_path / "part.json")
    monkeypatch.setattr(report, "DOCS", docs)
    monkeypatch.setattr(run, "peer_python", lambda: "python")
    hooks = [5.0]

    def broken(scale: run.Scale) -> run.Measured:
        raise RuntimeError("it fell")

    def seven(scale: run.Scale) -> run.Measured:
        return {"hooks": hooks[0]}

    monkeypatch.setattr(run, "ROWS", {7: ("7. Kinds", seven), 8: ("8. Other", broken)})
    made = lambda measured: [compared("models", "", measured["hooks"], 10.0)]  # noqa: E731 - short
    monkeypatch.setitem(tables.TABLES, 7, made)
    monkeypatch.setitem(tables.RUNS, 7, lambda _: "A single run.")
    assert main([]) == 1
    assert "8. Other failed: it fell" in docs.read_text()
    assert "### 7. Kinds\n\nA single run.\n\n| figure |" in docs.read_text()
    assert "| models | 5 | 10 |" in docs.read_text()
    hooks[0] = 2.0
    assert main(["7"]) == 0
    assert "| models | 2 | 10 |" in docs.read_text()
    stored = json.loads(results.read_text())
    assert list(stored["rows"]) == ["7. Kinds", "8. Other"]
    hooks[0] = 1.0
    assert main(["7", "--quick"]) == 0
    assert "| models | 1 | 10 |" in capsys.readouterr().out
    assert json.loads(results.read_text()) == stored

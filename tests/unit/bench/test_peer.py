"""The comparison with LMCache: its statistics, its ratios and verdicts, its table."""

from __future__ import annotations

import pytest

from bench.peer.figures import Row, as_json, compared, markdown
from bench.peer.rig import turns
from bench.peer.run import BEGIN, DOCS, END, as_text, main, replaced
from bench.peer.stats import median_interval, medians


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


def test_the_table_says_it_all() -> None:
    rows = [
        compared("hooks", "us", 5.0, 100.0, target=5.0, reference=1.0),
        Row("hits are back after", "s", 4.2, "not within 60 s", note="servers took 1, 9 s"),
    ]
    report = {
        "date": "2026-01-01",
        "machine": {"cpu": "some processor", "cores": 2, "load_average": 0.25},
        "versions": {"kvferry": "1", "LMCache": "2"},
        "rows": {"1. Steps": {"table": as_json(rows)}, "2. Other": {"error": "it fell\nover"}},
    }
    text = as_text(report, {"1. Steps": rows})
    assert "some processor, 2 cores, load 0.2 at the start; kvferry 1, LMCache 2." in text
    assert "| hooks | 5 us | 100 us | 1 us | 20.00x | ahead |" in text
    assert "| 4.2 s | not within 60 s |  |  | (servers took 1, 9 s) |" in text
    assert "2. Other failed: it fell" in text
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

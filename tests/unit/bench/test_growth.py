"""The bench of growth measures what it says, and its bed does whole requests."""

from __future__ import annotations

import pytest

from bench import growth


def test_exponents_of_known_costs():
    sizes = [1, 10, 100, 1000]
    assert growth.exponent(sizes, [5, 5, 5, 5]) == pytest.approx(0)
    assert growth.exponent(sizes, [9, 10, 100, 1000]) == pytest.approx(1)  # small sizes apart
    assert growth.exponent(sizes, [s**1.5 for s in sizes]) == pytest.approx(1.5)


def test_every_operation_of_every_engine_and_rank_is_measured():
    costs = growth.measured(2, keys=100, tokens=1024, ranks=3, engines=2)
    assert set(costs) == {"probe", "hit", "save", "load"}
    assert min(costs.values()) > 0


def test_the_table_names_what_grows():
    found = {"keys": {"probe": {10: 1.0, 100: 1.0}, "index, bytes": {10: 560.0, 100: 5600.0}}}
    told = growth.markdown(found)
    assert "| stored keys | 10 | 100 | exponent |" in told
    assert "| probe, us | 1 | 1 | 0.00 |" in told
    assert "| index, bytes | 560 | 5,600 | 1.00 |" in told

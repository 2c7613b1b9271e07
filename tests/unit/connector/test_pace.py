"""What a token costs, from the times at which steps are built."""

from __future__ import annotations

import pytest
from kvferry_connector.pace import Pace, samples_max, step_tokens_min


def test_the_time_to_the_next_step_is_the_cost_of_a_large_one() -> None:
    pace = Pace()
    pace.step(500, 10.0)
    assert pace.open
    assert pace.token_ns == 0
    pace.step(1, 10.1)
    assert not pace.open
    assert pace.token_ns == pytest.approx(200_000, rel=1e-6)


def test_decoding_steps_say_nothing() -> None:
    pace = Pace()
    pace.step(step_tokens_min - 1, 10.0)
    assert not pace.open
    pace.step(0, 11.0)
    assert pace.token_ns == 0


def test_an_idle_time_after_a_burst_is_an_outlier() -> None:
    pace = Pace()
    now_s = 0.0
    for number in range(samples_max + 4):
        now_s += 60.0 if number % 5 == 4 else 0.05
        pace.step(500, now_s)
    assert pace.token_ns == pytest.approx(100_000, rel=1e-6)

"""The stand-in engine of `make gpu` without a GPU: the recording is played over host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.whole import save_kill_load
from support.fake_cuda import as_driver


def test_what_was_saved_before_two_kills_is_loaded_and_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in as_driver().items():
        monkeypatch.setenv(name, value)
    counts = save_kill_load("fake")["counts"]
    assert counts == {"full right": 28, "swa right": 9, "mamba right": 3}


@pytest.mark.long
def test_a_recording_can_be_made_anew(tmp_path: Path) -> None:
    """Steps and repeated questions depend on the machine; what is registered and hit does not."""
    from gpu.record import record  # vLLM
    from gpu.replay import read_recording

    made, stored = record(tmp_path), read_recording()
    assert set(made.hits.values()) == set(stored.hits.values())
    assert made.rank.groups == stored.rank.groups
    assert made.rank.placements == stored.rank.placements
    assert any(event.saves for event in made.first)
    assert any(event.loads for event in made.second)

"""The stand-in engine of `make gpu` without a GPU: the recording is played over host memory."""

from __future__ import annotations

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

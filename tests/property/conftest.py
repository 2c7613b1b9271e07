"""The sidecar that the fuzz tests of one file attack, and its check after each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fuzzing import Target, fuzz_target
from support.raw_half import KvMemory


@pytest.fixture(scope="module")
def attacked() -> Iterator[Target]:
    with fuzz_target() as found:
        yield found


@pytest.fixture
def target(attacked: Target) -> Iterator[Target]:
    """The sidecar; it must be intact after the test."""
    yield attacked
    attacked.intact()


@pytest.fixture
def memory() -> Iterator[KvMemory]:
    found = KvMemory()
    yield found
    found.close()

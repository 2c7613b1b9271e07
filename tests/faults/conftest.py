"""The fault kit of a module's sidecar: no rule outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.books import wait_settled
from support.kit import Kit
from support.sidecar import SidecarUnderTest


@pytest.fixture
def kit(sidecar: SidecarUnderTest) -> Iterator[Kit]:
    kit = Kit(sidecar.run_dir)
    yield kit
    kit.rules()
    wait_settled(sidecar.run_dir)

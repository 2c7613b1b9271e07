"""What modules with real engines share: a pair of them on the module's own sidecar, and text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engine import EngineUnderTest, Texts, running_engine
from support.sidecar import SidecarUnderTest


@pytest.fixture(scope="module")
def writer(sidecar: SidecarUnderTest) -> Iterator[EngineUnderTest]:
    with running_engine(sidecar.run_dir) as engine:
        yield engine


@pytest.fixture(scope="module")
def reader(sidecar: SidecarUnderTest) -> Iterator[EngineUnderTest]:
    with running_engine(sidecar.run_dir) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()

"""One browser for a module."""

from __future__ import annotations

import pytest
from support.pages import chromium


@pytest.fixture(scope="module")
def browser():
    with chromium() as one:
        yield one

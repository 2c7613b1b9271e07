"""Shared by all tests: the logs of child processes are shown with a failing test; a fake GPU."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
import structlog
from support.logs import tail, watched

if TYPE_CHECKING:
    from support.fake_cuda import FakeGpu


# A shell's background job ignores Ctrl-C, one under nohup a hang-up, and so would their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Its default draws a traceback with all local variables: seconds on a busy machine, in which halves
# under test count as silent.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        ),
    ]
)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    """A GPU made of host memory; what was allocated or made to fail ends with the test."""
    from support.fake_cuda import FakeGpu  # most tests need neither a compiler nor the connector

    gpu = FakeGpu()
    yield gpu
    gpu.fail("", 0)
    gpu.without_batches(False)
    gpu.with_kernels(False)
    gpu.free_all()
    gpu.unpin_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of each child's log to the report of a failed test."""
    report = yield
    if report.failed:
        for name, log in watched():
            report.sections.append((f"log of {name}", tail(log)))
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files: engines, then what has a time limit of its own, then short tests.

    Two files run at a time, and the last minutes of a run are the longest file's when that begins
    last.
    """
    weights: dict[str, int] = {}
    for item in items:
        weight = 2 * bool(item.get_closest_marker("engine"))
        weight += bool(item.get_closest_marker("timeout"))
        weights[item.location[0]] = max(weight, weights.get(item.location[0], 0))
    items.sort(key=lambda item: -weights[item.location[0]])


def pytest_addoption(parser: pytest.Parser) -> None:
    """A real dfkv cluster for the conformance suite: `make test-dfkv`; minutes of `make soak`."""
    parser.addoption("--soak-minutes", default="3", help="how long tests/soak runs")
    parser.addoption("--dfkv-lib", default="", help="the cluster's libdfkv.so")
    parser.addoption("--dfkv-members", default="", help="its servers: name=ip:port,...")

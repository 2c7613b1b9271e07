"""A mini sidecar and clients of it, in one run directory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvferry_connector.client import Client, Half
from kvferry_connector.config import FerryConfig
from kvferry_connector.log import LOGGER
from support.clients import ENGINE, SCHEDULER, Attach, Serve
from support.mini_sidecar import MiniSidecar
from support.waiting import wait_until


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    started: list[MiniSidecar] = []

    def start(epoch: int, *flags: str) -> MiniSidecar:
        sidecar = MiniSidecar(tmp_path, epoch, *flags)
        started.append(sidecar)
        wait_until(lambda: sidecar.events("listening"), "the mini sidecar listens")
        return sidecar

    yield start
    for sidecar in started:
        sidecar.kill()


@pytest.fixture
def client_for(tmp_path: Path) -> Iterator[Attach]:
    clients: list[Client] = []

    def make(half: Half = SCHEDULER, registration=ENGINE, memories=(), **settings) -> Client:
        config = FerryConfig(run_dir=str(tmp_path), **settings)
        clients.append(Client(config, half, registration, memories))
        clients[-1].start()
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def ferry_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Each record of the connector once, whether or not vLLM has set its loggers up."""
    logger = logging.getLogger(LOGGER)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = propagate

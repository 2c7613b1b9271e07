"""What the benches share in an engine process: the engine of a variant, its prompts, its clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kvferry_demo.protocol import EngineSetup

from bench.engine import BenchEngine, Clock, write_config
from bench.peer.variants import FERRY, NONE, Probe, engine_args

DEADLINE_S = 120.0
Say = Callable[[dict[str, Any]], None]


class PeerEngine:
    """One engine without attention (bench/engine.py) and one variant's connector.

    ``setup``: variant, folder, options (the server's), server_pid, model (changes to the small
    llama) and engine (fields of EngineSetup; its ``connector_extra`` is kvferry's).
    """

    def __init__(self, setup: dict[str, Any], say: Say) -> None:
        self.variant: str = setup["variant"]
        self.say = say
        self.server_pid = int(setup["server_pid"])
        model = write_config(Path(setup["folder"]) / f"model-{self.variant}", **setup["model"])
        fields = dict(setup["engine"])
        more = fields.pop("engine_args", {})
        options = setup["options"]
        if self.variant == FERRY:
            options = options | fields.pop("connector_extra", {})
        self.engine = BenchEngine(
            EngineSetup(
                model_dir=str(model),
                engine_args=more | engine_args(self.variant, options),
                **fields,
            )
        )
        if self.variant == FERRY:
            self.engine.wait_ready()
        self.scheduler, self.worker = self.engine.scheduler_connector, self.engine.worker_connector
        self.probe = Probe(self.variant, self.scheduler, self.worker)
        self.clock = Clock()
        self._names = 0
        self._plain: list[set[str]] = []

    def close(self) -> None:
        """End the engine as vLLM does."""
        self.engine.close()

    def tokens(self, seed: int, count: int) -> list[int]:
        """Return the first ``count`` tokens of the endless prompt ``seed``: the same everywhere."""
        # In parts, so that a longer prompt begins like a shorter one of the same seed.
        parts = [
            np.random.default_rng((seed, part)).integers(3, 1000, 1024)
            for part in range(-(-count // 1024))
        ]
        return [int(token) for token in np.concatenate(parts)[:count]]

    def begin(self, tokens: list[int], max_tokens: int) -> str:
        """Add a request; return its name."""
        self._names += 1
        name = f"request-{self._names}"
        self.engine.start(name, tokens, max_tokens)
        return name

    def quiet(self) -> None:
        """Step until nothing runs and no save or load is open; empty vLLM's own prefix cache."""
        self.engine.finish()
        self.step_until(lambda: not (self.probe.saving() or self.probe.loading()), "saves end")
        if not self.engine.settle(DEADLINE_S)[0]:
            raise TimeoutError("the engine does not fall asleep")
        self.engine.forget_local()

    def step_until(self, condition: Callable[[], bool], what: str) -> None:
        """Step until the condition holds. Raises TimeoutError, saying what was waited for."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {DEADLINE_S:.0f} s: {what}")
            self.engine.step()

    def watch(self) -> None:
        """Put the connector's public methods under the clock."""
        if self.variant == NONE:
            return
        for connector in (self.scheduler, self.worker):
            self._plain.append(set(vars(connector)))
            self.clock.wrap(connector)

    def unwatch(self) -> None:
        """Take them off the clock again: timing is not part of what is timed next."""
        if self.variant == NONE:
            return
        for connector, plain in zip((self.scheduler, self.worker), self._plain, strict=True):
            for name in set(vars(connector)) - plain:
                delattr(connector, name)
        self._plain.clear()

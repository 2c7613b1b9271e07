"""The engine's side of row 7: does a model register, hit, and go on with the right output?

Attention is real here.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvferry_demo.driver import Driver
from kvferry_demo.models import MODELS, engine_settings, write_model
from kvferry_demo.protocol import Ask, EngineSetup, Result
from vllm.distributed.kv_transfer import get_kv_transfer_group

from bench.peer.engine_base import Say
from bench.peer.variants import FERRY, Probe, engine_args

PROMPT_TOKENS = (700, 1500, 2500)
OUTPUT_TOKENS = 16
DEADLINE_S = 60.0


class Hybrids:
    """Runs one model; its process is then of no more use."""

    def __init__(self, setup: dict[str, Any], say: Say) -> None:
        del say
        self._setup = setup

    def close(self) -> None:
        """Nothing is open between two operations."""

    def model(self, name: str) -> dict[str, Any]:
        """Return what became of the model: ``hits`` and ``right`` per prompt, or ``problem``."""
        try:
            return self._measure(name)
        except Exception as error:  # noqa: BLE001 - what it says is the result
            traceback.print_exc()
            return {"problem": f"{type(error).__name__}: {error}"}

    def _measure(self, name: str) -> dict[str, Any]:
        variant = self._setup["variant"]
        folder = Path(self._setup["folder"]) / variant
        folder.mkdir(exist_ok=True)
        directory = write_model(name, folder)
        arguments = engine_settings(name, directory) | engine_args(variant, self._setup["options"])
        by_bytes = MODELS[name].by_bytes
        driver = Driver(
            EngineSetup(
                model_dir=str(directory),
                engine_args=arguments,
                kv_digests=by_bytes,
            )
        )
        scheduler = driver._scheduler.connector
        if variant == FERRY:
            _wait(lambda: scheduler.attachment()[0] == "ready", "the connector is ready")
        probe = Probe(variant, scheduler, get_kv_transfer_group())
        first = _run(driver, "first")
        end_s = time.monotonic() + DEADLINE_S
        while probe.saving() and time.monotonic() < end_s:
            driver.step()
        driver.settle(DEADLINE_S)
        driver._scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
        for cache in _tensors(driver._core.model_executor.driver_worker.worker):
            cache.zero_()  # so that only a load can bring anything back
        second = _run(driver, "second")
        driver.close()
        return {
            "hits": [one.hit_tokens for one in second],
            "tokens": list(PROMPT_TOKENS),
            "right": [_held(a, by_bytes) == _held(b, by_bytes)
                      for a, b in zip(first, second, strict=True)],
        }  # fmt: skip


def _held(result: Result, by_bytes: bool) -> object:
    return result.kv_digest if by_bytes else (result.output, result.drafts)


def _run(driver: Driver, name: str) -> list[Result]:
    """Run the prompts one after the other."""
    results = []
    for number, count in enumerate(PROMPT_TOKENS):
        tokens = np.random.default_rng(number).integers(3, 1000, count)
        driver.add([Ask(f"{name}-{number}", [int(one) for one in tokens], OUTPUT_TOKENS)])
        results += driver.finish()
    return results


def _tensors(worker: Any) -> list[torch.Tensor]:
    """Return the engine's KV tensors; a state's layer has a list of them."""
    found: list[torch.Tensor] = []
    for cache in worker.model_runner.kv_caches:
        found += cache if isinstance(cache, list | tuple) else [cache]
    return found


def _wait(condition: Any, what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {DEADLINE_S:.0f} s: {what}")
        time.sleep(0.01)

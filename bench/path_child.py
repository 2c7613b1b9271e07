"""The engine's side of bench/path.py: whole prompts saved and loaded, timed from hook to hook."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvferry_connector.wire.hot import Outcome
from kvferry_demo.protocol import EngineSetup

from bench.common import SharedMemcpy, cpu_s, memcpy_gb_per_s
from bench.engine import DEADLINE_S, BenchEngine, Clock, write_config

BLOCK_TOKENS = 128


def measure(setup: dict[str, Any]) -> dict[str, Any]:
    """Save and load ``rounds`` prompts of ``blocks`` blocks; rates in GB/s, CPU in s per GB."""
    engine = BenchEngine(_engine_setup(setup))
    engine.wait_ready()
    bench = Bench(engine, int(setup["sidecar_pid"]), int(setup["blocks"]))
    memcpy = SharedMemcpy()
    saves, loads = [], []
    for number in range(int(setup["rounds"])):
        memcpy.round()
        prompt = bench.prompt()
        saves.append(bench.save(prompt))
        engine.forget_local()
        memcpy.round()
        loads.append(bench.load(prompt, verify=number == 0))
        engine.forget_local()
    engine.close()
    return {
        "bytes": bench.prompt_bytes,
        "run_bytes": bench.run_bytes,
        "saves": saves,
        "loads": loads,
        "verified": bench.verified,
        "memcpy_gb_per_s": memcpy.best_gb_per_s,
        "memcpy_anonymous_gb_per_s": memcpy_gb_per_s(1, repeats=3),
    }


def _engine_setup(setup: dict[str, Any]) -> EngineSetup:
    blocks = int(setup["blocks"])
    config = write_config(
        Path(setup["folder"]) / "model",
        num_hidden_layers=setup["layers"],
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
    )
    page_bytes = 2 * 4 * 64 * 4 * BLOCK_TOKENS
    num_blocks = 2 * blocks + 16
    return EngineSetup(
        model_dir=str(config),
        kv_cache_bytes=num_blocks * page_bytes * int(setup["layers"]),
        max_model_len=(blocks + 1) * BLOCK_TOKENS,
        max_num_batched_tokens=(blocks + 1) * BLOCK_TOKENS,
        run_dir=setup["run_dir"],
        connector_extra={"pinned_blocks_max": num_blocks},
    )


class Bench:
    """One engine whose KV memory the bench fills itself: the forward does not touch it."""

    def __init__(self, engine: BenchEngine, sidecar_pid: int, blocks: int) -> None:
        self.engine = engine
        self.verified = False
        self._pid = sidecar_pid
        self._blocks = blocks
        self._random = np.random.default_rng(11)
        self._digests: list[bytes] = []
        self._names = 0
        caches = engine.kv_caches
        self.run_bytes = caches[0][0].numel() * caches[0].element_size()
        self.prompt_bytes = blocks * len(caches) * self.run_bytes
        self._clock = Clock(cpu=True)
        self._started_s = self._ended_s = 0.0
        self._moved_bytes = 0
        self._heard: set[int] = set()
        self._watch(engine)
        self._clock.wrap(engine.scheduler_connector)
        self._clock.wrap(engine.worker_connector)
        self._fill(1)

    def _watch(self, engine: BenchEngine) -> None:
        """Note when saves are handed over, when reports come in, and what outcomes moved."""
        worker, scheduler = engine.worker_connector, engine.scheduler_connector
        half, hear = worker._worker, worker._worker._hear

        def heard(message: Any) -> None:
            # While digests are made nobody acknowledges, and an outcome comes again.
            if isinstance(message, Outcome) and message.job not in self._heard:
                self._heard.add(message.job)
                self._moved_bytes += message.moved_bytes
            hear(message)

        half._hear = heard
        wait, update = worker.wait_for_save, scheduler.update_connector_output

        def wait_for_save() -> None:
            if half._bound is not None and half._bound.saves:
                self._started_s = time.perf_counter()
            wait()

        def update_connector_output(output: Any) -> None:
            update(output)
            if output.kv_connector_worker_meta is not None:
                self._ended_s = time.perf_counter()

        worker.wait_for_save = wait_for_save
        scheduler.update_connector_output = update_connector_output

    def _fill(self, seed: int) -> None:
        """Write other bytes into all of the KV memory."""
        generator = torch.Generator().manual_seed(seed)
        for cache in self.engine.kv_caches:
            cache.uniform_(generator=generator)

    def prompt(self) -> list[int]:
        """Return new tokens: ``blocks`` whole blocks, and one more so that all of them can hit."""
        count = self._blocks * BLOCK_TOKENS + 1
        return [int(token) for token in self._random.integers(3, 1000, count)]

    def save(self, prompt: list[int]) -> dict[str, float]:
        """Compute the prompt in one step; timed from wait_for_save to the report of its save."""
        name = self._start(prompt)
        jobs = self.engine.scheduler_connector._scheduler._jobs
        sidecar_s = cpu_s(self._pid)
        self._clock.take()
        self._started_s = 0.0
        self._step_until(lambda: self._started_s > 0.0)  # it may first be told "ask me later"
        ids = self._ids(name)
        self._step_until(lambda: not len(jobs))
        result = self._result(self._ended_s - self._started_s, sidecar_s)
        self._digests = [self._digest(block) for block in ids]
        self.engine.end_all()
        return result

    def load(self, prompt: list[int], verify: bool) -> dict[str, float]:
        """Load the prompt; timed from the request's arrival to the report of its load."""
        if verify:
            self._fill(2)  # so that only a load can bring the bytes back
        half = self.engine.scheduler_connector._scheduler
        sidecar_s = cpu_s(self._pid)
        self._clock.take()
        started_s = time.perf_counter()
        name = self._start(prompt)
        tracked = half._requests[name]
        self._step_until(lambda: tracked.admission.phase.name in ("LOADED", "FAILED"))
        result = self._result(self._ended_s - started_s, sidecar_s)
        if tracked.admission.phase.name != "LOADED":
            raise RuntimeError("the load failed")
        if verify:
            digests = [self._digest(block) for block in self._ids(name)]
            if digests != self._digests:
                raise RuntimeError("loaded bytes differ from the saved ones")
            self.verified = True
        self.engine.end_all()
        return result

    def _start(self, prompt: list[int]) -> str:
        self._names += 1
        name = f"request-{self._names}"
        self.engine.start(name, prompt, 2)  # it still runs, with its blocks, after its first step
        return name

    def _ids(self, name: str) -> list[int]:
        (group,) = self.engine._scheduler.kv_cache_manager.get_block_ids(name)
        if len(group) < self._blocks:
            raise RuntimeError(f"{name} has {len(group)} blocks, not {self._blocks}")
        return list(group)[: self._blocks]

    def _step_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError("neither saved nor loaded")
            self.engine.step()

    def _result(self, seconds: float, sidecar_before_s: float) -> dict[str, float]:
        """Return the figures of one round. Raises RuntimeError unless every byte was moved."""
        moved, self._moved_bytes = self._moved_bytes, 0
        if moved != self.prompt_bytes:
            raise RuntimeError(f"{moved} bytes were moved, not {self.prompt_bytes}")
        gigabytes = self.prompt_bytes / 1e9
        return {
            "gb_per_s": gigabytes / seconds,
            "sidecar_cpu_s_per_gb": (cpu_s(self._pid) - sidecar_before_s) / gigabytes,
            "hooks_cpu_s_per_gb": self._clock.take().cpu_us / 1e6 / gigabytes,
        }

    def _digest(self, block: int) -> bytes:
        state = hashlib.blake2b(digest_size=16)
        for cache in self.engine.kv_caches:
            state.update(cache[block].contiguous().view(torch.uint8).numpy())
        return state.digest()

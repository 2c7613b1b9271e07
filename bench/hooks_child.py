"""The engine's side of bench/hooks.py: one engine, two connectors by turns, time in hooks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kvferry_connector.export import FencePage
from kvferry_connector.wire import codec
from kvferry_demo.protocol import EngineSetup
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from bench.common import percentile
from bench.engine import DEADLINE_S, BenchEngine, Clock, Spent, write_config
from bench.null_connector import NullConnector

ROUND_STEPS = 512  # in which every request saves what it generated exactly once
PREFILL_TOKENS = 2048  # of a step; 16 chunks of 128
LOADS = 32
PENDING_STEPS = 60  # before the running request completes a block: that would be a save
LOAD_TOKENS = 300
PROBE_TOKENS = (8192, 131072)


def measure(setup: dict[str, Any]) -> dict[str, Any]:
    """Build the engine and measure what ``setup`` names, for both connectors by turns."""
    engine = BenchEngine(_engine_setup(setup))
    engine.wait_ready()
    bench = Bench(engine)
    rounds = int(setup["rounds"])
    ferry: dict[str, Any] = {}
    null: dict[str, Any] = {}
    if setup["what"] == "steps":
        ferry["running"], null["running"] = {}, {}
        for count in (1, 8, 32):
            found = bench.decode(count, int(setup["turns"]))
            ferry["running"][str(count)], null["running"][str(count)] = found
        ferry["prefill"], null["prefill"] = bench.both(lambda: bench.prefill(rounds))
        ferry["loads"] = bench.loads_pending()
        ferry["fence_ns"], null["fence_ns"] = _call_ns(FencePage().bound), _call_ns(NoFence().bound)
    else:
        for tokens in PROBE_TOKENS:
            found = bench.both(lambda tokens=tokens: bench.probe(tokens, rounds))
            ferry[str(tokens)], null[str(tokens)] = found
    engine.close()
    return {"ferry": ferry, "null": null, "hook_errors": bench.counts.get("hook_errors", 0)}


class NoFence:
    """What a fence store is compared with: a method that does nothing."""

    def bound(self, step: int) -> None:
        """Take the step."""


def _call_ns(call: Callable[[int], None]) -> float:
    """Return the time of one of 10,000 calls, the best of five rounds."""
    rounds = []
    for _ in range(5):
        start = time.perf_counter_ns()
        for step in range(10_000):
            call(step)
        rounds.append((time.perf_counter_ns() - start) / 10_000)
    return min(rounds)


def _engine_setup(setup: dict[str, Any]) -> EngineSetup:
    # On a busy machine an answer may take longer than the default: a load is wanted, not a miss.
    extra = {"run_dir": setup["run_dir"], "probe_ms_max": 10_000}
    transfer = {
        "kv_connector": "FerryConnector",
        "kv_connector_module_path": "kvferry_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return EngineSetup(
        model_dir=str(write_config(Path(setup["folder"]) / "model")),
        kv_cache_bytes=512 << 20,
        max_model_len=16384,
        max_num_seqs=34,
        max_num_batched_tokens=PREFILL_TOKENS,
        engine_args={"kv_transfer_config": transfer, "block_size": setup["block_tokens"]},
    )


@dataclass(slots=True)
class Side:
    """One connector as vLLM sees it, both halves under one clock."""

    scheduler: Any
    worker: Any
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.clock.wrap(self.scheduler)
        self.clock.wrap(self.worker)


class Bench:
    """Measures one engine; prompts never repeat unless a hit is meant."""

    def __init__(self, engine: BenchEngine) -> None:
        self.engine = engine
        self.counts: dict[str, int] = {}
        self._random = np.random.default_rng(3)
        self._names = 0
        self._watch_stats(engine.scheduler_connector)
        self._watch_stats(engine.worker_connector)
        self._ferry = Side(engine.scheduler_connector, engine.worker_connector)
        roles = (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        self._null = Side(*(engine.new_connector(NullConnector, role) for role in roles))
        self._side = self._ferry

    def _watch_stats(self, connector: Any) -> None:
        """Sum what the connector counts."""
        count = connector._stats.count

        def counted(name: str, number: int = 1) -> None:
            if name == "hook_errors":
                self.counts[name] = self.counts.get(name, 0) + number
            count(name, number)

        connector._stats.count = counted

    @contextmanager
    def _using(self, side: Side) -> Iterator[Clock]:
        self._side = side
        with self.engine.using(side.scheduler, side.worker):
            yield side.clock
        self._side = self._ferry

    def both(self, measured: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is measured with kvferry, and with the connector that does nothing."""
        with self._using(self._null):
            null = measured()
        with self._using(self._ferry):
            return measured(), null

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(3, 1000, count)]

    def _add(self, tokens: list[int], max_tokens: int) -> str:
        self._names += 1
        name = f"request-{self._names}"
        self.engine.start(name, tokens, max_tokens)
        return name

    def decode(self, count: int, turns: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Hook time per step while ``count`` requests decode, in us: kvferry's, and the floor.

        ``mean_us`` is of the best round, as whatever else runs on the machine only adds to it.
        """
        sides = (self._ferry, self._null)
        rounds: list[list[list[Spent]]] = [[] for _ in sides]
        cpu: list[list[Spent]] = [[] for _ in sides]
        for turn in range(turns + 1):
            for number, side in enumerate(sides):
                with self._using(side) as clock:
                    # Last with CPU time, which the clock of the figures leaves out (it costs a
                    # system call).
                    clock.cpu = turn == turns
                    spent = self._round(count)
                    if clock.cpu:
                        cpu[number] = spent
                    else:
                        rounds[number].append(spent)
                    clock.cpu = False
        ferry, null = (_of_rounds(*one) for one in zip(rounds, cpu, strict=True))
        return ferry, null

    def _round(self, count: int) -> list[Spent]:
        """Return what the hooks of each step of one round cost."""
        for _ in range(count):
            self._add(self._tokens(40), 8000)
        for _ in range(20):
            self.engine.step()
        running = len(self.engine._scheduler.running)
        if running != count:
            raise RuntimeError(f"{running} of {count} requests run")
        spent = self._steps(ROUND_STEPS)
        self.engine.end_all()
        self.engine.forget_local()
        return spent

    def _steps(self, count: int) -> list[Spent]:
        spent = []
        self._side.clock.take()
        for _ in range(count):
            self.engine.step()
            spent.append(self._side.clock.take())
        return spent

    def prefill(self, rounds: int) -> dict[str, Any]:
        """Hook time of a step that computes (and saves) 2048 tokens of one request, in us.

        It is the second step of its request: no lookup, and the first save's outcome may come.
        """
        spent = []
        self._side.clock.cpu = True
        for _ in range(rounds):
            self._add(self._tokens(2 * PREFILL_TOKENS + 64), 1)
            self.engine.step()
            time.sleep(0.02)
            self._side.clock.take()
            self.engine.step()
            spent.append(self._side.clock.take())
            self.engine.end_all()
            self.engine.forget_local()
        self._side.clock.cpu = False
        return _summary(spent)

    def loads_pending(self) -> dict[str, Any]:
        """Hook time per step with one request running and 32 loads pending, in us.

        The fence word stands still meanwhile, so the sidecar, which waits for it, starts no copy.
        """
        engine = self.engine
        prompts = [self._tokens(LOAD_TOKENS) for _ in range(LOADS)]
        for prompt in prompts:
            self._add(prompt, 1)
        self._finish()
        engine.forget_local()
        self._add(self._tokens(40), 8000)
        for _ in range(20):
            engine.step()
        worker = engine.worker_connector._worker
        fence, reached = worker._fence, engine.scheduler_connector._scheduler._step
        bound = fence.bound
        fence.bound = lambda _step: bound(reached)
        try:
            for prompt in prompts:
                self._add(prompt, 1)
            for _ in range(5):
                engine.step()
                time.sleep(0.05)  # the answers to all asks come in
            summary = _summary(self._steps(PENDING_STEPS))
            pending = sum(bool(job.load_of) for job in worker._open.values())
        finally:
            fence.bound = bound
        if pending != LOADS:
            raise RuntimeError(f"{pending} of {LOADS} loads were pending")
        engine.end_all()
        return summary | {"pending": pending}

    def _finish(self) -> None:
        """Step until only settled requests are left."""
        self.engine.finish()
        if not self.engine.settle(DEADLINE_S)[0]:
            raise TimeoutError("the engine does not fall asleep")

    def probe(self, tokens: int, rounds: int) -> dict[str, Any]:
        """Hook time of on_new_request for a prompt of ``tokens``, and the bytes of its probe."""
        connector = self._side.scheduler
        half = getattr(connector, "_scheduler", None)
        sent = None if half is None else _SentBytes(half._lookup.client)
        spent = []
        self._side.clock.cpu = True
        for number in range(rounds):
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            params.update_from_generation_config({}, 2)
            request = Request(
                request_id=f"probe-{tokens}-{number}",
                prompt_token_ids=self._tokens(tokens),
                sampling_params=params,
                pooling_params=None,
                block_hasher=self.engine.request_block_hasher,
            )
            self._side.clock.take()
            connector.on_new_request(request)
            spent.append(self._side.clock.take())
            hashes = b"".join(request.block_hashes)
            connector.request_finished_all_groups(request, ([],))
            if half is not None:
                half._lookup.end_step()
            time.sleep(0.003)
        more = {} if sent is None else {"probe_bytes": sent.last, "hashes_bytes": len(hashes)}
        self._side.clock.cpu = False
        return _summary(spent) | more | {"hashes": len(request.block_hashes)}


class _SentBytes:
    """Counts the bytes of all frames of the last probe a client sent."""

    def __init__(self, client: Any) -> None:
        self.last = 0
        send = client.send

        def counted(link: Any, message: Any, raw: Any = ()) -> bool:
            if raw:
                frames = codec.pack(
                    message, raw, protocol=link.protocol, epoch=link.epoch,
                    generation=link.generation,
                )  # fmt: skip
                self.last = sum(len(frame) for frame in frames)
            return bool(send(link, message, raw))

        client.send = counted


def _of_rounds(rounds: list[list[Spent]], cpu: list[Spent]) -> dict[str, Any]:
    summary = _summary([one for spent in rounds for one in spent])
    means = [statistics.fmean(one.wall_us for one in spent) for spent in rounds]
    cpus = _summary(cpu)
    return summary | {
        "mean_us": min(means),
        "round_means_us": means,
        "cpu_mean_us": cpus["cpu_mean_us"],
        "cpu_median_us": cpus["cpu_median_us"],
    }


def _summary(spent: list[Spent]) -> dict[str, Any]:
    walls = [one.wall_us for one in spent]
    cpus = [one.cpu_us for one in spent]
    names = {name for one in spent for name in one.by_method_us}
    methods = {
        name: statistics.median(one.by_method_us.get(name, 0.0) for one in spent) for name in names
    }
    ranked = sorted(methods.items(), key=lambda item: -item[1])[:10]
    return {
        "median_us": statistics.median(walls),
        "mean_us": statistics.fmean(walls),
        "min_us": min(walls),
        "p99_us": percentile(walls, 99),
        "cpu_median_us": statistics.median(cpus),
        "cpu_mean_us": statistics.fmean(cpus),
        "calls": statistics.median(one.calls for one in spent),
        "median_by_method_us": {name: round(us, 3) for name, us in ranked},
    }

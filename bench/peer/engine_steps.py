"""The engine's side of rows 1 and 4: steps while requests decode, time to the first token."""

from __future__ import annotations

import statistics
import time
from typing import Any

from bench.common import cpu_s
from bench.peer.engine_base import PeerEngine

WARM_STEPS = 20


class Steps(PeerEngine):
    """One engine whose steps are timed."""

    def decode(self, seed: int, running: int, steps: int) -> dict[str, Any]:
        """Let ``running`` requests decode: whole steps first, then the same with hooks timed.

        Times in us: ``step`` and ``hooks`` are medians, ``*_mean`` have all that happens now and
        then in them; CPU is of all threads of the process, per step.
        """
        for number in range(running):
            self.begin(self.tokens(seed + number, 40), 8000)
        scheduler = self.engine._scheduler
        self.step_until(lambda: len(scheduler.running) == running, f"{running} requests run")
        for _ in range(WARM_STEPS):
            self.engine.step()
        result = self._whole(steps)
        if self.scheduler is not None:
            self.watch()
            result |= self._hooks(steps)
            self.unwatch()
        self.engine.end_all()
        self.quiet()
        return result

    def _whole(self, steps: int) -> dict[str, Any]:
        walls = []
        server_s = cpu_s(self.server_pid) if self.server_pid else 0.0
        cpu_ns = time.process_time_ns()
        for _ in range(steps):
            start = time.perf_counter_ns()
            self.engine.step()
            walls.append((time.perf_counter_ns() - start) / 1e3)
        cpu_us = (time.process_time_ns() - cpu_ns) / 1e3 / steps
        server_us = (cpu_s(self.server_pid) - server_s) * 1e6 / steps if self.server_pid else 0.0
        return {
            "step_us": statistics.median(walls), "step_mean_us": statistics.fmean(walls),
            "cpu_us": cpu_us, "server_cpu_us": server_us,
        }  # fmt: skip

    def _hooks(self, steps: int) -> dict[str, Any]:
        walls = []
        self.clock.take()
        for _ in range(steps):
            self.engine.step()
            walls.append(self.clock.take().wall_us)
        return {"hooks_us": statistics.median(walls), "hooks_mean_us": statistics.fmean(walls)}

    def first_token(self, seed: int, tokens: int, warm: bool) -> dict[str, Any]:
        """Time to the first token of a prompt: new, then (``warm``) known to the cache only.

        ``cold_ms`` and ``warm_ms`` from arrival to the first token; CPU is of the engine's process
        and of the server meanwhile.
        """
        prompt = self.tokens(seed, tokens)
        result = self._once(prompt, "cold")
        self.quiet()
        if warm:
            result |= self._once(prompt, "warm")
            self.quiet()
        return result

    def _once(self, prompt: list[int], name: str) -> dict[str, Any]:
        server_s = cpu_s(self.server_pid) if self.server_pid else 0.0
        cpu_ns = time.process_time_ns()
        self.begin(prompt, 1)
        (done,) = self.engine.finish()
        server_s = cpu_s(self.server_pid) - server_s if self.server_pid else 0.0
        return {
            f"{name}_ms": done.ttft_ms,
            f"{name}_cpu_ms": (time.process_time_ns() - cpu_ns) / 1e6,
            f"{name}_server_cpu_ms": server_s * 1e3,
            f"{name}_hit_tokens": done.hit_tokens,
        }

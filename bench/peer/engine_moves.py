"""The engine's side of rows 3 and 5: whole prompts saved and loaded, timed from hook to hook."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch

from bench.common import cpu_s
from bench.peer.engine_base import PeerEngine, Say
from bench.peer.resident import resident


class Moves(PeerEngine):
    """One engine whose KV memory the bench fills itself: the forward does not touch it."""

    def __init__(self, setup: dict[str, Any], say: Say) -> None:
        super().__init__(setup, say)
        self._saved_s = self._loaded_s = 0.0
        self._wanted = ""
        self._digests: dict[int, list[bytes]] = {}
        if self.scheduler is not None:
            self._watch_moves()
        self._fill(1)

    def _watch_moves(self) -> None:
        """Note when a save is handed over and when a load is heard to have ended."""
        wait, update = self.worker.wait_for_save, self.scheduler.update_connector_output

        def wait_for_save() -> None:
            began_s = time.perf_counter()
            wait()
            if not self._saved_s and self.probe.saving():
                self._saved_s = began_s

        def update_connector_output(output: Any) -> None:
            update(output)
            if self._wanted in (output.finished_recving or ()):
                self._loaded_s = time.perf_counter()
                if self._wanted in output.failed_recving or output.invalid_block_ids:
                    raise RuntimeError("the load failed")

        self.worker.wait_for_save = wait_for_save
        self.scheduler.update_connector_output = update_connector_output

    def _fill(self, seed: int) -> None:
        """Write other bytes into all of the KV memory."""
        generator = torch.Generator().manual_seed(seed)
        for cache in self.engine.kv_caches:
            cache.uniform_(generator=generator)

    def save(self, seed: int, blocks: int, keep: bool) -> dict[str, Any]:
        """Compute a prompt in one step; timed from wait_for_save until its save is reported.

        ``keep``: remember what the blocks held, for a load that verifies.
        """
        name = self.begin(self._prompt(seed, blocks), 2)  # it still has its blocks afterwards
        self._saved_s = 0.0
        if self.scheduler is None:
            self.quiet()
            return {}
        self.step_until(lambda: self._saved_s > 0, "a save is handed over")
        if keep:
            self._digests[seed] = [self._digest(block) for block in self._ids(name, blocks)]
            self.quiet()
            return {}
        before = self._cpu()
        self.step_until(lambda: not self.probe.saving(), "the save ends")
        ended_s = time.perf_counter()
        result = self._result(blocks, ended_s - self._saved_s, before)
        self.quiet()
        return result

    def load(self, seed: int, blocks: int, verify: bool) -> dict[str, Any]:
        """Load a prompt; timed from its arrival until the scheduler hears of the end.

        Raises RuntimeError when not all of it was a hit, or a byte differs (``verify``).
        """
        if verify:
            self._fill(2)  # so that only a load can bring the bytes back
        self._loaded_s = 0.0
        before = self._cpu()
        began_s = time.perf_counter()
        self._wanted = name = self.begin(self._prompt(seed, blocks), 2)
        self.step_until(lambda: self._loaded_s > 0, "the load ends")
        result = self._result(blocks, self._loaded_s - began_s, before)
        if verify and [self._digest(one) for one in self._ids(name, blocks)] != self._digests[seed]:
            raise RuntimeError("loaded bytes differ from the saved ones")
        (done,) = self.engine.finish()
        if done.hit_tokens != blocks * 128:
            raise RuntimeError(f"{done.hit_tokens} tokens hit, not {blocks * 128}")
        self.quiet()
        return result

    def memory(self) -> dict[str, Any]:
        """Return this process's resident MiB and the size of its KV memory."""
        caches = self.engine.kv_caches
        total = sum(cache.numel() * cache.element_size() for cache in caches)
        return {"resident_mib": resident(0), "kv_mib": total / (1 << 20)}

    def _prompt(self, seed: int, blocks: int) -> list[int]:
        return self.tokens(seed, blocks * 128 + 1)  # one more, so that all blocks can hit

    def _ids(self, name: str, blocks: int) -> list[int]:
        (group,) = self.engine._scheduler.kv_cache_manager.get_block_ids(name)
        return list(group)[:blocks]

    def _cpu(self) -> tuple[float, float]:
        return time.process_time(), cpu_s(self.server_pid)

    def _result(self, blocks: int, seconds: float, before: tuple[float, float]) -> dict[str, Any]:
        caches = self.engine.kv_caches
        block_bytes = sum(cache[0].numel() * cache.element_size() for cache in caches)
        gigabytes = blocks * block_bytes / 1e9
        after = self._cpu()
        return {
            "gb_per_s": gigabytes / seconds,
            "engine_cpu_s_per_gb": (after[0] - before[0]) / gigabytes,
            "server_cpu_s_per_gb": (after[1] - before[1]) / gigabytes,
            "gigabytes": gigabytes,
        }

    def _digest(self, block: int) -> bytes:
        state = hashlib.blake2b(digest_size=16)
        for cache in self.engine.kv_caches:
            state.update(cache[block].contiguous().view(torch.uint8).numpy())
        return state.digest()

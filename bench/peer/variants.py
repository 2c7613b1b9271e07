"""The four engines that are compared: no connector, one that does nothing, kvferry, LMCache."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from bench.peer.peer_env import peer_python

NONE, NULL, FERRY, LMCACHE = "no connector", "empty connector", "kvferry", "LMCache"
CACHES = (FERRY, LMCACHE)
# On a busy machine an answer may take longer than the default: a hit is wanted, not a miss.
PROBE_MS_MAX = 10_000


def python_of(variant: str) -> str:
    """Return the interpreter whose environment holds the variant's connector."""
    return peer_python() if variant == LMCACHE else sys.executable


def engine_args(variant: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Return what the variant adds to vLLM's EngineArgs; ``options`` are its server's."""
    if variant == NONE:
        return {}
    names = {
        NULL: ("NullConnector", "bench.null_connector"),
        FERRY: ("FerryConnector", "kvferry_connector"),
        LMCACHE: ("LMCacheMPConnector", "lmcache.integration.vllm.lmcache_mp_connector"),
    }
    extra: dict[str, object] = {}
    if variant == FERRY:
        extra = {"probe_ms_max": PROBE_MS_MAX, **options}
    if variant == LMCACHE:
        extra = {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": options["port"],
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            # Look up when a request arrives, as kvferry does; by default it waits for the
            # scheduler's first question.
            "lmcache.mp.eager_prefetch": True,
        }
    name, module = names[variant]
    return {
        "kv_transfer_config": {
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    }


class Probe:
    """What a bench must ask of a live connector, answered from its own state."""

    def __init__(self, variant: str, scheduler: Any, worker: Any) -> None:
        self._variant, self._scheduler, self._worker = variant, scheduler, worker

    def saving(self) -> bool:
        """Whether a save was handed over and its end not yet heard of."""
        if self._variant == FERRY:
            return len(self._scheduler._scheduler._jobs) > 0
        if self._variant == LMCACHE:
            return bool(self._worker.worker_adapter.store_futures)
        return False

    def loading(self) -> bool:
        """Whether a load was handed over and its end not yet heard of."""
        if self._variant == FERRY:
            return any(job.load_of for job in self._worker._worker._open.values())
        if self._variant == LMCACHE:
            return bool(self._worker.worker_adapter.retrieve_futures)
        return False

"""Stands for the few names of vLLM that the worker half's modules import, where vLLM is not.

Nothing of it computes anything: describing the memory, the only thing that needs vLLM, comes from
the recording.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1"
NAMES = {
    "vllm.distributed.kv_events": ("BlockRemoved", "BlockStored", "KVCacheEvent"),
    f"{_BASE}.base": (
        "KVConnectorBase_V1", "KVConnectorHandshakeMetadata", "KVConnectorMetadata",
        "KVConnectorRole", "KVConnectorWorkerMetadata", "SupportsHMA",
    ),
    f"{_BASE}.metrics": ("KVConnectorPromMetrics", "KVConnectorStats", "PromMetric", "PromMetricT"),
    "vllm.utils.hashing": ("get_hash_fn_by_name",),
    "vllm.v1.core.kv_cache_utils": (
        "maybe_convert_block_hash", "resolve_kv_cache_block_sizes", "resolve_none_hash_seed",
    ),
    "vllm.v1.core.sched.output": ("SchedulerOutput",),
    "vllm.v1.kv_cache_interface": (
        "get_kv_cache_spec_kind", "get_kv_cache_spec_sliding_window", "iter_layer_specs",
    ),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource",),
    "vllm.v1.outputs": ("KVConnectorOutput",),
}  # fmt: skip


@dataclass
class KVConnectorTransferResults:
    """As vLLM has it: requests whose loads have ended, and those of them that failed."""

    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class _Anything(type):
    """A class whose attributes are itself: enough for what is named and never used."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


def install() -> None:
    """Put the names in place; vLLM itself is not imported in this process any more."""
    for module, names in NAMES.items():
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            if name not in sys.modules:
                sys.modules[name] = made = types.ModuleType(name)
                made.__path__ = []  # a package, so that its modules are looked for in it
        for name in names:
            setattr(sys.modules[module], name, _Anything(name, (), {}))
    sys.modules["vllm"].__version__ = "0.32.0"
    sys.modules["vllm.distributed.kv_events"].__dict__["MEDIUM_CPU"] = "CPU"
    sys.modules[f"{_BASE}.base"].__dict__["KVConnectorTransferResults"] = KVConnectorTransferResults

"""What a worker half reads of vLLM's parallel configuration, without a vLLM engine."""

from __future__ import annotations

from types import SimpleNamespace


def parallel_config(rank: int = 0, tp_size: int = 1) -> SimpleNamespace:
    """Return a stand-in of vLLM's ParallelConfig: one stage, one engine, ``tp_size`` ranks."""
    return SimpleNamespace(
        rank=rank,
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_index=0,
    )

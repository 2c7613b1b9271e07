"""One rank of an engine without a model: a worker half in a process of its own (four_ranks.py)."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kvferry_connector.config import read_config
from kvferry_connector.describe import tp_replicas
from kvferry_connector.meta import FerryMetadata
from kvferry_connector.worker_half import WorkerHalf
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.utils import allocate_kv_cache

LAYOUT = "LBNHC"


@dataclass(frozen=True)
class Cell:
    """A block of a group, and the prefix hash whose chunk it holds or is to hold."""

    group: int
    block: int
    name: bytes


@dataclass(frozen=True)
class StepOrder:
    """One step of a rank: zero blocks, read and compare ``checks``, compute ``writes``."""

    metadata: FerryMetadata
    zeroed: list[int]
    checks: list[Cell]
    writes: list[Cell]


@dataclass(frozen=True)
class StepEnd:
    """What a rank says at the end of a step; ``wrong`` names what it did not find as it was."""

    output: KVConnectorOutput
    wrong: list[str]


def pattern(name: bytes, layer: str, shard: int, count: int) -> bytes:
    """The bytes that this shard of a layer has for the chunk of this prefix hash."""
    seed = hashlib.blake2b(name + f"{layer}/{shard}".encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(seed, "little")).bytes(count)


class Rank:
    """One worker half and its memory; lives in the forked process."""

    def __init__(self, vllm_config: VllmConfig, kv_config: KVCacheConfig, rank: int) -> None:
        vllm_config.parallel_config.rank = rank
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._half = WorkerHalf(vllm_config, kv_config, read_config(extra))
        sizes = [group.kv_cache_spec.block_size for group in kv_config.kv_cache_groups]
        with self._half.memory_context():
            self._views = allocate_kv_cache(
                kv_config, torch.device("cpu"), KVCacheLayout[LAYOUT], sizes
            )
        self._half.register(self._views)
        self.handshake = self._half.handshake()
        self._layers = [group.layer_names for group in kv_config.kv_cache_groups]
        self._shards = [
            rank // tp_replicas(group.kv_cache_spec, vllm_config.parallel_config)
            for group in kv_config.kv_cache_groups
        ]

    def step(self, order: StepOrder) -> StepEnd:
        for block in order.zeroed:
            for view in self._views.values():
                view[block].zero_()
        self._half.bind(order.metadata)
        wrong = [text for cell in order.checks for text in self._check(cell)]
        for cell in order.writes:
            for layer, page, data in self._pages(cell):
                page.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(page.shape))
                assert page.numel() == len(data), layer
        self._half.end_forward()
        results = self._half.results()
        output = KVConnectorOutput(
            finished_recving=set(results.finished_recving) or None,
            failed_recving=set(results.failed_recving),
            kv_connector_worker_meta=self._half.worker_metadata(),
        )
        return StepEnd(output, wrong)

    def _check(self, cell: Cell) -> Iterator[str]:
        for layer, page, data in self._pages(cell):
            if page.contiguous().numpy().tobytes() != data:
                yield f"group {cell.group} block {cell.block} layer {layer}"

    def _pages(self, cell: Cell) -> Iterator[tuple[str, torch.Tensor, bytes]]:
        shard = self._shards[cell.group]
        for layer in self._layers[cell.group]:
            page = self._views[layer][cell.block].view(torch.uint8)
            yield layer, page, pattern(cell.name, layer, shard, page.numel())

    def sleep(self) -> None:
        """What vLLM does before it unmaps the KV memory, which then holds anything."""
        self._half.unregister()
        for view in self._views.values():
            view.view(torch.uint8).fill_(0xEE)

    def wake(self) -> None:
        self._half.restore()

    def shutdown(self) -> None:
        self._half.shutdown()


def serve(pipe: Any, vllm_config: VllmConfig, kv_config: KVCacheConfig, rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    half = Rank(vllm_config, kv_config, rank)
    pipe.send(half.handshake)
    while (order := pipe.recv()) is not None:
        pipe.send(half.step(order) if isinstance(order, StepOrder) else getattr(half, order)())
    half.shutdown()

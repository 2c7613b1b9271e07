"""vLLM's real Scheduler with FerryConnector in it, one step at a time, no model and no GPU."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvferry_connector.config import read_config
from kvferry_connector.describe import spec_kind
from kvferry_connector.entry import FerryConnector
from kvferry_connector.meta import FerryHandshake, FerryMetadata
from kvferry_connector.stats import FerryStats
from kvferry_connector.wire import hot
from kvferry_sidecar.sessions.model import RankGroup
from support.contents import Part
from support.further_rank import FurtherRank, rank_output
from support.other_connector import OtherMetadata, children, split, transfer_config
from support.scripted_node import ScriptedNode
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
    "word_embed_proj_dim": 64,
    "torch_dtype": "float16",
    "eos_token_id": 2,
    "pad_token_id": 1,
    "bos_token_id": 2,
}
BATCHES_IN_FLIGHT = 2  # of the asynchronous scheduler


def swa(block: int, window: int, **fields: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=2, head_size=8, dtype=torch.float16,
        sliding_window=window, **fields,
    )  # fmt: skip


def chunked(block: int, chunk: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block, num_kv_heads=2, head_size=8, dtype=torch.float16,
        attention_chunk_size=chunk,
    )  # fmt: skip


def mamba(block: int, scratch: int = 0, **fields: Any) -> MambaSpec:
    return MambaSpec(
        block_size=block, shapes=((2, 8), (4, 4)), dtypes=(torch.float16, torch.float32),
        mamba_cache_mode="align", num_speculative_blocks=scratch, **fields,
    )  # fmt: skip


def _rank_group(number: int, spec: Any) -> RankGroup:
    """The group as the sidecar has it after registration."""
    kind, _ = spec_kind(spec)
    return RankGroup(
        group=number,
        kind=kind,
        block_tokens=spec.block_size,
        layout=None,
        payload_bytes=0,
        num_blocks=0,
        save_rule={"full": "all", "mamba": "hand-offs"}.get(kind, "held"),
        window_tokens=getattr(spec, "sliding_window", None) or 0,
        chunk_tokens=getattr(spec, "attention_chunk_size", None) or 0,
        scratch_blocks=getattr(spec, "num_speculative_blocks", 0),
        spec=repr(spec),
    )


def full(block: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=8, dtype=torch.float16)


class SchedulerUnderTest:
    """A scheduler, its requests, and a ScriptedNode that runs its jobs.

    ``step`` checks after every pass: what is pinned or read is referenced, not null, and at the
    table index the job says (through the contents of the blocks).
    """

    def __init__(
        self, folder: Path, blocks: Sequence[int] = (16,), *, num_blocks: int = 64,
        batch: int = 64, policy: str = "recompute", asynchronous: bool = False,
        v2_runner: bool = False, specs: Sequence[Any] = (), retention: int | None = 0,
        ranks: int = 1, match_unit: int | None = None, beside: str = "", **extra: Any,
    ) -> None:  # fmt: skip
        specs = specs or [full(block) for block in blocks]
        blocks = [spec.block_size for spec in specs]
        vllm_config = make_config(
            folder, block_size=blocks[0], batch=batch, policy=policy,
            asynchronous=asynchronous, extra={"run_dir": str(folder), **extra}, ranks=ranks,
            beside=beside,
        )  # fmt: skip
        register_all_kvcache_specs(vllm_config)
        init_none_hash(sha256_cbor)
        kv_config = _kv_config(specs, num_blocks, retention)
        vllm_config.cache_config.num_gpu_blocks = num_blocks
        cache_config = vllm_config.cache_config
        if any(isinstance(spec, MambaSpec) for spec in specs):
            cache_config.mamba_cache_mode = "align"
        cache_config.prefix_match_unit = match_unit
        self.unit, self.hash_tokens = resolve_kv_cache_block_sizes(kv_config, vllm_config)
        kv_config.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            kv_config, vllm_config, self.unit, self.hash_tokens
        )
        cache_config.block_size = self.unit  # as the engine core leaves it
        self.blocks = list(blocks)
        self.node = ScriptedNode(
            [_rank_group(number, spec) for number, spec in enumerate(specs)], self.hash_tokens
        )
        self._hasher = get_request_block_hasher(self.hash_tokens, sha256_cbor)
        scheduler_class = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = scheduler_class(
            vllm_config=vllm_config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=self.unit,
            hash_block_size=self.hash_tokens,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = v2_runner
        self.outer = self.scheduler.connector
        connector, self.other = children(self.outer)
        assert isinstance(connector, FerryConnector)
        self.connector = connector
        self.half = connector._scheduler
        self.half._make_client = self.node
        config = read_config({"run_dir": str(folder), **extra})
        connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): FerryHandshake.of(rank, config) for rank in range(ranks)}
        )
        self._aggregator = KVOutputAggregator.from_connector(connector, ranks)
        self.further_ranks = [FurtherRank(rank) for rank in range(1, ranks)]
        assert self.node.registration is not None
        self.counts: Counter[str] = Counter()
        # The scheduler takes the counts away each step: keep their sums.
        connector.get_kv_connector_stats = self._count
        self._in_flight: deque[
            tuple[SchedulerOutput, FerryMetadata, OtherMetadata, dict[str, Part]]
        ] = deque()
        self._depth = BATCHES_IN_FLIGHT if asynchronous else 1
        self.free_at_start = self.pool.get_num_free_blocks()
        self.outputs: list[SchedulerOutput] = []
        self.requests: dict[str, Request] = {}

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(
        self, name: str, tokens: Sequence[int], max_tokens: int = 4, **sampling: Any
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
        params.update_from_generation_config({}, 2)
        request = Request(
            request_id=name, prompt_token_ids=list(tokens), sampling_params=params,
            pooling_params=None, block_hasher=self._hasher,
        )  # fmt: skip
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _count(self) -> FerryStats | None:
        stats = self.half.stats.take()
        self.counts.update(stats.data if stats is not None else {})
        return stats

    # --- steps -------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """One scheduling pass; its output is in flight afterwards."""
        output = self.scheduler.schedule()
        meta, of_other = split(output.kv_connector_metadata)
        assert isinstance(meta, FerryMetadata)
        self._in_flight.append((output, meta, of_other, self._parts(output)))
        self.outputs.append(output)
        return output

    def process(self) -> None:
        """Run the oldest batch in flight, and take its output."""
        output, meta, of_other, parts = self._in_flight.popleft()
        contents = self.node.contents
        contents.begin(output)
        hashes = {name: self.requests[name].block_hashes for name in parts}
        contents.forward(self.node.rules, self.hash_tokens, parts, hashes)
        end = self.node.execute(meta)
        for name, (blocks, tokens) in of_other.loads.items():
            self._fill(name, blocks, tokens)
            end.finished.add(name)
        self._check_pins()
        names = list(output.num_scheduled_tokens)
        sampled = [self._sample(name, parts[name]) for name in names]
        ends = [end, *(rank.step(end) for rank in self.further_ranks)]
        results = [rank_output(self.outer, names, sampled, one) for one in ends]
        whole = self._aggregator.aggregate(results) if self.further_ranks else results[0]
        self.scheduler.update_from_output(output, whole)

    def _fill(self, name: str, blocks: Sequence[int], tokens: int) -> None:
        """The other connector has loaded so many tokens of a request (one group, H = B)."""
        hashes = self.requests[name].block_hashes
        for chunk, block in enumerate(blocks[: tokens // self.unit]):
            self.node.contents.held[block] = (0, frozenset([hashes[chunk]]))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.schedule()
            if len(self._in_flight) >= self._depth:
                self.process()

    def drain(self) -> None:
        while self._in_flight:
            self.process()

    def run(self, steps_max: int = 400) -> None:
        """Step until the engine would go to sleep."""
        for _ in range(steps_max):
            if not self.scheduler.has_requests() and not self._in_flight:
                return
            if self.scheduler.has_requests():
                self.step()
            else:
                self.drain()
        raise AssertionError(f"still busy after {steps_max} steps: {self.scheduler.requests}")

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache (not through a reset, which would leave the namespace)."""
        assert self.pool.reset_prefix_cache()
        self.node.contents.held.clear()

    def assert_idle(self, errors: int = 0) -> None:
        """Nothing is left anywhere: pins, jobs, leases, admissions."""
        assert not self.half._jobs
        assert self.half._jobs.pinned_blocks == 0
        assert self.pool.get_num_free_blocks() == self.free_at_start
        assert not self.half._requests
        assert not self.node.running
        assert not self.half._lookup._open
        assert not self.half._lookup._live
        assert self.node.live[1] == []
        self._count()
        assert self.counts["hook_errors"] == errors

    # --- the model of memory -----------------------------------------------------------------

    def _sample(self, name: str, part: Part) -> list[int]:
        request = self.scheduler.requests.get(name)
        if request is None or not part.samples:
            return []
        accepted = request.num_tokens % (part.drafts + 1)
        return [100 + ((request.num_tokens + i) * 7 + len(name)) % 300 for i in range(accepted + 1)]

    def _parts(self, output: SchedulerOutput) -> dict[str, Part]:
        """What the runner computes for each request, with its tables at this very step."""
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        fresh = {*starts, *cached.resumed_req_ids}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {
            name: Part(
                starts[name],
                starts[name] + count,
                self.scheduler.kv_cache_manager.get_block_ids(name),
                samples=not self.requests[name].is_prefill_chunk,
                drafts=len(output.scheduled_spec_decode_tokens.get(name, ())),
                fresh=name in fresh,
            )
            for name, count in output.num_scheduled_tokens.items()
        }

    def _check_pins(self) -> None:
        for running in self.node.running:
            states = [state.block for state in getattr(running.job, "hand_offs", ())]
            for block_id in filter(None, [*_block_ids(running.order.frames), *states]):
                block = self.pool.blocks[block_id]
                assert not block.is_null
                assert block.ref_cnt > 0, f"{running.job} reads free block {block_id}"


def _kv_config(specs: Sequence[Any], num_blocks: int, retention: int | None) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=retention,
    )


def _block_ids(frames: tuple[bytes, ...]) -> list[int]:
    return np.frombuffer(frames[0], "<i4").tolist()


def saves_of(node: ScriptedNode) -> list[tuple[str, int, int]]:
    """(request, start, end) of each save submitted."""
    return [
        (job.request, job.start_tokens, job.end_tokens)
        for job in node.jobs
        if isinstance(job, hot.SaveJob)
    ]


def loads_of(node: ScriptedNode) -> list[tuple[str, int, int]]:
    """(request, local, total) of each load submitted."""
    return [
        (job.request, job.local_tokens, job.total_tokens)
        for job in node.jobs
        if isinstance(job, hot.LoadJob)
    ]


def make_config(
    folder: Path, *, block_size: int = 16, batch: int = 64, policy: str = "recompute",
    asynchronous: bool = False, extra: dict[str, Any] | None = None, ranks: int = 1,
    beside: str = "",
) -> VllmConfig:  # fmt: skip
    """A VllmConfig from a config.json in ``folder``; nothing is fetched."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float16", seed=1
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=batch, max_model_len=2048,
            enable_chunked_prefill=True, is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        cache_config=CacheConfig(
            block_size=block_size, enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
        ),
        kv_transfer_config=KVTransferConfig(**transfer_config({
            "kv_connector": "FerryConnector", "kv_connector_module_path": "kvferry_connector",
            "kv_role": "kv_both", "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra or {},
        }, beside)),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks, distributed_executor_backend="mp" if ranks > 1 else "uni"
        ),
    )  # fmt: skip

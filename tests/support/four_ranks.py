"""One engine of several ranks without a model: vLLM's real Scheduler, a worker half per process.

The scheduler half runs here, each worker half in a forked process with KV memory that vLLM laid
out. What a model would compute is a pattern of its own for every (prefix hash, layer, shard): a
block that is read is compared byte by byte with what it must hold, on every rank.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvferry_connector.entry import FerryConnector
from kvferry_connector.stats import FerryStats
from support.rank_process import LAYOUT, Cell, StepEnd, StepOrder, serve
from support.scheduler_configs import MODEL
from support.waiting import wait_until
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

CONTEXT_TOKENS = 16_384
ANSWER_S = 60.0
_fork = multiprocessing.get_context("fork")


class EngineOfRanks:
    """The scheduler and its ranks; ``wrong`` collects what a rank found otherwise than written."""

    def __init__(
        self, folder: Path, run_dir: Path, specs: Mapping[str, Any], *,
        ranks: int = 4, batch: int = 1024, kv_bytes: int = 4 << 20, draft_tokens: int = 0,
        eagle: bool = False, kv_events: bool = False, hybrid: bool = True, dcp: int = 1,
        stages: int = 1,
        apart: Path | None = None,  # run directory of the ranks after the first: another node's
    ) -> None:  # fmt: skip
        self._draft_tokens, self._dcp = draft_tokens, dcp
        parallel = (ranks // stages, dcp, stages)
        vllm_config = _make_config(folder, run_dir, specs, parallel, batch, draft_tokens)
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid
        if eagle:  # of which nothing is known here but that it is a drafter of this kind
            vllm_config.speculative_config.method = "eagle"
        vllm_config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=kv_events, publisher="null"
        )
        register_all_kvcache_specs(vllm_config)
        init_none_hash(sha256_cbor)
        items = list(specs.items())  # of which each stage has every n-th
        of_ranks = [dict(items[rank * stages // ranks :: stages]) for rank in range(ranks)]
        configs = get_kv_cache_configs(vllm_config, of_ranks, [kv_bytes] * ranks)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        instance = vllm_config.instance_id
        self._pipes, self._processes = [], []
        for rank, kv_config in enumerate(configs):
            ours, theirs = _fork.Pipe()
            if apart and rank:  # another start of vLLM, with ids of its own
                extra["run_dir"], vllm_config.instance_id = str(apart), f"{instance}-1"
            process = _fork.Process(target=serve, args=(theirs, vllm_config, kv_config, rank))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        extra["run_dir"], vllm_config.instance_id = str(run_dir), instance
        handshakes = {(0, rank): self._hear(rank) for rank in range(ranks)}
        self.scheduler = self._schedule_with(vllm_config, configs)
        connector = self.scheduler.connector
        assert isinstance(connector, FerryConnector)
        self.connector = connector
        connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        if apart is None:
            wait_until(lambda: connector.attachment()[0] == "ready", "all ranks are registered")
        self._aggregator = KVOutputAggregator.from_connector(connector, ranks)
        self._bases: dict[str, int] = {}
        self._written: dict[int, tuple[int, bytes]] = {}
        self.wrong: list[str] = []
        self.compared: Counter[int] = Counter()  # blocks per group, over all ranks
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()  # of jobs, by reason, over all ranks
        self.output: list[int] = []  # of the last request
        connector.get_kv_connector_stats = self._count
        self.events: list[Any] = []  # of the store, as vLLM takes them
        self._take_events, connector.take_events = connector.take_events, self._note_events

    def _schedule_with(self, vllm_config: VllmConfig, configs: list[KVCacheConfig]) -> Scheduler:
        kv_config = generate_scheduler_kv_cache_config(configs)
        vllm_config.cache_config.num_gpu_blocks = kv_config.num_blocks
        self.unit, self._hash_tokens = resolve_kv_cache_block_sizes(kv_config, vllm_config)
        kv_config.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            kv_config, vllm_config, self.unit, self._hash_tokens
        )
        self._hasher = get_request_block_hasher(self._hash_tokens, sha256_cbor)
        specs = [group.kv_cache_spec for group in kv_config.kv_cache_groups]
        self._blocks = [one.block_size * (self._dcp if one.dcp_sharded else 1) for one in specs]
        return Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=self.unit,
            hash_block_size=self._hash_tokens,
            log_stats=True,
        )

    def _count(self) -> FerryStats | None:
        stats: FerryStats | None = self.connector._scheduler.stats.take()
        self.counts.update(stats.data if stats is not None else {})
        return stats

    def _note_events(self) -> list[Any]:
        events = list(self._take_events())
        self.events += events
        return events

    def _hear(self, rank: int) -> Any:
        pipe, process = self._pipes[rank], self._processes[rank]
        answered = f"rank {rank} answers"
        wait_until(lambda: pipe.poll() or not process.is_alive(), answered, deadline_s=ANSWER_S)
        return pipe.recv()

    def run(self, name: str, tokens: Sequence[int], max_tokens: int = 1) -> int:
        """Run one request to its end and until its saves are reported; returns the hit."""
        before = self.counts["loaded_tokens"]
        request = self.add(name, tokens, max_tokens)
        wait_until(self._ended, f"{name} ends", every_s=0.0)
        self._count()
        self.output = list(request.output_token_ids)
        return self.counts["loaded_tokens"] - before

    def add(self, name: str, tokens: Sequence[int], max_tokens: int = 1) -> Request:
        """Have the scheduler run a request in the steps to come."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        request = Request(
            request_id=name, prompt_token_ids=list(tokens), sampling_params=params,
            pooling_params=None, block_hasher=self._hasher,
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def _ended(self) -> bool:
        self.step()
        return not self.scheduler.has_requests()

    def step(self) -> None:
        """One scheduling pass, executed by every rank, and its merged output."""
        output = self.scheduler.schedule()
        requests = dict(self.scheduler.requests)
        checks, writes = self._cells(output, requests)
        self.compared.update(cell.group for cell in checks for _ in self._pipes)
        zeroed = list(output.new_block_ids_to_zero or ())
        order = StepOrder(output.kv_connector_metadata, zeroed, checks, writes)
        for pipe in self._pipes:
            pipe.send(order)
        names = list(output.num_scheduled_tokens)
        sampled = [self._sample(requests[name], output) for name in names]
        outputs = []
        for rank in range(len(self._pipes)):
            end: StepEnd = self._hear(rank)
            self.wrong += [f"rank {rank} {text}" for text in end.wrong]
            told = end.output.kv_connector_worker_meta
            reports = told.reports.values() if told is not None else ()
            self.failures.update(
                one.reason for ends in reports for one in ends if one.status == "failed"
            )
            outputs.append(
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=sampled,
                    kv_connector_output=None if end.output.is_empty() else end.output,
                )
            )
        self.scheduler.update_from_output(output, self._aggregator.aggregate(outputs))
        if self._draft_tokens:
            drafts = [[3] * self._draft_tokens for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _sample(self, request: Request, output: Any) -> list[int]:
        """One token of its own, after two of the drafts: the others are rejected."""
        if request.is_prefill_chunk:
            return []
        drafts = output.scheduled_spec_decode_tokens.get(request.request_id, [])
        return [*drafts[:2], 100 + request.num_tokens % 300]

    def _cells(self, output: Any, requests: Mapping[str, Request]) -> tuple[list[Cell], list[Cell]]:
        """What a step reads, and what it computes of whole chunks whose hash is known."""
        checks, writes = [], []
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            base = self._bases.setdefault(name, starts[name])
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            hashes = requests[name].block_hashes
            for group, size in enumerate(self._blocks):
                for chunk, block in enumerate(tables[group]):
                    last = (chunk + 1) * size
                    if last > starts[name] + count or last // self._hash_tokens > len(hashes):
                        break
                    if not block:
                        continue
                    cell = Cell(group, block, hashes[last // self._hash_tokens - 1])
                    if last <= base or self._written.get(block) == (group, cell.name):
                        checks.append(cell)
                    else:
                        writes.append(cell)
                    self._written[block] = (group, cell.name)
        return checks, writes

    def tell(self, order: str, ranks: Sequence[int]) -> None:
        """Have these ranks "sleep" or "wake" between two steps (vLLM 0.33), one after the other."""
        for rank in ranks:
            self._pipes[rank].send(order)
            self._hear(rank)

    def forget(self) -> None:
        """Empty the engine's own prefix cache, not through a reset, which leaves the namespace."""
        assert self.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()

    def close(self) -> None:
        """End the ranks in order, by force what does not end."""
        self.connector.shutdown()
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(ANSWER_S)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


@contextmanager
def engine_of_ranks(
    folder: Path, run_dir: Path, specs: Mapping[str, Any], **options: Any
) -> Iterator[EngineOfRanks]:
    """Yield an engine that serves; afterwards every read must have been right."""
    engine = EngineOfRanks(folder, run_dir, specs, **options)
    try:
        yield engine
    finally:
        engine.close()
    assert not engine.wrong, engine.wrong[:5]
    assert engine.counts["hook_errors"] == 0


def _make_config(
    folder: Path, run_dir: Path, specs: Mapping[str, Any], sizes: tuple[int, int, int],
    batch: int, draft_tokens: int,
) -> VllmConfig:  # fmt: skip
    """``sizes``: tensor parallel, decode context parallel, pipeline parallel."""
    model = {**MODEL, "num_attention_heads": 4, "max_position_embeddings": CONTEXT_TOKENS}
    if sizes[1] > 1:  # heads are split first: only ranks that would hold the same share tokens
        model["num_key_value_heads"] = 1
    if not (folder / "config.json").exists():  # its time is part of the model's identity
        (folder / "config.json").write_text(json.dumps(model))
    model_config = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float16", seed=1)
    parallel_config = ParallelConfig(
        tensor_parallel_size=sizes[0], decode_context_parallel_size=sizes[1],
        pipeline_parallel_size=sizes[2], distributed_executor_backend="mp",
    )  # fmt: skip
    speculative_config = None
    if draft_tokens:
        speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=draft_tokens,
            prompt_lookup_max=2,
            target_model_config=model_config,
            target_parallel_config=parallel_config,
        )
    cache_config = CacheConfig(
        block_size=next(iter(specs.values())).block_size, enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",
    )  # fmt: skip
    cache_config.kv_cache_layout = LAYOUT
    if any(isinstance(spec, MambaSpec) for spec in specs.values()):
        cache_config.mamba_cache_mode = "align"
    return VllmConfig(
        model_config=model_config,
        parallel_config=parallel_config,
        speculative_config=speculative_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=batch, max_model_len=CONTEXT_TOKENS,
            enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
        ),
        cache_config=cache_config,
        kv_transfer_config=KVTransferConfig(
            kv_connector="FerryConnector", kv_connector_module_path="kvferry_connector",
            kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "run_dir": str(run_dir), "probe_ms_max": 20_000, "silent_ms_max": 60_000},
        ),
        device_config=DeviceConfig("cpu"),
    )  # fmt: skip

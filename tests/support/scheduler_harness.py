"""vLLM's real Scheduler with FerryConnector in it, one step at a time, no model and no GPU."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from kvferry_connector.config import read_config
from kvferry_connector.entry import FerryConnector
from kvferry_connector.meta import FerryHandshake, FerryMetadata
from kvferry_connector.stats import FerryStats
from kvferry_connector.wire import hot
from support.contents import Part
from support.further_rank import FurtherRank, rank_output
from support.other_connector import OtherMetadata, children, split
from support.scheduler_configs import drafter, full, make_config, make_kv_config, rank_group
from support.scripted_node import ScriptedNode
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BATCHES_IN_FLIGHT = 2  # of the asynchronous scheduler


class SchedulerUnderTest:
    """A scheduler, its requests, and a ScriptedNode that runs its jobs.

    ``step`` checks after every pass: what is pinned or read is referenced, not null, and at the
    table index the job says (through the contents of the blocks).
    """

    def __init__(
        self, folder: Path, blocks: Sequence[int] = (16,), *, num_blocks: int = 64,
        batch: int = 64, policy: str = "recompute", asynchronous: bool = False,
        v2_runner: bool = False, specs: Sequence[Any] = (), retention: int | None = 0,
        ranks: int = 1, match_unit: int | None = None, drafts: int = 0,
        eagle: Sequence[int] = (), beside: str = "", dcp: int = 1, **extra: Any,
    ) -> None:  # fmt: skip
        specs = specs or [full(block) for block in blocks]
        blocks = [spec.block_size for spec in specs]
        vllm_config = make_config(
            folder, block_size=blocks[0], batch=batch, policy=policy,
            asynchronous=asynchronous, extra={"run_dir": str(folder), **extra}, ranks=ranks,
            beside=beside, dcp=dcp,
        )  # fmt: skip
        if drafts:
            vllm_config.speculative_config = drafter(drafts)
        self._drafts = drafts
        register_all_kvcache_specs(vllm_config)
        init_none_hash(sha256_cbor)
        kv_config, self.unit, self.hash_tokens = make_kv_config(
            vllm_config, specs, num_blocks=num_blocks, eagle=eagle, retention=retention,
            match_unit=match_unit,
        )  # fmt: skip
        self.blocks = list(blocks)
        self.node = ScriptedNode(
            [rank_group(number, spec, number in eagle, dcp) for number, spec in enumerate(specs)],
            self.hash_tokens,
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
            {(0, rank): FerryHandshake.of(rank, config, self.half._half) for rank in range(ranks)}
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
        self,
        name: str,
        tokens: Sequence[int],
        max_tokens: int = 4,
        *,
        extras: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Request:
        """``extras``: what else the request is read with (adapter, salt, images, trace headers)."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
        params.update_from_generation_config({}, 2)
        request = Request(
            request_id=name, prompt_token_ids=list(tokens), sampling_params=params,
            pooling_params=None, block_hasher=self._hasher, **(extras or {}),
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
        for name, (blocks, tokens) in of_other.loads.items():
            self._fill(name, blocks, tokens)
        contents.wrong |= of_other.lost
        hashes = {name: self.requests[name].block_hashes for name in parts}
        contents.forward(self.node.rules, self.hash_tokens, parts, hashes)
        end = self.node.execute(meta)
        end.invalid = of_other.lost
        if self.other is not None and not self.other.synchronous:
            end.finished |= of_other.loads.keys()
        self._check_pins()
        names = list(output.num_scheduled_tokens)
        sampled = [self._sample(name, parts[name]) for name in names]
        taken = [len(tokens) for tokens in sampled]  # vLLM cuts the lists of those that end
        ends = [end, *(rank.step(end) for rank in self.further_ranks)]
        results = [rank_output(self.outer, names, sampled, one) for one in ends]
        whole = self._aggregator.aggregate(results) if self.further_ranks else results[0]
        self.scheduler.update_from_output(output, whole)
        for name, count in zip(names, taken, strict=True):
            if parts[name].drafts:  # now, as it may end before its next step
                rejected = parts[name].drafts + 1 - count
                self._confirm(name, parts[name], rejected)
                self._begin_earlier(name, rejected)
        if self._drafts and self._depth == 1:  # else the runner keeps them to itself
            decoding = [name for name in names if parts[name].samples]
            guesses = [[7] * self._drafts for _ in decoding]
            self.scheduler.update_draft_token_ids(DraftTokenIds(decoding, guesses))

    def _confirm(self, name: str, part: Part, rejected: int) -> None:
        request, rules = self.requests[name], self.node.rules
        right = min(part.end - rejected, request.num_tokens)
        self.node.contents.confirm(rules, name, part, right, request.block_hashes)

    def _begin_earlier(self, name: str, rejected: int) -> None:
        """Batches in flight were built as if no draft would be rejected; the runner knows."""
        for _, _, _, parts in self._in_flight:
            part = parts.get(name)
            if part is not None and part.fresh:
                return
            if part is not None:
                start, end = part.start - rejected, part.end - rejected
                parts[name] = replace(part, start=start, end=end)

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

    def forget_unused(self) -> None:
        """Have vLLM's own prefix cache give up what no request holds, as if room were needed."""
        unused = {one.block_id for one in self.pool.blocks if not one.ref_cnt and not one.is_null}
        self.pool.evict_blocks(unused)
        for block in unused if not self._in_flight else ():  # else a batch may still read it
            self.node.contents.held.pop(block, None)

    def warm_up(self, tokens: Sequence[int]) -> None:
        """Have the store hold a prompt and the engine nothing; what was sent for it is past."""
        self.add("warm", tokens)
        self.run()
        self.forget_local()
        self.node.jobs.clear()
        self.node.messages.clear()

    def replay_boundary(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a stored prompt a repeated one loads."""
        return (len(tokens) - 1) // self.unit * self.unit

    def first_computed(self, name: str) -> int:
        """Return how many tokens a request had when it first ran."""
        return next(
            new.num_computed_tokens
            for output in self.outputs
            for new in output.scheduled_new_reqs
            if new.req_id == name
        )

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


def states_of(node: ScriptedNode) -> list[int]:
    """The boundaries of the states that were handed over, in order."""
    return [state.end_tokens for job in node.jobs for state in getattr(job, "hand_offs", ())]

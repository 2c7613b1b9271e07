"""The scheduler half: promises loads, offers saves, pins what is saved, learns the outcomes.

It runs inside vLLM's scheduling loop: a request that does nothing costs nothing, and a step on
which nothing is due makes one small object and no system call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from kvferry_connector import vllm_compat
from kvferry_connector.client import Client
from kvferry_connector.describe import describe_engine, spec_kind
from kvferry_connector.events import KvEvents
from kvferry_connector.half import Half
from kvferry_connector.jobs import NO_EPOCH, JobOrder, Jobs, cut_tables, pack_ids
from kvferry_connector.log import logger
from kvferry_connector.lookup import Lookup, MakeClient
from kvferry_connector.meta import FerryHandshake, FerryMetadata, FerryWorkerMetadata
from kvferry_connector.nodes import Nodes, by_node, spread
from kvferry_connector.pace import Pace, step_tokens_min
from kvferry_connector.requests import Admission, Phase, Tracked
from kvferry_connector.saves import Saver
from kvferry_connector.stats import FerryStats, split_hit
from kvferry_connector.wire import hot
from kvferry_connector.wire.codec import encode_job
from kvferry_connector.wire.names import NONCE_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvferry_connector.config import FerryConfig


Offloads = list[tuple[int, int, int]]  # states: group, block, tokens they are the state after


class SchedulerHalf:
    """All hooks of the scheduler's side; entry.py guards them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: FerryConfig,
    ) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
        dcp = parallel.decode_context_parallel_size
        self._config = config
        self._make_client: MakeClient = Client
        ids = (transfer.engine_id, vllm_config.instance_id)
        self._half = Half("scheduler", *ids, dp_rank=int(parallel.data_parallel_index))
        self._engine = describe_engine(vllm_config, kv_cache_config, os.urandom(NONCE_BYTES))
        self._version = self._engine.version
        self._world_size = int(parallel.world_size)
        self._block_tokens = [s.block_size * (dcp if s.dcp_sharded else 1) for s in specs]
        kinds = [spec_kind(spec)[0] for spec in specs]
        self._states = {group for group, kind in enumerate(kinds) if kind == "mamba"}
        # Of these, more blocks are allocated than a load writes: re-prefill, scratch.
        fields = ("extra_retained_tokens", "num_speculative_blocks")
        self._partly = {
            group
            for group, spec in enumerate(specs)
            if any(getattr(spec, field, 0) for field in fields)
        }
        self.stats = FerryStats()
        self._jobs = Jobs(self._world_size, config.pins_max(kv_cache_config.num_blocks))
        self._lookup = Lookup(config, self._engine, self.stats.count)
        self._saver = Saver(
            self._jobs, self._lookup.link, self._engine, block_tokens=self._block_tokens,
            gather_tokens=config.gather_tokens, count=self.stats.count,
        )  # fmt: skip
        self._events: KvEvents | None = None
        if self._engine.kv_events:
            hash_tokens = self._engine.hash_block_tokens
            self._events = KvEvents(specs, self._block_tokens, hash_tokens, self.stats.count)
            self._saver.events, self._lookup.hear_event = self._events, self._events.hear
        self._requests: dict[str, Tracked] = {}
        self._loads: list[JobOrder] = []  # of the step being built
        self._admissions = self._step = self._rotation = 0
        self._quiet = FerryMetadata(0)  # of every step with nothing to do
        self._pace = Pace()
        self._progress_s, self._gave_up = 0.0, False

    # --- life of the engine ------------------------------------------------------------------

    def attach(self, handshakes: Iterable[FerryHandshake]) -> None:
        """Start towards this node's sidecar, and have deputies do so on further ones, once.

        Ranks without a handshake leave the engine without a cache: a job ends only when every rank
        has reported it. So does a scheduler half that has no rank beside it.
        """
        if self._lookup.client is not None:
            return
        here = FerryHandshake.of(-1, self._config, self._half)
        # Under a MultiConnector these may be another connector's: vLLM takes the first child's.
        ours = [shake for shake in handshakes if isinstance(shake, FerryHandshake)]
        ranks, *further = by_node(ours, here)
        if not ranks or len(ours) != self._world_size:
            self.stats.count("ranks_missing")
            logger.error(
                "only ranks %s of %d use a sidecar, %s of them the one in %s of this host: the "
                "cache stays off. All ranks must register without an error, one of them beside the "
                "scheduler with its run_dir. A MultiConnector must name FerryConnector before "
                "connectors that shake hands",
                sorted(shake.rank for shake in ours), self._world_size, ranks, here.run_dir,
            )  # fmt: skip
            return
        engine = msgspec.structs.replace(self._engine, version=self._version)
        registration, *others = spread(engine, [ranks, *further])
        if others:
            self._lookup.nodes = Nodes(others, self.stats.count)
        client = self._make_client(self._config, self._half, registration)
        client.start()
        self._lookup.client = client

    def bind(self, manager: KVCacheManager, before_reset: Callable[[], object]) -> None:
        """Take the pool whose blocks are pinned; ``before_reset`` runs before each cache reset.

        Pins do not count in a reset: without them vLLM refuses it, or raises when the running
        requests were to be reset too. They are back, on the same blocks, before anything else runs.
        Raises UnsupportedEngineError for a manager that hashes past its blocks.
        """
        vllm_compat.check_manager(manager)
        settle = self._saver.doubts.settle
        vllm_compat.around_reset(manager, before_reset, self._jobs.lifted, settle)
        self._saver.manager = manager
        self._jobs.pool = vllm_compat.block_pool(manager)

    def rotate(self) -> None:
        """Give the namespace a new version: nobody loads or saves under the old one any more.

        Requests that hold KV keep their old stamp, and with it neither load nor save until they
        start anew. A load under way is cancelled, and fails on every rank whatever it brought.
        Saves that no rank was told of are given up: the engine may sleep before its next step.
        """
        self._version = os.urandom(NONCE_BYTES)
        self._rotation += 1
        self._quiet = FerryMetadata(0, rotation=self._rotation)
        self.stats.count("rotations")
        if self._lookup.client is not None:
            self._lookup.client.rotate(self._version)
            if self._lookup.nodes is not None:
                self._lookup.nodes.rotate(self._version)
            for admission in (tracked.admission for tracked in self._requests.values()):
                if admission.phase is Phase.LOADING and admission.job in self._jobs:
                    self._lookup.cancel(admission.job)
        self._saver.abandon()

    def pending(self) -> bool:
        """Whether the engine must keep stepping: for further nodes, or for reports.

        For these ``awake_ms_max`` since the last one. Giving up rotates the version (fail closed);
        blocks stay pinned until they are reported.
        """
        nodes = self._lookup.nodes
        if nodes is not None and nodes.pending():
            return True
        if not self._jobs or self._gave_up:
            return False
        if time.monotonic() - self._progress_s < self._config.awake_ms_max / 1000:
            return True
        self._gave_up = True
        self.stats.count("awake_ms_max")
        self.rotate()
        return False

    def attachment(self) -> tuple[str, int]:
        """Return the client's state, and the epoch of the sidecar it is registered at (or 0)."""
        client = self._lookup.client
        if client is None:
            return "stopped", 0
        link, state = client.link(), client.state
        if state == "ready" and self._lookup.nodes is not None and self._lookup.link() is None:
            state = "registered"  # a further node is not there yet
        return state, 0 if link is None else link.epoch

    def shutdown(self) -> None:
        """Leave the sidecar."""
        client, self._lookup.client = self._lookup.client, None
        if client is not None:
            client.close()

    # --- life of a request -------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """Start its first admission and send its hashes, so that the sidecar can look ahead."""
        tracked = Tracked(request, Admission(0, b""), 0)
        self._requests[request.request_id] = tracked
        self._renew(tracked)
        if self._config.loads:
            self._lookup.look_ahead(tracked)

    def _renew(self, tracked: Tracked) -> None:
        """The request holds no KV (new, preempted, or not started under this version)."""
        former = tracked.admission
        self._saver.drop(tracked)
        self._admissions += 1
        tracked.admission = former.succeed(self._admissions, self._version)
        self._lookup.settle(former, tracked.admission)
        tracked.preemptions = tracked.request.num_preemptions
        tracked.saved_tokens, tracked.groups = 0, ()
        self._lookup.begin(tracked)

    def matched(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Return (tokens beyond ``local_tokens`` to load, True), (0, False), or (None, False)."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.admission.step_back():
            return 0 if tracked is None else None, False
        admission = tracked.admission
        anew = admission.version != self._version or admission.may_try_shorter
        if anew or tracked.preemptions != request.num_preemptions:
            self._renew(tracked)
        if not self._config.loads or request.skip_reading_prefix_cache:
            return 0, False
        alone = len(self._requests) == 1  # then waiting delays nobody
        tokens, link = self._lookup.ask(tracked, local_tokens, alone=alone)
        if tokens and link is not None:
            tracked.groups = link.loaded_groups
        return tokens, bool(tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Blocks exist: for ``external_tokens`` of ours (a load starts), or for computing (0)."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            if external_tokens > 0:
                self.fail_load(request)
            return
        admission = tracked.admission
        if external_tokens > 0:
            self._load(tracked, blocks, external_tokens)
            return
        leased = admission.leased
        if admission.decline() and leased:
            self._lookup.settle(admission)
        if admission.phase is not Phase.LOADING and self._config.saves:
            self._saver.admit(tracked)

    def _load(self, tracked: Tracked, blocks: KVCacheBlocks, external_tokens: int) -> None:
        request, admission = tracked.request, tracked.admission
        local = admission.local_tokens
        total = self._promise(tracked.request.request_id, admission, external_tokens)
        if total is None:
            self.stats.count("loads_unpromised")
            return
        slices, ids = cut_tables(
            blocks.blocks, self._block_tokens, tracked.groups, local, total,
            whole=self._states, compact=True,
        )  # fmt: skip
        message = hot.LoadJob(
            job=admission.job, life=self._engine.life, version=admission.version,
            request=request.request_id, admission=admission.number, step=self._step + 1,
            local_tokens=local, total_tokens=total, tables=slices,
        )  # fmt: skip
        self._loads[-1] = self._loads[-1]._replace(
            epoch=admission.epoch, body=encode_job(message), frames=(pack_ids(ids),)
        )
        self.stats.count("loads_again" if admission.failures else "loads")
        self.stats.count("loaded_tokens", external_tokens)

    def _promise(self, request_id: str, admission: Admission | None, tokens: int) -> int | None:
        """Note that the engine waits for a load: until its order is complete, it is one to fail."""
        job = self._jobs.open_load(request_id)
        self._progress()
        self._loads.append(JobOrder(job, request_id, NO_EPOCH, b"", ()))
        return admission.load(job, tokens) if admission is not None else None

    def fail_load(self, request: Request) -> None:
        """After an exception in ``allocated``: every rank reports the promised load as failed."""
        request_id = request.request_id
        if all(order.request != request_id for order in self._loads):
            tracked = self._requests.get(request_id)
            self._promise(request_id, tracked.admission if tracked is not None else None, 0)

    def finished(self, request: Request) -> None:
        """Forget the request: its last save is ordered and pinned, a load under way cancelled."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        admission = tracked.admission
        self._lookup.settle(admission)
        if admission.phase is Phase.LOADING and admission.job in self._jobs:
            self._lookup.cancel(admission.job)
        self._saver.end(tracked, self._step + 1, self._version)
        if self._saver.orders:
            self._progress()

    def finished_tail(self, request: Request, states: Offloads) -> None:
        """The request ends where a resend finds its last state: pin it before it is freed."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            self._saver.hand_over(tracked, states, 0, self._step + 1, self._version)
            self._progress()

    def loaded_groups(self, request: Request) -> tuple[int, ...]:
        """Return the groups whose every destination block the load writes; stable over retries."""
        tracked = self._requests.get(request.request_id)
        return () if tracked is None else tuple(g for g in tracked.groups if g not in self._partly)

    def hit_sources(self, request: Request, external_tokens: int) -> dict[CacheHitSource, int]:
        """Split ``external_tokens`` by the tier that supplies them."""
        tracked = self._requests.get(request.request_id)
        return split_hit({} if tracked is None else tracked.admission.sources, external_tokens)

    # --- one step ----------------------------------------------------------------------------

    def build(self, output: SchedulerOutput) -> FerryMetadata:
        """Return this step's number and jobs.

        Preempted and resumed requests need nothing here: they hold no KV, so each is asked for
        again (``matched``) before it runs, and starts anew there, whatever shape it comes in.
        """
        self._step = step = self._step + 1
        saver, tokens = self._saver, output.total_num_scheduled_tokens
        if output.has_sync_kv_loads:  # ours are none
            saver.doubts.begin(step)
        if self._states and output.kv_connector_block_state is not None:
            self._hand_over(output, output.kv_connector_block_state.boundary_state_offloads)
        if tokens >= step_tokens_min or self._pace.open:
            self._pace.step(tokens, time.perf_counter())
            self._lookup.tell_pace(self._pace.token_ns)
        if tokens and saver.pass_on(tokens, output.num_scheduled_tokens):
            saver.advance(output.num_scheduled_tokens, step, self._version)
        if self._lookup.stirred:
            self._lookup.end_step()
        quiet = not (self._loads or saver.orders or saver.doubts.active)
        return self._quiet if quiet and self._lookup.nodes is None else self._take_orders()

    def _hand_over(self, output: SchedulerOutput, offloads: Mapping[str, Offloads]) -> None:
        for request_id, states in offloads.items():
            if (tracked := self._requests.get(request_id)) is not None:
                tokens = output.num_scheduled_tokens.get(request_id, 0)
                self._saver.hand_over(tracked, states, tokens, self._step, self._version)

    def _take_orders(self) -> FerryMetadata:
        if self._saver.orders:
            self._progress()
        loads, saves, nodes = self._loads, self._saver.take(self._step), self._lookup.nodes
        self._loads, relay = [], None
        if nodes is not None:
            loads, saves = nodes.address(loads), nodes.address(saves)
            relay = nodes.take(self._lookup.beat)
        rotation, doubtful = self._rotation, self._saver.doubts.active
        return FerryMetadata(self._step, tuple(loads), tuple(saves), rotation, relay, doubtful)

    def abandon_step(self) -> FerryMetadata:
        """After an exception in ``build``: give this step's saves up and fail its loads."""
        self._saver.abandon()
        self._loads = [order._replace(epoch=NO_EPOCH) for order in self._loads]
        return self._take_orders()

    def reported(self, meta: FerryWorkerMetadata, invalid: Collection[int] = ()) -> None:
        """Take the ranks' reports, what deputies learned, and blocks another connector lacks."""
        if meta.ended_step and self._saver.doubts.ended(meta.ended_step, invalid=bool(invalid)):
            self._saver.abandon()
        if meta.reports:
            self._progress()
        for number, reports in meta.reports.items():
            for report in reports:
                job = self._jobs.report(number, report)
                if job is not None:
                    kind = "loads" if job.load_of else "saves"
                    self.stats.count(f"{kind}_{'done' if job.done else 'failed'}")
                    if self._events is not None and not job.done:
                        self._events.failed(number)
                    tracked = self._requests.get(job.load_of)
                    if tracked is not None and tracked.admission.job == number:
                        tracked.admission.shorter_tokens = job.shorter_tokens or 0
        self._lookup.hear_nodes(meta)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return what this engine's saves stored since the last call, and what left the store."""
        if self._events is None:
            return ()
        self._lookup.poll()
        return self._events.take()

    def loaded(self, output: KVConnectorOutput) -> None:
        """Take the loads that have ended on every rank, and remember failures."""
        for request_id in output.finished_recving or ():
            tracked = self._requests.get(request_id)
            ok = request_id not in output.failed_recving
            if tracked is not None and tracked.admission.loaded(ok):
                self._lookup.unlease(tracked.admission)

    def _progress(self) -> None:
        self._progress_s, self._gave_up = time.monotonic(), False

"""The worker half of one rank: shares its KV memory, submits jobs, reports each one's end once.

Memory a copy reads or writes belongs to the copy until it has stopped: a load is reported only
on an outcome, on the proof that the sidecar is dead, or when the sidecar says that it never had
the job and never will take it. No time-out reports anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvferry_connector.acks import Acks
from kvferry_connector.client import Client
from kvferry_connector.deputy import Deputy
from kvferry_connector.describe import describe_rank
from kvferry_connector.export import FencePage, KvMemory
from kvferry_connector.half import Half
from kvferry_connector.jobs import JobOrder, Report
from kvferry_connector.log import logger
from kvferry_connector.meta import FerryHandshake, FerryMetadata, FerryWorkerMetadata, Relay
from kvferry_connector.stats import FerryStats
from kvferry_connector.wire import hot
from kvferry_connector.wire.codec import ids_max

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvferry_connector.config import FerryConfig
    from kvferry_connector.link import Link
    from kvferry_connector.wire.attach import RegisterRank


_ACKS_MAX = 64  # outcomes whose acknowledgement waits for the next heartbeat
_SWEEP_S = 0.01  # between two looks at every open job, while the link holds
_withdraw_s_max = 10.0  # the engine's sleep waits so long for copies that run on its memory
_IDLE_STEPS = 256  # with no job open: an outcome whose acknowledgement was lost comes again
# Shared by all steps with nothing to report; vLLM only reads it.
_NOTHING = KVConnectorTransferResults()


@dataclass(slots=True)
class OpenJob:
    """A job the sidecar of ``epoch`` was given. ``load_of``: the request of a load, else empty."""

    epoch: int
    load_of: str
    asked_s: float
    rotation: int


class WorkerHalf:
    """All hooks of the worker's side; entry.py guards them."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: FerryConfig
    ) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._config = config
        self._rank = int(vllm_config.parallel_config.rank)
        self._memory = KvMemory()
        self._fence: FencePage  # once registered: an engine without it has to start, too
        self._client: Client | None = None
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        self._serial, self._asleep = 0, False
        self._deputy: Deputy | None = None  # on a further node, in one of its ranks
        self._bound: FerryMetadata | None = None  # the step that runs
        self._open: dict[int, OpenJob] = {}
        self._reports: dict[int, Report] = {}  # not yet on their way to the scheduler half
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._acks = Acks()
        self._acks_max = _ACKS_MAX
        self._idle_steps = 0
        self._sweep_at_s = 0.0
        self._rotation = 0
        self._ended_step = 0  # that the scheduler half waits for
        self.stats = FerryStats()

    # --- life of the engine ------------------------------------------------------------------

    def memory_context(self) -> AbstractContextManager[object] | None:
        """Return the context in which the engine allocates KV memory that can be shared.

        None on a GPU: ours would take the place of the pool that sleep mode frees.
        """
        if self._vllm_config.device_config.device_type != "cpu":
            return None
        context: AbstractContextManager[object] = self._memory.context()
        return context

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the KV memory and start towards the sidecar.

        Raises DescribeError, ExportError, CudaError or UnsupportedEngineError when it cannot be
        shared.
        """
        if self._client is not None:
            return
        self._kv_caches = kv_caches
        registration = self._describe()
        self._fence = FencePage()
        if self._memory.driver is not None:
            device = self._memory.device
            self._fence.follow(self._memory.driver, lambda: _current_stream(device), device)
        client = Client(self._config, self._half(), registration, self._memory.handles())
        client.set_acks(self._acks)
        client.start()
        self._client = client

    def _describe(self) -> RegisterRank:
        self._serial += 1
        return describe_rank(
            self._vllm_config, self._kv_cache_config, self._kv_caches, self._memory, self._config,
            serial=self._serial,
        )  # fmt: skip

    def unregister(self) -> None:
        """Take the KV memory back, before the engine unmaps it; again does nothing.

        The engine has drained its loads, so what is open are saves at most: the sidecar stops their
        copies and closes the memory before it answers, and they end as failed here. Without an
        answer the memory stays open there and they stay open here, and nothing new is lent until
        it comes: what still runs can only reach the memory of before.
        """
        client = self._client
        if client is None or self._asleep:
            return
        self._asleep = True
        back = client.withdraw(_withdraw_s_max)
        if back:
            for job in list(self._open):
                self._end(job, "failed", "unregistered")
        else:
            self.stats.count("withdraw_s_max")
            logger.warning(
                "rank %d: no sidecar answered within %g s that the KV memory is closed; until one "
                "does, this engine has no cache, and what it sleeps off may stay allocated",
                self._rank, _withdraw_s_max,
            )  # fmt: skip
        self._memory.forget(closed=back)

    def restore(self) -> None:
        """Lend the KV memory as it is mapped now, under the next serial; again does nothing.

        Raises as ``register`` does; the engine then has no cache.
        """
        client = self._client
        if client is not None and self._asleep:
            client.lend(self._describe(), self._memory.handles())
            self._asleep = False

    def _half(self) -> Half:
        config = self._vllm_config
        ids = (config.kv_transfer_config.engine_id, config.instance_id)
        dp_rank = int(config.parallel_config.data_parallel_index)
        return Half("worker", *ids, self._rank, self._fence.fd, dp_rank)

    def handshake(self) -> FerryHandshake | None:
        """Return where this rank lives; None when its memory could not be registered."""
        if self._client is None:
            return None
        return FerryHandshake.of(self._rank, self._config, self._half())

    def shutdown(self) -> None:
        """Leave the sidecar and close what it was lent."""
        client, self._client = self._client, None
        deputy, self._deputy = self._deputy, None
        if deputy is not None:
            deputy.close()
        if client is not None:
            client.close()
            self._memory.close()
            self._fence.close()

    # --- one step ----------------------------------------------------------------------------

    def bind(self, metadata: FerryMetadata) -> None:
        """The step's blocks are zeroed and copied: loads may start into them."""
        self._rotation = metadata.rotation
        if self._bound is not None:
            self.abandon(is_load=False)  # no wait_for_save came for the step before
        self._ended_step = metadata.step if metadata.doubtful else 0
        if not metadata.step:
            return
        self._bound = metadata
        if metadata.relay is not None:
            self._relay(metadata.relay)
        if metadata.loads:
            self._fence.bound(metadata.step)
            self._submit(metadata.loads, is_load=True)

    def _relay(self, relay: Relay) -> None:
        """Do a deputy's part of the step, where this rank is one."""
        engine = relay.engines.get(self._rank)
        if self._deputy is None and engine is not None:
            self._deputy = Deputy(self._config, self._half(), engine)
        if self._deputy is not None:
            self._deputy.obey(relay)

    def end_forward(self) -> None:
        """The step's KV is written: saves may read it."""
        metadata = self._bound
        if metadata is None:
            return
        if metadata.saves:
            self._fence.done(metadata.step)
            self._submit(metadata.saves, is_load=False)
        self._bound = None

    def abandon(self, *, is_load: bool) -> None:
        """After an exception while submitting: what was not submitted is reported as failed."""
        bound = self._bound
        if bound is None:
            return
        for order in bound.loads if is_load else bound.saves:
            if order.job not in self._open and order.job not in self._reports:
                self._report(order.job, order.request if is_load else "", "failed", "hook_error")
        if not is_load:
            self._bound = None  # what is reported must not go out after all

    def _submit(self, orders: tuple[JobOrder, ...], *, is_load: bool) -> None:
        client = self._client
        link = client.link() if client is not None else None
        now_s = time.monotonic()
        for order in orders:
            load_of = order.request if is_load else ""
            if client is None or link is None or order.epoch_for(self._rank) != link.epoch:
                away = "unregistered" if self._asleep else "sidecar_away"
                self._report(order.job, load_of, "failed", away)
            elif client.send(link, hot.Submit(order.body), order.frames):
                self._open[order.job] = OpenJob(link.epoch, load_of, now_s, self._rotation)
            else:
                self._report(order.job, load_of, "failed", "submit_refused")

    def _report(
        self, job: int, load_of: str, status: str, reason: str, shorter_tokens: int = 0
    ) -> None:
        """Note the end of a job on this rank, for both vLLM and the scheduler half."""
        self._reports[job] = Report(self._rank, status, reason, shorter_tokens)
        if load_of:
            self._finished.add(load_of)
            if status != "done":
                self._failed.add(load_of)
        self.stats.count(f"rank_{'loads' if load_of else 'saves'}_{status}")

    # --- outcomes ----------------------------------------------------------------------------

    def results(self) -> KVConnectorTransferResults:
        """Return the requests whose load has ended on this rank since the last call."""
        self._idle_steps += 1
        if self._open or self._idle_steps >= _IDLE_STEPS:
            self._idle_steps = 0
            self._poll()
        if self._deputy is not None:
            self._deputy.listen()
        if not self._finished:
            return _NOTHING
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def worker_metadata(self) -> FerryWorkerMetadata | None:
        """Return the reports since the last call, None when there are none."""
        if not self._reports and self._deputy is None and not self._ended_step:
            return None
        ended, self._ended_step = self._ended_step, 0  # with its own output, or never
        nodes, heard = self._deputy.take() if self._deputy is not None else ({}, [])
        if not self._reports and not nodes and not heard and not ended:
            return None
        reports, self._reports = self._reports, {}
        merged = {job: [report] for job, report in reports.items()}
        return FerryWorkerMetadata(merged, nodes, heard, ended)

    def _poll(self) -> None:
        client = self._client
        if client is None:
            return
        link, now_s = client.link(), time.monotonic()
        if link is not None:
            for message, _ in client.receive(link):
                self._hear(message)
            # Few go with the next heartbeat: sending costs more than hearing.
            acks = self._acks.take(ids_max) if len(self._acks) > self._acks_max else []
            if acks and not client.send(link, hot.OutcomeAck(acks)):
                self._acks.put_back(acks)
        if link is None or now_s >= self._sweep_at_s:
            self._sweep_at_s = now_s + _SWEEP_S
            self._sweep(client, link, now_s)

    def _sweep(self, client: Client, link: Link | None, now_s: float) -> None:
        """End the jobs of dead sidecars, and ask for those that were not heard of for long."""
        client.tell(self.stats.count)
        ask_s = self._config.job_ask_ms / 1000
        for job, open_job in list(self._open.items()):
            if client.is_dead(open_job.epoch):
                # All its threads have ended, and with them every copy.
                self._end(job, "failed", "sidecar_died")
            elif now_s - open_job.asked_s >= ask_s and link is not None:
                open_job.asked_s = now_s
                if link.epoch == open_job.epoch:
                    client.send(link, hot.JobStatus(job))

    def _hear(self, message: hot.FromSidecar) -> None:
        if isinstance(message, hot.Outcome):
            self._end(message.job, message.status, message.reason, message.shorter_tokens)
            self._acks.append(message.job)  # only now: what is acknowledged never comes again
        elif isinstance(message, hot.JobState) and message.state == "unknown":
            self._end(message.job, "failed", "job_unknown")
        elif isinstance(message, hot.Error):
            logger.warning("sidecar: %s (%s)", message.message, message.remedy)
            self.stats.count("sidecar_errors")
            if message.job in self._open:  # an error ends nothing: ask what became of it
                self._open[message.job].asked_s = self._sweep_at_s = float("-inf")

    def _end(self, job: int, status: str, reason: str, shorter_tokens: int = 0) -> None:
        open_job = self._open.pop(job, None)
        if open_job is not None:  # else: an outcome that was sent again
            if open_job.load_of and open_job.rotation != self._rotation:
                # The cache was reset meanwhile: what came is of the weights before.
                status, reason, shorter_tokens = "failed", "reset", 0
            self._report(job, open_job.load_of, status, reason, shorter_tokens)


def _current_stream(device: int) -> int:
    """Return the CUDA stream of a device on which this thread's step runs."""
    import torch  # noqa: PLC0415 - loaded long ago where there is a GPU

    return int(torch.cuda.current_stream(device).cuda_stream)

"""FerryConnector: what vLLM sees. One delegation per hook, each guarded.

No exception leaves a hook: a caught one is counted, logged once per hook and kind, and becomes
the hook's safe answer (a miss; after a promise: a failed load on every rank).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry_connector import vllm_compat
from kvferry_connector.config import read_config
from kvferry_connector.log import logger
from kvferry_connector.meta import FerryHandshake, FerryMetadata, FerryWorkerMetadata
from kvferry_connector.scheduler_half import SchedulerHalf
from kvferry_connector.stats import FerryPromMetrics, FerryStats
from kvferry_connector.worker_half import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


F = TypeVar("F", bound=Callable[..., Any])


def _guarded(instead: Callable[..., Any]) -> Callable[[F], F]:
    """Return a decorator: when the hook raises, ``instead`` is called with the same arguments."""

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def guarded(self: FerryConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the cache must never fail the engine
                self._caught(hook.__name__, error)
                return instead(self, *args, *kwargs.values())  # it has names of its own

        return cast("F", guarded)

    return decorate


def _nothing(self: FerryConnector, *args: Any) -> None:  # noqa: ARG001 - a hook
    return None


class FerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not followed
    """kvferry's connector. Name it in ``--kv-transfer-config``, with kv_role ``kv_both``.

    Raises ConfigError or UnsupportedEngineError at construction for what cannot be served.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        vllm_compat.check_engine(vllm_config)
        config = read_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._errors: set[tuple[str, type[Exception]]] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, config)
            self._stats = self._scheduler.stats
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, config)
            self._stats = self._worker.stats

    def _caught(self, hook: str, error: Exception) -> None:
        self._stats.count("hook_errors")
        if (hook, type(error)) not in self._errors:
            self._errors.add((hook, type(error)))
            logger.error("%s failed; more of its kind are only counted", hook, exc_info=error)

    # --- what kind of connector this is ------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a later miss."""
        return False

    @classmethod
    def supports_sleep_mode(
        cls,
        kv_transfer_config: KVTransferConfig,  # noqa: ARG003 - whatever the settings
    ) -> bool:
        """KV memory is taken back before sleep, and lent again after it (vLLM 0.33 asks)."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        """Return counters around ``data``."""
        return FerryStats(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryPromMetrics:
        """Return the counters of the engine's own /metrics."""
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- worker: life ------------------------------------------------------------------------

    @_guarded(_nothing)
    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Have KV memory allocated where the sidecar can map it."""
        return self._worker.memory_context()

    @_guarded(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the KV memory and start towards the sidecar."""
        self._worker.register(kv_caches)

    @_guarded(_nothing)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return where this rank lives."""
        return self._worker.handshake()

    @_guarded(_nothing)
    def unregister_kv_caches(self) -> None:
        """Take the KV memory back from the sidecar (vLLM 0.33 calls this before sleep)."""
        self._worker.unregister()

    @_guarded(_nothing)
    def restore_kv_caches(self) -> None:
        """Lend it again (vLLM 0.33 calls this after waking up)."""
        self._worker.restore()

    # --- worker: one step; each step calls all of these, so their guards are written out ------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step begins: submit its loads. The base class need not keep the metadata."""
        try:
            self._worker.bind(connector_metadata)
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self._caught("bind_connector_metadata", error)
            self._worker.abandon(is_load=True)

    def wait_for_save(self) -> None:
        """The step's KV is written: submit its saves. Waits for nothing."""
        try:
            self._worker.end_forward()
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self._caught("wait_for_save", error)
            self._worker.abandon(is_load=False)

    def clear_connector_metadata(self) -> None:
        """Do nothing: a step's metadata goes with its end, or the next one's beginning."""

    def has_connector_metadata(self) -> bool:
        """Tell attention layers that there is nothing for their own hooks to do."""
        return False

    def get_transfer_results(
        self,
        finished_req_ids: set[str],  # noqa: ARG002 - only sends are tied to finished requests
    ) -> KVConnectorTransferResults:
        """Return the loads that ended on this rank."""
        try:
            return self._worker.results()
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self._caught("get_transfer_results", error)
            return KVConnectorTransferResults()

    def build_connector_worker_meta(self) -> FerryWorkerMetadata | None:
        """Return this rank's reports for the scheduler half."""
        try:
            return self._worker.worker_metadata()
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self._caught("build_connector_worker_meta", error)
            return None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Do nothing: loads were submitted when the metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no forward waits for a load."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Do nothing: saves are submitted after the forward."""

    # --- scheduler: life ---------------------------------------------------------------------

    @_guarded(_nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take the block pool, and see each attempt to reset the cache."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager, self.reset_cache)

    def attachment(self) -> tuple[str, int]:
        """Return (state, epoch of the sidecar): "ready" when hits are possible, epoch 0 for none.

        Not a hook of vLLM: for who must know whether a miss means "not attached yet".
        """
        return self._scheduler.attachment()

    @_guarded(_nothing)
    def set_xfer_handshake_metadata(self, metadata: dict[int, FerryHandshake]) -> None:
        """Learn where the ranks live."""
        self._scheduler.attach(metadata.values())

    @_guarded(_nothing)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], FerryHandshake]
    ) -> None:
        """Learn where the ranks live, by (pp rank, tp rank)."""
        self._scheduler.attach(metadata.values())

    @_guarded(lambda _self: False)
    def reset_cache(self) -> bool:
        """Leave the namespace: what it holds is never a hit again."""
        self._scheduler.rotate()
        return True

    @_guarded(lambda _self: False)
    def has_pending_push_work(self) -> bool:
        """Keep stepping while reports are due, within its bound."""
        return self._scheduler.pending()

    # --- scheduler: requests -----------------------------------------------------------------

    @_guarded(_nothing)
    def on_new_request(self, request: Request) -> None:
        """Send its hashes."""
        self._scheduler.new_request(request)

    @_guarded(lambda _self, _request, _tokens: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return what can be loaded beyond the local hit; loads are always asynchronous."""
        return self._scheduler.matched(request, num_computed_tokens)

    @_guarded(lambda self, request, _blocks, n: self._scheduler.fail_load(request) if n else None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Start the load, or learn that there is none."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    @_guarded(lambda _self, _request: ())
    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the groups whose every destination block a load of the request writes."""
        return self._scheduler.loaded_groups(request)

    @_guarded(lambda _self, _request, n: {CacheHitSource.HOST: n} if n else {})
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Split the loaded tokens by tier."""
        return self._scheduler.hit_sources(request, num_external_tokens)

    @_guarded(lambda _self, _request, _block_ids: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]  # noqa: ARG002 - pins hold what is read
    ) -> tuple[bool, dict[str, Any] | None]:  # fmt: skip
        """Forget the request; its blocks may be freed at once."""
        self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks may be freed at once."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    @_guarded(lambda _self, _request, _block_ids, _states: False)
    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002 - pins hold what is read
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Save the states that the engine names as the request ends; its blocks may be freed."""
        self._scheduler.finished_tail(request, partial_tail_offloads)
        return False

    # --- scheduler: one step -----------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> FerryMetadata:
        """Return this step's jobs."""
        try:
            return self._scheduler.build(scheduler_output)
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self._caught("build_connector_meta", error)
            return self._scheduler.abandon_step()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the ranks' reports, and which loads have ended on all of them."""
        try:
            meta = connector_output.kv_connector_worker_meta
            if meta is not None:
                self._scheduler.reported(meta, connector_output.invalid_block_ids)
            if connector_output.finished_recving:
                self._scheduler.loaded(connector_output)
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self._caught("update_connector_output", error)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return KV events of the store, for an engine that publishes them."""
        try:
            return self._scheduler.take_events()
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self._caught("take_events", error)
            return ()

    # --- both --------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> FerryStats | None:
        """Return the counts since the last call."""
        return self._stats.take() if self._stats.data else None

    @_guarded(_nothing)
    def shutdown(self) -> None:
        """Leave the sidecar."""
        half = self._scheduler if self.role == KVConnectorRole.SCHEDULER else self._worker
        half.shutdown()

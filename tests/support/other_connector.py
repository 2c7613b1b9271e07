"""A second connector beside FerryConnector under vLLM's MultiConnector, scripted by the test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry_connector.entry import FerryConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)


@dataclass
class OtherHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not followed
    """What is no handshake of kvferry's."""


@dataclass
class OtherMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not followed
    """Loads that begin with this step: request -> (block ids, tokens); ``lost``: blocks."""

    loads: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)


class OtherConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """Offers ``offers[request]`` tokens; ``given``: what each was told.

    Loads are asynchronous, or ``synchronous``; of the latter those of ``lost`` requests bring wrong
    bytes, of which vLLM learns by the output of their step.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.offers: dict[str, int | None] = {}
        self.synchronous = False
        self.lost: set[str] = set()
        self.given: dict[str, list[int]] = {}
        self._loads: dict[str, tuple[list[int], int]] = {}
        self._lost: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **k: Any) -> None:
        return None

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        offer = self.offers.get(request.request_id, 0)
        if offer is None:
            return None, False
        return max(0, offer - local), offer > local and not self.synchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        self.given.setdefault(request.request_id, []).append(tokens)
        if tokens:
            ids, total = blocks.get_block_ids()[0], self.offers[request.request_id] or 0
            self._loads[request.request_id] = (ids, total)
            if request.request_id in self.lost:
                size = self._vllm_config.cache_config.block_size
                self._lost.update(ids[(total - tokens) // size : total // size])

    def build_connector_meta(self, scheduler_output: Any) -> OtherMetadata:
        loads, lost, self._loads, self._lost = self._loads, self._lost, {}, set()
        return OtherMetadata(loads, lost)

    def request_finished_all_groups(self, request: Any, ids: Any) -> tuple[bool, None]:
        return False, None


def children(connector: Any) -> tuple[FerryConnector, OtherConnector | None]:
    """Return ours, and the other one where there is one."""
    if not isinstance(connector, MultiConnector):
        return connector, None
    found = connector._connectors
    (ours,) = (child for child in found if isinstance(child, FerryConnector))
    (other,) = (child for child in found if isinstance(child, OtherConnector))
    return ours, other


def split(metadata: Any) -> tuple[Any, OtherMetadata]:
    """Return ours and the other's of a step's metadata."""
    if not isinstance(metadata, MultiKVConnectorMetadata):
        return metadata, OtherMetadata()
    one, two = metadata.metadata
    return (two, one) if isinstance(one, OtherMetadata) else (one, two)


def joined(connector: Any, worker_metadata: Any) -> Any:
    """Return our ranks' reports as they travel under ``connector``."""
    if worker_metadata is None or not isinstance(connector, MultiConnector):
        return worker_metadata
    ours = isinstance(connector._connectors[0], FerryConnector)
    return MultiKVConnectorWorkerMetadata(
        (worker_metadata, None) if ours else (None, worker_metadata)
    )


def transfer_config(ours: dict[str, Any], beside: str) -> dict[str, Any]:
    """Return ours alone, or with the other one ``beside`` it: "before" or "after"."""
    if not beside:
        return ours
    other = {
        "kv_connector": "OtherConnector",
        "kv_connector_module_path": "support.other_connector",
        "kv_role": "kv_both",
    }
    order = [other, ours] if beside == "before" else [ours, other]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": ours["kv_load_failure_policy"],
        "kv_connector_extra_config": {"connectors": order},
    }

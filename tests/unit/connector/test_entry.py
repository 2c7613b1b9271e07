"""The package's face to vLLM: found by module path, imported late, shaped like the base class."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry_connector
import pytest
from kvferry_connector.config import ConfigError
from kvferry_connector.entry import FerryConnector
from kvferry_connector.stats import FerryStats
from kvferry_connector.vllm_compat import UnsupportedEngineError
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from support.vllm_configs import make_config, write_model
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

ONLY_0_33 = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}


def transfer(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="FerryConnector",
        kv_connector_module_path="kvferry_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
    )


def test_importing_the_package_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, kvferry_connector, kvferry_connector.wire.hot\n"
        "import kvferry_connector.client\n"
        "heavy = {'vllm', 'torch', 'cupy', 'kvferry_sidecar'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_factory_finds_the_connector_by_module_path() -> None:
    assert KVConnectorFactory.get_connector_class(transfer()) is FerryConnector
    assert KVConnectorFactory.supports_hma_config(transfer())
    with pytest.raises(AttributeError, match="no attribute"):
        kvferry_connector.Nothing  # noqa: B018 - the access is the test


def test_a_deferred_load_hook_finds_nothing_to_do() -> None:
    """vLLM calls it before or after the forward: loads went out when the metadata was bound."""
    bare: Any = FerryConnector.__new__(FerryConnector)  # without a half: touching one would raise
    assert bare.start_load_kv(None) is None
    assert bare.wait_for_layer_load("layer") is None


def test_every_hook_has_the_signature_of_the_base_class() -> None:
    """A hook that vLLM renames or extends shows here, not in a running engine."""
    for name, ours in vars(FerryConnector).items():
        if name.startswith("_") or name in ONLY_0_33 or name == "attachment":
            continue
        base = getattr(KVConnectorBase_V1, name, None)
        if name == "request_finished_all_groups":
            from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

            base = SupportsHMA.request_finished_all_groups
        assert base is not None, f"vLLM has no hook {name}"
        if isinstance(ours, property):
            assert isinstance(base, property)
            continue
        function = getattr(ours, "__func__", ours)
        expected = list(inspect.signature(getattr(base, "__func__", base)).parameters)
        assert list(inspect.signature(function).parameters) == expected, name


def test_every_setting_is_checked_at_construction(tmp_path: Path) -> None:
    config = engine_config(tmp_path, transfer(lookup_wait_us=5))
    with pytest.raises(ConfigError, match="lookup_wait_us_max"):
        FerryConnector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(1, [], []))


def test_role_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    producer = transfer()
    producer.kv_role = "kv_producer"
    with pytest.raises(UnsupportedEngineError, match="kv_both"):
        FerryConnector(
            engine_config(tmp_path, producer), KVConnectorRole.SCHEDULER, KVCacheConfig(1, [], [])
        )


def engine_config(folder: Path, kv_transfer: KVTransferConfig) -> VllmConfig:
    config = make_config(write_model(folder / "model"), "LBNHC")
    config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    config.kv_transfer_config = kv_transfer
    return config


def broken(role: KVConnectorRole) -> FerryConnector:
    """A connector whose halves raise from every method."""

    class Raises:
        stats = FerryStats()

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"{name} is broken")

    connector = FerryConnector.__new__(FerryConnector)
    connector._role = role
    connector._errors = set()
    connector._stats = FerryStats()
    half = Raises()
    connector._scheduler = half
    connector._worker = half
    return connector


REQUEST = SimpleNamespace(request_id="r")


@pytest.mark.parametrize(
    ("hook", "arguments", "safe"),
    [
        ("get_mem_pool_context", (), None),
        ("register_kv_caches", ({},), None),
        ("get_handshake_metadata", (), None),
        ("unregister_kv_caches", (), None),
        ("restore_kv_caches", (), None),
        ("set_xfer_handshake_metadata", ({},), None),
        ("set_xfer_handshake_metadata_pp_aware", ({},), None),
        ("reset_cache", (), False),
        ("has_pending_push_work", (), False),
        ("on_new_request", (REQUEST,), None),
        ("get_num_new_matched_tokens", (REQUEST, 0), (0, False)),
        ("update_state_after_alloc", (REQUEST, None, 0), None),
        ("get_loaded_kv_cache_group_ids", (REQUEST,), ()),
        ("get_external_cache_hit_sources", (REQUEST, 5), {CacheHitSource.HOST: 5}),
        ("request_finished", (REQUEST, []), (False, None)),
        ("request_finished_all_groups", (REQUEST, ([],)), (False, None)),
        ("build_connector_worker_meta", (), None),
        ("update_connector_output", (None,), None),
        ("shutdown", (), None),
    ],
)
def test_exception_becomes_the_safe_answer_and_is_logged_once(
    hook: str, arguments: tuple[Any, ...], safe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connector = broken(KVConnectorRole.SCHEDULER)
    for _ in range(3):
        assert getattr(connector, hook)(*arguments) == safe
    names = inspect.signature(getattr(connector, hook)).parameters
    assert getattr(connector, hook)(**dict(zip(names, arguments, strict=True))) == safe
    assert connector._stats.data == {"hook_errors": 4}
    assert len([record for record in caplog.records if "failed" in record.message]) == 1


def test_transfer_results_are_empty_when_they_cannot_be_had() -> None:
    results = broken(KVConnectorRole.WORKER).get_transfer_results(set())
    assert (results.finished_sending, results.finished_recving) == (set(), set())


def test_what_kind_of_connector_it_is() -> None:
    connector = broken(KVConnectorRole.SCHEDULER)
    assert connector.requires_kv_delivery is False
    assert connector.supports_divergent_local_hybrid_hits is False
    assert connector.has_pending_block_frees() is False
    assert connector.has_connector_metadata() is False
    assert connector.get_finished_count() is None
    assert connector.register_finished_partial_tail(REQUEST, ([],), []) is False
    assert list(connector.take_events()) == []
    assert FerryConnector.supports_sleep_mode(transfer()) is True
    stats = FerryConnector.build_kv_connector_stats({"saves": 1})
    assert stats.reduce() == {"saves": 1}


def test_counts_are_metrics_of_the_engine() -> None:
    """As vLLM calls it: the class builds them once, every report is added."""
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    values = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    config = SimpleNamespace(kv_transfer_config=transfer())
    found = FerryConnector.build_prom_metrics(config, types, ["model_name", "engine"], values)
    found.observe({"loaded_tokens": 64, "loads": 1, "pinned_blocks_max": 2}, 0)
    found.observe({"loaded_tokens": 16}, 0)
    found.observe({"loads": 1}, 1)

    def sample(name: str, engine: str, **labels: str) -> float | None:
        labels |= {"model_name": "tiny", "engine": engine}
        return REGISTRY.get_sample_value(f"vllm:kvferry_{name}_total", labels)

    assert sample("loaded_tokens", "0") == 80
    assert sample("events", "0", event="pinned_blocks_max") == 2
    assert sample("events", "1", event="loads") == 1
    assert sample("events", "1", event="pinned_blocks_max") is None

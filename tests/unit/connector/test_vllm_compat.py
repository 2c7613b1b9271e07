"""What is refused or warned of at construction, and the bound manager's helpers."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvferry_connector import vllm_compat
from kvferry_connector.log import LOGGER
from kvferry_connector.vllm_compat import UnsupportedEngineError, check_engine
from support.vllm_configs import make_config, write_model
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def manager() -> KVCacheManager:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
    )
    return KVCacheManager(config, max_model_len=64, scheduler_block_size=16, hash_block_size=16)


@pytest.mark.parametrize("text", ["0.32.0", "0.32.1.post2", "0.33.0", "0.33.0rc1+cpu"])
def test_supported_versions(text: str) -> None:
    assert vllm_compat.minor_version(text) in vllm_compat.SUPPORTED


@pytest.mark.parametrize("text", ["0.31.9", "0.34.0", "1.32.0", "dev", "0.x.0", ""])
def test_other_versions_are_refused_by_name(text: str, folder: Path) -> None:
    with pytest.raises(UnsupportedEngineError, match=r"0\.32\.x, 0\.33\.x") as caught:
        check_engine(make_config(folder), version=text)
    assert f"vLLM {text} is not supported" in str(caught.value)


def test_the_installed_engine_is_served(folder: Path, ferry_log: pytest.LogCaptureFixture) -> None:
    ferry_log.set_level(logging.WARNING, LOGGER)
    check_engine(make_config(folder))
    assert not [r for r in ferry_log.records if r.name == LOGGER]
    check_engine(make_config(folder, transfer_kv_load_failure_policy="fail"))
    (record,) = [r for r in ferry_log.records if r.name == LOGGER]
    assert "Set kv_load_failure_policy to 'recompute'" in record.getMessage()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_only_both_roles_together(folder: Path, role: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=f"kv_role is '{role}'.*'kv_both'"):
        check_engine(make_config(folder, transfer_kv_role=role))


@pytest.mark.parametrize("name", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_sleep_mode_needs_033(folder: Path, name: str) -> None:
    config = make_config(folder)
    setattr(config.model_config, name, True)
    with pytest.raises(UnsupportedEngineError, match="sleep mode"):
        check_engine(config, version="0.32.0")
    check_engine(config, version="0.33.0")


def test_prefill_context_parallel_is_refused(folder: Path) -> None:
    config = make_config(folder)
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(UnsupportedEngineError, match="prefill_context_parallel_size"):
        check_engine(config)


def test_an_engine_without_the_request_protocol_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(KVConnectorOutput.__dataclass_fields__, "failed_recving")
    with pytest.raises(UnsupportedEngineError, match=r"lacks KVConnectorOutput\.failed_recving"):
        check_engine(make_config(folder))


def test_probes_tell_algorithms_and_seeds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    probe = vllm_compat.hash_probe("sha256")
    assert probe == vllm_compat.hash_probe("sha256")
    assert len(bytes.fromhex(probe)) == 32
    assert probe != vllm_compat.hash_probe("sha256_cbor")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert probe != vllm_compat.hash_probe("sha256")


def test_a_seed_of_one_process_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    seeds = iter(("a", "b"))
    monkeypatch.setattr(vllm_compat, "resolve_none_hash_seed", lambda _: next(seeds))
    with pytest.raises(UnsupportedEngineError, match="set PYTHONHASHSEED"):
        vllm_compat.hash_probe("sha256")


def test_the_probe_is_what_the_engine_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(sha256)
    tokens = list(vllm_compat._PROBE_TOKENS)
    engines = kv_cache_utils.hash_block_tokens(sha256, None, tokens, None)
    assert engines.hex() == vllm_compat.hash_probe("sha256")


def test_the_callback_runs_before_every_reset_also_a_failing_one(manager: KVCacheManager) -> None:
    calls: list[bool] = []
    done: list[int] = []
    original = manager.reset_prefix_cache
    pool = vllm_compat.block_pool(manager)

    def callback() -> None:
        calls.append(pool.get_num_free_blocks() == 7)

    vllm_compat.around_reset(manager, callback, nullcontext, lambda: done.append(len(calls)))
    assert manager.reset_prefix_cache() is True
    vllm_compat.touch(pool, [3])
    assert manager.reset_prefix_cache() is False, "a pinned block: vLLM cannot reset"
    assert calls == [True, False]
    assert done == [1], "after the one that succeeded"
    assert original() is False, "only this manager's attribute was replaced"


def test_touched_blocks_are_not_handed_out(manager: KVCacheManager) -> None:
    pool = vllm_compat.block_pool(manager)
    vllm_compat.touch(pool, [2, 3])
    assert {block.block_id for block in pool.get_new_blocks(5)} == {1, 4, 5, 6, 7}
    vllm_compat.free(pool, [2, 3])
    assert {block.block_id for block in pool.get_new_blocks(2)} == {2, 3}
    with pytest.raises(ValueError, match="null block"):
        vllm_compat.touch(pool, [0])


def test_hashes_that_look_ahead_are_refused(manager: KVCacheManager) -> None:
    vllm_compat.check_manager(manager)
    ahead: Any = SimpleNamespace(num_hash_lookahead_tokens=1)
    with pytest.raises(UnsupportedEngineError, match="num_hash_lookahead_tokens"):
        vllm_compat.check_manager(ahead)

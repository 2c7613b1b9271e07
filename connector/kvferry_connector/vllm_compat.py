"""What depends on the vLLM version: the only file that branches on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvferry_connector.log import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager


SUPPORTED: tuple[tuple[int, int], ...] = ((0, 32), (0, 33))
_SLEEP_SINCE = (0, 33)  # un- and re-registration of KV memory around sleep
_PROBE_TOKENS = (1, 2, 3, 5, 8, 13)
ENGINE_VERSION = str(vllm.__version__)


class UnsupportedEngineError(Exception):
    """This engine, or a setting of it, cannot be served; the text says why and what to change."""


def window_extra(spec: Any) -> int:
    """Return how far below its window a hit must find a sliding window's blocks.

    0.32 allocates blocks for the re-prefill of several MTP modules there and leaves them
    unwritten; since 0.33 they belong to the window.
    """
    return int(spec.extra_retained_tokens) if minor_version(ENGINE_VERSION) >= (0, 33) else 0


def minor_version(text: str) -> tuple[int, int]:
    """Return (major, minor). Raises UnsupportedEngineError outside the supported range."""
    parts = text.split(".")
    known = len(parts) >= 2 and parts[0].isdecimal() and parts[1].isdecimal()
    version = (int(parts[0]), int(parts[1])) if known else None
    if version not in SUPPORTED:
        names = ", ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)
        raise UnsupportedEngineError(
            f"vLLM {text} is not supported: this kvferry was written for {names}. Install one of "
            "these, or a kvferry that names this version"
        )
    return version


def check_engine(config: VllmConfig, version: str = ENGINE_VERSION) -> None:
    """Refuse at construction what cannot be served, and warn of settings that will hurt.

    Raises UnsupportedEngineError with the reason and the remedy.
    """
    minor = minor_version(version)
    _check_protocol()
    _check_role(config)
    _check_sleep(config, minor)
    if config.parallel_config.prefill_context_parallel_size > 1:
        raise UnsupportedEngineError(
            "prefill_context_parallel_size > 1 is not supported: blocks would hold tokens in an "
            "order no other engine has; set it to 1"
        )
    hash_probe(config.cache_config.prefix_caching_hash_algo)
    if config.kv_transfer_config.kv_load_failure_policy == "fail":
        logger.warning(
            "kv_load_failure_policy is 'fail' (vLLM's default): a failed load ends the request "
            "with an error. Set kv_load_failure_policy to 'recompute' in --kv-transfer-config"
        )


def _check_protocol() -> None:
    """Check for the request-level protocol: failures by request, block state, bound manager."""
    missing = [
        name
        for name in ("get_transfer_results", "bind_kv_cache_manager", "build_connector_worker_meta")
        if not hasattr(KVConnectorBase_V1, name)
    ]
    wanted = (
        (KVConnectorOutput, "failed_recving"), (KVConnectorOutput, "invalid_block_ids"),
        (SchedulerOutput, "kv_connector_block_state"), (SchedulerOutput, "has_sync_kv_loads"),
    )  # fmt: skip
    for owner, name in wanted:
        if not is_dataclass(owner) or name not in {field.name for field in fields(owner)}:
            missing.append(f"{owner.__name__}.{name}")
    if missing:
        raise UnsupportedEngineError(
            f"this vLLM lacks {', '.join(missing)}, so failed loads could not be reported by "
            "request; install an unmodified vLLM of a supported version"
        )


def _check_role(config: VllmConfig) -> None:
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_role != "kv_both":
        role = None if transfer is None else transfer.kv_role
        raise UnsupportedEngineError(
            f"kv_role is {role!r}, but a cache both saves and loads; set kv_role to 'kv_both' in "
            "--kv-transfer-config"
        )


def _check_sleep(config: VllmConfig, minor: tuple[int, int]) -> None:
    model = config.model_config
    if minor >= _SLEEP_SINCE or not (model.enable_sleep_mode or model.enable_cumem_allocator):
        return
    raise UnsupportedEngineError(
        "sleep mode (enable_sleep_mode, enable_cumem_allocator) re-maps KV memory behind the "
        "sidecar, and vLLM 0.32 does not tell connectors; start without it, or use vLLM 0.33"
    )


def hash_probe(algorithm: str) -> str:
    """Return the hex hash of a fixed token list, by the engine's own algorithm and seed.

    Two engines with equal probes hash equal prompts equally. Raises UnsupportedEngineError when
    the seed is drawn per process: nothing such an engine saves could ever be found again.
    """
    hash_fn = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(hash_fn)
    if seed != resolve_none_hash_seed(hash_fn):
        raise UnsupportedEngineError(
            f"prefix_caching_hash_algo {algorithm!r} draws a random seed in each process, so no "
            "other engine could hit what this one saves; set PYTHONHASHSEED to one value "
            "everywhere, or use sha256_cbor"
        )
    digest = hash_fn((hash_fn(seed), _PROBE_TOKENS, None))
    return bytes(digest).hex()


# --- the bound KVCacheManager ----------------------------------------------------------------


def check_manager(manager: KVCacheManager) -> None:
    """Refuse a manager whose block hashes cover more than the block's own prefix (0.33).

    Raises UnsupportedEngineError.
    """
    lookahead = int(getattr(manager, "num_hash_lookahead_tokens", 0) or 0)
    if lookahead:
        raise UnsupportedEngineError(
            f"block hashes cover {lookahead} tokens past their block (num_hash_lookahead_tokens); "
            "vLLM sets it to 0 with a KV connector, so this engine is modified"
        )


def around_reset(
    manager: KVCacheManager,
    callback: Callable[[], object],
    lifted: Callable[[], AbstractContextManager[None]],
    after: Callable[[], object],
) -> None:
    """Have ``callback`` run before each ``manager.reset_prefix_cache()``, itself run in ``lifted``.

    ``after`` runs when the cache was reset. A local reset that fails never reaches the connector's
    ``reset_cache``, although the weights may have changed; this is the only place that sees every
    attempt. Neither callback may raise.
    """
    original: Callable[..., bool] = manager.reset_prefix_cache

    def reset_prefix_cache(*args: Any, **kwargs: Any) -> bool:
        callback()
        with lifted():
            done = original(*args, **kwargs)
        if done:
            after()
        return done

    manager.reset_prefix_cache = reset_prefix_cache


def block_pool(manager: KVCacheManager) -> BlockPool:
    """Return the pool that owns all device blocks."""
    return manager.block_pool


def touch(pool: BlockPool, block_ids: Iterable[int]) -> None:
    """Take one more reference on each block, so that nothing reuses it. Never the null block."""
    blocks = [pool.blocks[block_id] for block_id in block_ids]
    if any(block.is_null for block in blocks):
        raise ValueError("the null block (id 0) has no owner and cannot be pinned")
    pool.touch(blocks)


def free(pool: BlockPool, block_ids: Iterable[int]) -> None:
    """Give back one reference on each block, in this order of eviction (first goes first)."""
    pool.free_blocks([pool.blocks[block_id] for block_id in block_ids])

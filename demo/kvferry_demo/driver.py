"""Drives one real vLLM engine in this process, step by step.

vLLM's own front end steps on a thread of its own; here every step is taken by the caller, so
that a test can abort a request exactly between two steps, and a request id is used as given.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from kvferry_connector.entry import FerryConnector
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from kvferry_demo import spread
from kvferry_demo.protocol import Admission, Ask, EngineSetup, Ready, Result, Running, State

EMPTY_STEP_PAUSE_S = 0.001  # what vLLM's own loop sleeps when a step had nothing to execute
REQUEST_DEADLINE_S = 300.0


class EngineStuckError(Exception):
    """Requests did not finish within the deadline."""


@dataclass(slots=True)
class _Live:
    """One request from its arrival to its report; ``request`` is vLLM's own object."""

    request: Any
    arrived_s: float
    output: list[int] = field(default_factory=list)
    ttft_ms: float = 0.0
    local_tokens: int = 0
    hit_tokens: int = 0
    finish: str = ""
    kv_digest: str = ""
    drafts: list[int] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)


def engine_args_of(setup: EngineSetup) -> EngineArgs:
    """Return what vLLM is started with."""
    arguments: dict[str, Any] = {
        "model": setup.model_dir,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "seed": 0,
        "max_model_len": setup.max_model_len,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": setup.kv_cache_bytes,
        "disable_hybrid_kv_cache_manager": False,
        "disable_log_stats": True,
    }
    if setup.run_dir:
        arguments["kv_transfer_config"] = {
            "kv_connector": "FerryConnector",
            "kv_connector_module_path": setup.module_path,
            "kv_role": "kv_both",
            "kv_load_failure_policy": setup.load_failure_policy,
            "kv_connector_extra_config": {"run_dir": setup.run_dir, **setup.connector_extra},
        }
    return EngineArgs(**(arguments | setup.engine_args))


class Driver:
    """A running engine and the requests given to it."""

    def __init__(self, setup: EngineSetup) -> None:
        spread.install()
        config = engine_args_of(setup).create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._scheduler = self._core.scheduler
        self._kv_digests = setup.kv_digests
        self._live: dict[str, _Live] = {}
        self._ended: list[_Live] = []
        self._local_tokens: dict[str, int] = {}
        if self._scheduler.connector is not None:
            self._watch_admissions(self._scheduler.connector)

    def describe(self, pid: int) -> Ready:
        """Return the engine's block size, its KV blocks, and the KV bytes of one token."""
        config = self._scheduler.kv_cache_config
        block_tokens = config.kv_cache_groups[0].kv_cache_spec.block_size
        page_bytes = sum(
            len(group.layer_names) * group.kv_cache_spec.page_size_bytes
            for group in config.kv_cache_groups
        )
        return Ready(pid, block_tokens, config.num_blocks, page_bytes // block_tokens)

    def add(self, asks: list[Ask]) -> None:
        """Give requests to the engine; nothing runs before the next step."""
        for ask in asks:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True, detokenize=False
            )
            arrival = EngineCoreRequest(
                request_id=ask.request,
                prompt_token_ids=ask.tokens,
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=ask.cache_salt,
                data_parallel_rank=None,
            )
            started_s = time.monotonic()
            request, wave = self._core.preprocess_add_request(arrival)
            self._live[ask.request] = _Live(request, started_s)
            self._core.add_request(request, wave)

    def step(self) -> None:
        """Take one engine step and note what came out of it."""
        outputs, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        now_s = time.monotonic()
        for one in self._live.values():
            one.drafts.extend(one.request.spec_token_ids)
        for output in outputs[0].outputs if outputs and 0 in outputs else ():
            live = self._live.get(output.request_id)
            if live is not None:
                self._note(live, output, now_s)
        if not executed:
            time.sleep(EMPTY_STEP_PAUSE_S)

    def abort(self, requests: list[str]) -> None:
        """Abort requests; each still gets its result, with what it had generated."""
        self._core.abort_requests(requests)
        for name in requests:
            live = self._live.pop(name, None)
            if live is not None:
                live.finish = "abort"
                self._ended.append(live)

    def finish(self) -> list[Result]:
        """Step until every request has ended. Raises EngineStuckError at the deadline."""
        end_s = time.monotonic() + REQUEST_DEADLINE_S
        while self._live:
            if time.monotonic() > end_s:
                stuck = {name: live.request.status.name for name, live in self._live.items()}
                raise EngineStuckError(f"unfinished after {REQUEST_DEADLINE_S} s: {stuck}")
            self.step()
        results = [_result(live) for live in sorted(self._ended, key=lambda one: one.arrived_s)]
        self._ended.clear()
        return results

    def settle(self, deadline_s: float) -> tuple[bool, int]:
        """Step until the engine would sleep; return whether it did, and the steps taken."""
        end_s = time.monotonic() + deadline_s
        steps = 0
        while self._scheduler.has_requests():
            if time.monotonic() > end_s:
                return False, steps
            self.step()
            steps += 1
        return True, steps

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        """Return what vLLM's own reset says."""
        return bool(self._core.reset_prefix_cache(running, connector))

    def zero_blocks(self, blocks: list[int]) -> None:
        """Damage blocks of the KV memory in all layers."""
        for layer in self._layers():
            for block in blocks:
                layer[block].zero_()

    def _layers(self) -> list[Any]:
        """Return the KV tensors, block first; of an engine whose worker is in this process."""
        layers: list[Any] = self._core.model_executor.driver_worker.worker.model_runner.kv_caches
        return layers

    def _digest(self, request: Any) -> str:
        """Return a digest of what the engine holds of a prompt (group 0), in chunk order."""
        size = self._scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        state = hashlib.sha256()
        for block in blocks[: (request.num_prompt_tokens - 1) // size]:
            for layer in self._layers():
                state.update(layer[block].contiguous().view(torch.uint8).numpy().tobytes())
        return state.hexdigest()

    def running(self) -> list[Running]:
        """Return where each unfinished request stands."""
        manager = self._scheduler.kv_cache_manager
        return [
            Running(
                name,
                live.request.status.name,
                live.request.num_computed_tokens,
                len(live.output),
                list(manager.get_block_ids(name)[0]),
            )
            for name, live in self._live.items()
        ]

    def ended(self) -> list[str]:
        """Return the requests that ended and were not reported yet."""
        return [live.request.request_id for live in self._ended]

    def state(self, modules: dict[str, str]) -> State:
        """Return blocks in use, whether the engine is awake, and how the connector stands."""
        pool = self._scheduler.kv_cache_manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is the null block
        connector = self._scheduler.connector
        state, epoch = ("", 0) if connector is None else _attachment(connector)
        return State(modules, used, bool(self._scheduler.has_requests()), state, epoch)

    def close(self) -> None:
        """Shut the engine down as vLLM does."""
        self._core.shutdown()

    def _note(self, live: _Live, output: Any, now_s: float) -> None:
        if output.new_token_ids and not live.output:
            live.ttft_ms = (now_s - live.arrived_s) * 1e3
            if self._kv_digests:
                live.kv_digest = self._digest(live.request)
        live.output.extend(output.new_token_ids)
        if output.prefill_stats is not None:
            live.local_tokens = output.prefill_stats.num_local_cached_tokens
            live.hit_tokens = output.prefill_stats.num_external_cached_tokens
        if output.finish_reason is not None:
            live.finish = str(output.finish_reason)
            self._ended.append(self._live.pop(output.request_id))

    def _watch_admissions(self, connector: Any) -> None:
        """Note what each allocation took from vLLM's cache and what from the connector.

        vLLM reports this itself, but only for the first admission: resumed requests are silent.
        """
        match, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
            self._local_tokens[request.request_id] = num_computed_tokens
            return match(request, num_computed_tokens)

        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            live = self._live.get(request.request_id)
            # A finished load is announced a second time, with its tokens already counted.
            if live is not None and request.num_computed_tokens == 0:
                live.admissions.append(
                    Admission(
                        self._local_tokens.get(request.request_id, 0),
                        num_external_tokens,
                        request.num_tokens,
                        request.num_prompt_tokens,
                    )
                )
            return allocated(request, blocks, num_external_tokens)

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        connector.update_state_after_alloc = update_state_after_alloc


def _attachment(connector: Any) -> tuple[str, int]:
    """Return the state of FerryConnector's scheduler half, and the sidecar's epoch (0: none).

    vLLM has no question of that kind, and a test has to know whether a miss means "not attached
    yet".
    """
    if isinstance(connector, MultiConnector):
        (connector,) = (c for c in connector.sub_connectors if isinstance(c, FerryConnector))
    state, epoch = connector.attachment()
    return str(state), int(epoch)


def _result(live: _Live) -> Result:
    return Result(
        request=live.request.request_id,
        prompt_tokens=live.request.num_prompt_tokens,
        output=live.output,
        finish=live.finish,
        ttft_ms=live.ttft_ms,
        local_tokens=live.local_tokens,
        hit_tokens=live.hit_tokens,
        preemptions=live.request.num_preemptions,
        admissions=live.admissions,
        kv_digest=live.kv_digest,
        drafts=live.drafts,
    )

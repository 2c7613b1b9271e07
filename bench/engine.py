"""A real vLLM engine for benches, in this process, with its attention removed.

Scheduler, runner, connector and KV memory stay real; the forward neither reads nor writes KV, so
prefill is cheap and the KV bytes are whatever the bench wrote: loads can be checked byte by byte.
Only for child processes (bench/child.py): importing vLLM takes seconds and sets things up.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry_demo.driver import Driver
from kvferry_demo.protocol import Ask, EngineSetup
from vllm.distributed.kv_transfer import (
    get_kv_transfer_group,
    has_kv_transfer_group,
    kv_transfer_state,
)
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

DEADLINE_S = 120.0


def remove_attention() -> None:
    """Make attention of this process cost nothing and leave KV memory alone.

    Blocks of 16 tokens, the default on GPUs, are then possible: only the CPU kernel wants 32.
    """

    def forward(*tensors: Any, output: Any, **_: Any) -> Any:  # noqa: ARG001 - reads none of them
        return output.zero_()

    CPUAttentionBackendImpl.forward = forward
    CPUAttentionBackendImpl.do_kv_cache_update = lambda *_args, **_kwargs: None
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
        lambda *_, **__: [MultipleOf(16)]
    )


@dataclass(frozen=True, slots=True)
class Spent:
    """What went into the hooks of one step: wall and CPU time of this thread, in us."""

    wall_us: float
    cpu_us: float
    calls: int
    by_method_us: dict[str, float]


class Clock:
    """Time inside the public methods of objects: outermost calls only, per method and in all.

    CPU time costs a system call per reading, so it is only taken when asked for.
    """

    def __init__(self, cpu: bool = False) -> None:
        self._by_name: dict[str, int] = defaultdict(int)
        self._wall_ns = self._cpu_ns = self._calls = 0
        self.cpu = cpu
        self._inside = False

    def wrap(self, target: object) -> None:
        """Replace every public method of ``target`` by one that is timed."""
        for name in dir(type(target)):
            if name.startswith("_") or isinstance(getattr(type(target), name), property):
                continue
            method = getattr(target, name)
            if callable(method):
                setattr(target, name, self._timed(name, method))

    def _timed(self, name: str, method: Any) -> Any:
        now, cpu, by_name = time.perf_counter_ns, time.thread_time_ns, self._by_name

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            cpu_start = cpu() if self.cpu else 0
            start = now()
            try:
                return method(*args, **kwargs)
            finally:
                spent = now() - start
                if self.cpu:
                    self._cpu_ns += cpu() - cpu_start
                self._inside = False
                self._wall_ns += spent
                self._calls += 1
                by_name[name] += spent

        return timed

    def take(self) -> Spent:
        """Return what was spent since the last take."""
        names = {name: spent / 1e3 for name, spent in self._by_name.items()}
        spent = Spent(self._wall_ns / 1e3, self._cpu_ns / 1e3, self._calls, names)
        self._wall_ns = self._cpu_ns = self._calls = 0
        self._by_name.clear()
        return spent


class BenchEngine(Driver):
    """A driven engine whose two connector objects are at hand (None: it has no connector)."""

    def __init__(self, setup: EngineSetup) -> None:
        remove_attention()
        super().__init__(setup)
        self.scheduler_connector: Any = self._scheduler.connector
        self.worker_connector: Any = get_kv_transfer_group() if has_kv_transfer_group() else None

    def _watch_admissions(self, connector: Any) -> None:
        """Leave the hooks as they are: they are what is timed."""

    def wait_ready(self) -> None:
        """Wait until the connector is attached and all ranks are registered."""
        client = self.scheduler_connector._scheduler._lookup.client
        worker = self.worker_connector._worker._client
        end = time.monotonic() + DEADLINE_S
        while not (_ready(client) and _ready(worker)):
            if time.monotonic() > end:
                raise TimeoutError(f"the connector is {client.state!r}: {client.refusal}")
            time.sleep(0.01)

    def start(self, name: str, tokens: list[int], max_tokens: int) -> None:
        """Add one request."""
        self.add([Ask(name, tokens, max_tokens)])

    def end_all(self) -> None:
        """Abort what runs and step until the engine sleeps."""
        self.abort(list(self._live))
        asleep, _ = self.settle(DEADLINE_S)
        if not asleep:
            raise TimeoutError("the engine does not fall asleep")
        self._ended.clear()

    @contextmanager
    def using(self, scheduler: Any, worker: Any) -> Iterator[None]:
        """Have vLLM call these connector objects; nothing may run or be open at either end."""
        before = self._scheduler.connector, get_kv_transfer_group()
        self._scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = scheduler, worker
        try:
            yield
        finally:
            self._scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = before

    def new_connector(self, kind: Any, role: Any) -> Any:
        """Return a connector of class ``kind`` for this engine; vLLM does not call it yet."""
        return kind(self._scheduler.vllm_config, role, self._scheduler.kv_cache_config)

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache without leaving the namespace."""
        if not self._scheduler.kv_cache_manager.block_pool.reset_prefix_cache():
            raise RuntimeError("blocks are still in use")

    @property
    def kv_caches(self) -> list[Any]:
        """KV tensors, one per layer."""
        return list(self._core.model_executor.driver_worker.worker.model_runner.kv_caches)

    @property
    def request_block_hasher(self) -> Any:
        """What turns a request's tokens into block hashes."""
        return self._core.request_block_hasher


def _ready(client: Any) -> bool:
    link = None if client is None else client.link()
    return link is not None and link.ready


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the config.json of a small llama and return its folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1024,
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 262144,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder

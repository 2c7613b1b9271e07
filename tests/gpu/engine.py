"""An engine without a model: `python -m gpu.engine RUN_DIR KIND [SCALE]`, driven by lines on stdin.

The real worker half over KV memory of KIND ("cpu": torch on host memory, "cuda": torch on a GPU,
"fake": a GPU made of host memory) plays the recording. ``first`` saves, ``second`` loads, after
``again`` it is attached to the sidecar that came after the one before; each is answered by a line
of JSON. The process ends with its stdin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu import shim

shim.install()

import torch  # noqa: E402 - after the names of vLLM
from gpu.replay import Player, read_recording  # noqa: E402 - after the names of vLLM
from kvferry_connector import worker_half  # noqa: E402 - after the names of vLLM
from kvferry_connector.config import read_config  # noqa: E402 - after the names of vLLM
from kvferry_connector.wire.attach import Ready  # noqa: E402 - after the names of vLLM
from support.parallel import parallel_config  # noqa: E402 - after the names of vLLM
from support.raw_half import RawHalf  # noqa: E402 - after the names of vLLM
from support.waiting import wait_until  # noqa: E402 - after the names of vLLM


class TorchMemory:
    """KV memory that torch allocated, on the host or on a GPU."""

    def __init__(self, half: Any, total_bytes: int, device: str) -> None:
        with half.memory_context() or nullcontext():
            self.tensor = torch.zeros(total_bytes, dtype=torch.int8, device=device)

    def read(self, at: int, count: int) -> bytes:
        return self.tensor[at : at + count].cpu().numpy().tobytes()

    def write(self, at: int, data: bytes) -> None:
        part = torch.frombuffer(bytearray(data), dtype=torch.int8)
        self.tensor[at : at + len(data)].copy_(part)


class FakeMemory:
    """KV memory of the fake GPU, as a tensor of which only the address is asked."""

    def __init__(self, total_bytes: int) -> None:
        from support.fake_cuda import FakeGpu, bytes_at

        address = FakeGpu().alloc(total_bytes + 4096) + 4096
        self._bytes = bytes_at(address, total_bytes)
        storage = SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: total_bytes)
        device = SimpleNamespace(type="cuda", index=0)
        self.tensor = SimpleNamespace(untyped_storage=lambda: storage, device=device)
        worker_half._current_stream = lambda _device: 0

    def read(self, at: int, count: int) -> bytes:
        return self._bytes[at : at + count].tobytes()

    def write(self, at: int, data: bytes) -> None:
        self._bytes[at : at + len(data)] = memoryview(data)


def main(run_dir: str, kind: str) -> None:
    recording = read_recording()
    config = SimpleNamespace(
        parallel_config=parallel_config(),
        kv_transfer_config=SimpleNamespace(engine_id=f"stand-in-{os.getpid()}"),
        device_config=SimpleNamespace(device_type="cpu" if kind == "cpu" else "cuda"),
        instance_id="one",
    )
    half = worker_half.WorkerHalf(config, None, read_config({"run_dir": run_dir}))
    memory: Any = (
        FakeMemory(recording.total_bytes)
        if kind == "fake"
        else TorchMemory(half, recording.total_bytes, kind)
    )

    def described(
        _config: Any, _kv: Any, caches: Any, kv_memory: Any, _: Any, **_serial: Any
    ) -> Any:
        kv_memory.find(caches["all"])
        return recording.rank

    worker_half.describe_rank = described

    def attached() -> RawHalf:
        scheduler = RawHalf(Path(run_dir), engine_id=config.kv_transfer_config.engine_id)
        scheduler.attach()
        scheduler.register(recording.engine)
        return scheduler

    scheduler = attached()
    half.register({"all": memory.tensor})
    scheduler.stream.expect(Ready)
    link = wait_until(half._client.link, "the worker half is attached")
    player = Player(
        recording, scheduler, half, memory, life=recording.engine.life, epoch=lambda: link.epoch
    )
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        started_s = time.monotonic()
        if line.strip() == "again":  # the worker half does it by itself
            scheduler.close()
            scheduler = attached()
            scheduler.stream.expect(Ready)
            print(json.dumps({"seconds": time.monotonic() - started_s}), flush=True)
            continue
        player.play(getattr(recording, line.strip()))
        found = {"hits": player.hits, "counts": player.counts}
        print(json.dumps(found | {"seconds": time.monotonic() - started_s}), flush=True)
    half.shutdown()
    scheduler.leave()


if __name__ == "__main__":
    main(*sys.argv[1:3])

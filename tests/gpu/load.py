"""What copies cost an engine that computes."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

from gpu import device
from gpu.copies import Bench
from gpu.peer import peer
from gpu.runner import Env, Sizes
from kvferry_sidecar.engines.base import Direction

SECONDS = 8.0


def products(seconds: float, size: int) -> list[float]:
    """Multiply bf16 matrices on the GPU; returns milliseconds of each product."""
    import torch  # only on the machine that has it

    one = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    other = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(10):
        one @ other
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for _ in range(16):
            one @ other
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)
        torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def interference(sizes: Sizes) -> dict[str, Any]:
    """Times of a matmul loop in another process, alone and under copies of each page size."""
    if sizes.small:
        raise Env("a GPU made of host memory multiplies nothing")
    device.driver()
    figures: dict[str, Any] = {}
    with peer() as engine:
        alone = engine.do("matmul", seconds=SECONDS)["ms"]
        figures["alone"] = summary(alone)
        bench = Bench(2 << 30, 3 << 30)
        for page_bytes in (4096, 32768, 1 << 20):
            count = min(1024, (1 << 30) // (page_bytes * 32))
            layout = bench.layout(page_bytes, count + 1, 32)
            engine.send("matmul", seconds=SECONDS)
            moved, started_s = 0, time.monotonic()
            while time.monotonic() - started_s < SECONDS + 1:
                for direction in Direction:
                    bench.seconds(direction, layout, count)
                    moved += count * layout.payload_bytes
            rate = moved / (time.monotonic() - started_s) / 1e9
            found = summary(engine.answer()["ms"]) | {"copies GB/s": round(rate, 2)}
            slower = found["p50 ms"] / figures["alone"]["p50 ms"] - 1
            figures[f"pages of {page_bytes}"] = found | {"slower %": round(100 * slower, 2)}
        bench.close()
    return figures


def summary(times_ms: list[float]) -> dict[str, float]:
    """Return median and 99th percentile."""
    ordered = sorted(times_ms)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    return {"p50 ms": round(statistics.median(ordered), 4), "p99 ms": round(p99, 4)}

"""What copies cost an engine that computes."""

from __future__ import annotations

import time
from itertools import pairwise, product
from typing import Any

from gpu import device
from gpu.copies import LAYERS, NAMES, Bench
from gpu.peer import peer
from gpu.runner import Sizes
from gpu.verdicts import Env
from kvferry_sidecar.engines.base import Direction

from bench.common import at_most, percentile

SECONDS = 4.0


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
    """Times of a matmul loop in another process, alone and while copies never pause."""
    device.driver()
    if sizes.small:
        raise Env("a GPU made of host memory multiplies nothing")
    figures: dict[str, Any] = {}
    goals = []
    with peer() as engine:
        engine.do("matmul", seconds=1)
        alone = figures["alone"] = summary(engine.do("matmul", seconds=SECONDS)["ms"])
        bench = Bench(2 << 30, 3 << 30)
        for page_bytes, direction in product((4096, 65536, 1 << 20), Direction):
            count = min(1024, (1 << 30) // (page_bytes * LAYERS))
            layout = bench.layout(page_bytes, count + 1, LAYERS)
            bench.seconds(direction, layout, count)
            engine.send("matmul", seconds=SECONDS)
            rate = bench.keep_busy(direction, layout, count, SECONDS + 0.5)
            found = summary(engine.answer()["ms"]) | {"copies GB/s": round(rate, 2)}
            name = f"{NAMES[direction]}s, pages of {page_bytes}"
            figures[name] = found
            slower = 100 * (found["p50 ms"] / alone["p50 ms"] - 1)
            goals.append(at_most(f"matmul slowed by {name}", slower, "%", 3))
        bench.close()
    return figures | {"goals": goals}


def summary(times_ms: list[float]) -> dict[str, float]:
    """Return median and 99th percentile."""
    p50, p99 = (round(percentile(times_ms, percent), 4) for percent in (50, 99))
    return {"p50 ms": p50, "p99 ms": p99}

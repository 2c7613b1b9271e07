"""Real engines under random traffic while their sidecar is broken at random, for minutes.

Every output is compared with that of an engine without a connector. At the end everything is
whole again: no pin, lease, reservation or open job is left, and memory has stayed where it was.
``make soak MINUTES=10``.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from kvferry_demo import protocol
from support.books import descriptors, resident_bytes, wait_settled
from support.chaos import Chaos
from support.engine import EngineUnderTest, Texts, ask, running_engine
from support.kit import ENABLED
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(0)]

HEADS, TAILS = 4, 6
HEAD_TOKENS, TAIL_TOKENS = 1_000, 500
OUTPUT_TOKENS = 6
LOCAL_BYTES = 8 << 20  # of KV in each engine: what repeats is mostly not there any more
POOL_BYTES = 32 << 20
GROWTH_BYTES_MAX = 48 << 20


@pytest.fixture
def sidecar() -> Iterator[SidecarUnderTest]:
    limits = {"copy_ms_max": 2000, "ranks_wait_ms_max": 2000, "drain_ms_max": 3000}
    flags = set_flags({f"limits.{name}": value for name, value in limits.items()})
    with running_sidecar(pool_bytes=POOL_BYTES, flags=(*flags, *ENABLED)) as found:
        yield found


class Traffic:
    """Random requests on one engine; what ends is compared with what must come out."""

    def __init__(self, engine: EngineUnderTest, right: dict[int, list[int]]) -> None:
        self.engine, self.right = engine, right
        self.counts: Counter[str] = Counter()

    def burst(self, prompts: list[list[int]], rng: random.Random) -> None:
        """A few requests at once, some of them aborted on the way, all of them ended."""
        asked = {}
        for _ in range(rng.randrange(1, 4)):
            number = rng.randrange(len(prompts))
            request = ask(prompts[number], max_tokens=OUTPUT_TOKENS)
            asked[request.request] = number
            self.engine.start(request)
        self.engine.step(rng.randrange(1, 6))
        aborted = [name for name in asked if rng.random() < 0.15]
        if aborted:
            self.engine.abort(*aborted)
        for result in self.engine.finish():
            self._compare(result, asked[result.request], aborted)

    def _compare(self, result: protocol.Result, number: int, aborted: list[str]) -> None:
        self.counts["requests"] += 1
        self.counts["hit_tokens"] += result.hit_tokens
        if result.request in aborted:
            self.counts["aborted"] += 1
            return
        self.counts["tokens"] += len(result.output)
        wrong = result.output != self.right[number] or len(result.output) != OUTPUT_TOKENS
        self.counts["wrong"] += wrong
        assert not wrong, (result, self.right[number])


def make_prompts(texts: Texts) -> list[list[int]]:
    heads = [texts.take(HEAD_TOKENS) for _ in range(HEADS)]
    return [head + texts.take(TAIL_TOKENS) for head in heads for _ in range(TAILS)]


def memory_of(engines: list[EngineUnderTest]) -> list[int]:
    return [resident_bytes(engine.facts.pid) for engine in engines]


def test_soak(sidecar: SidecarUnderTest, request: pytest.FixtureRequest) -> None:
    minutes = float(request.config.getoption("--soak-minutes"))
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"soak of {minutes} minutes, seed {seed}")
    rng, prompts = random.Random(seed), make_prompts(Texts())
    with running_engine() as alone:
        right = {number: alone.run(tokens, max_tokens=OUTPUT_TOKENS).output
                 for number, tokens in enumerate(prompts)}  # fmt: skip
    small = {"kv_cache_bytes": LOCAL_BYTES, "max_model_len": 2048}
    extra = {"job_ask_ms": 200, "probe_ms_max": 300, "silent_ms_max": 1000}
    with (
        running_engine(sidecar.run_dir, connector_extra=extra, **small) as one,
        running_engine(sidecar.run_dir, connector_extra=extra, **small) as two,
    ):
        traffics = [Traffic(engine, right) for engine in (one, two)]
        for traffic in traffics:
            traffic.burst(prompts, rng)
        chaos = Chaos(sidecar, seed)
        chaos.start()
        end_s = time.monotonic() + minutes * 60
        memory: list[list[int]] = []
        try:
            while time.monotonic() < end_s and not chaos.errors:
                rng.choice(traffics).burst(prompts, rng)
                memory.append(memory_of([one, two]))
        finally:
            chaos.end()
        finish(sidecar, traffics, prompts)
        report(chaos, traffics, memory, sidecar)


def finish(sidecar: SidecarUnderTest, traffics: list[Traffic], prompts: list[list[int]]) -> None:
    """Whole again: everything settles, nothing is left, and hits are back."""
    for traffic in traffics:
        engine = traffic.engine
        engine.wait_attached()
        for number, tokens in enumerate(prompts):
            result = engine.run(tokens, max_tokens=OUTPUT_TOKENS)
            assert result.output == traffic.right[number]
            traffic.counts["hit_tokens_at_the_end"] += result.hit_tokens
        engine.settle()
        assert engine.inspect().used_blocks == 0, "pins are left"
    wait_settled(sidecar.run_dir)
    assert sum(traffic.counts["hit_tokens_at_the_end"] for traffic in traffics) > 0


def report(
    chaos: Chaos, traffics: list[Traffic], memory: list[list[int]], sidecar: SidecarUnderTest
) -> None:
    """Print the figures; memory must not have grown from the first third to the last."""
    third = max(1, len(memory) // 3)
    growth = [
        max(late) - max(early)
        for early, late in zip(
            zip(*memory[:third], strict=True), zip(*memory[-third:], strict=True), strict=True
        )
    ]
    counts = sum((traffic.counts for traffic in traffics), Counter())
    pid = sidecar.process.pid
    figures = {
        **counts,
        **chaos.done,
        "sidecar_restarts": chaos.restarts,
        "engine_growth_bytes": growth,
        "sidecar_resident_bytes": resident_bytes(pid),
        "sidecar_descriptors": descriptors(pid),
    }
    print(json.dumps(figures))
    assert counts["wrong"] == 0
    assert max(growth) < GROWTH_BYTES_MAX, "an engine's memory grows"

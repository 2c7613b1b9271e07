"""Real engines under random traffic while their sidecar is broken at random, for minutes.

They are killed too, with requests under way, and others take their place: one of them has two
tensor parallel ranks, and of that one a rank alone may be killed. Every output is compared with
that of an engine without a connector. At the end everything is whole again: no pin, lease,
reservation, open job or mapping is left, and memory has stayed where it was.
``make soak MINUTES=10``.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kvferry_demo import protocol
from kvferry_demo.processes import ChildError
from support.books import descriptors, resident_bytes, wait_settled
from support.chaos import Chaos
from support.engine import TWO_RANKS, Texts, ask, running_engine
from support.kit import ENABLED
from support.memory import mapped_files
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags
from support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(0)]

HEADS, TAILS = 4, 6
HEAD_TOKENS, TAIL_TOKENS = 1_000, 500
OUTPUT_TOKENS = 6
LOCAL_BYTES = 8 << 20  # of KV in each engine: what repeats is mostly not there any more
POOL_BYTES = 32 << 20
GROWTH_BYTES_MAX = 48 << 20
LIFE_BURSTS = 30  # of a life whose memory is judged
KILLED_EACH = 0.01  # bursts before which the engine is killed
TWO_RANKS_KILLED_EACH = 0.1
ASKED_AT_THE_END = 8  # prompts, of each engine
ENGINE: dict[str, Any] = {
    "kv_cache_bytes": LOCAL_BYTES,
    "max_model_len": 2048,
    "connector_extra": {"job_ask_ms": 200, "probe_ms_max": 300, "silent_ms_max": 1000},
}


@pytest.fixture
def sidecar() -> Iterator[SidecarUnderTest]:
    limits = {"copy_ms_max": 2000, "ranks_wait_ms_max": 2000, "drain_ms_max": 3000}
    flags = set_flags({f"limits.{name}": value for name, value in limits.items()})
    with running_sidecar(pool_bytes=POOL_BYTES, flags=(*flags, *ENABLED)) as found:
        yield found


class Traffic:
    """Random requests on an engine, one life after the other; what ends is compared.

    ``ranks``: 1, or 2 in processes of their own. ``right``: outputs of such an engine without a
    connector. ``memory``: resident bytes of the engine after each burst, by life.
    """

    def __init__(self, run_dir: Path, right: dict[int, list[int]], ranks: int = 1) -> None:
        self._run_dir, self.right, self.ranks = run_dir, right, ranks
        self.killed_each = KILLED_EACH if ranks == 1 else TWO_RANKS_KILLED_EACH
        self._life = ExitStack()
        self.counts: Counter[str] = Counter()
        self.memory: list[list[int]] = []
        self._begin(attached=True)

    def _begin(self, *, attached: bool) -> None:
        arguments = {} if self.ranks == 1 else TWO_RANKS
        self.engine = self._life.enter_context(
            running_engine(self._run_dir, attached=attached, engine_args=arguments, **ENGINE)
        )
        self.memory.append([])

    def close(self) -> None:
        """End the engine."""
        self._life.close()

    def kill(self, prompts: list[list[int]], rng: random.Random) -> None:
        """Kill the engine, or one rank of it, with requests under way; start another one."""
        for _ in range(3):
            self.engine.start(ask(rng.choice(prompts), max_tokens=OUTPUT_TOKENS))
        self.engine.step(rng.randrange(1, 6))
        if self.ranks > 1 and rng.random() < 0.75:
            self._kill_rank(rng)
        else:
            self.counts["engines_killed"] += 1
            self.engine.kill()
        self._life.close()
        self._begin(attached=False)

    def _kill_rank(self, rng: random.Random) -> None:
        """Kill the process of a rank: vLLM ends the engine with its next step."""
        self.counts["ranks_killed"] += 1
        self.engine.kill_rank(rng.randrange(self.ranks))
        with pytest.raises(ChildError):
            self.engine.finish()
        wait_until(lambda: self.engine.process.poll() is not None, "the engine has ended")

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
        self.memory[-1].append(resident_bytes(self.engine.facts.pid))

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


def outputs_alone(
    prompts: list[list[int]], arguments: Mapping[str, Any] | None = None
) -> dict[int, list[int]]:
    """Return what an engine without a connector answers to each prompt."""
    with running_engine(engine_args=arguments) as alone:
        return {
            number: alone.run(tokens, max_tokens=OUTPUT_TOKENS).output
            for number, tokens in enumerate(prompts)
        }


def test_soak(sidecar: SidecarUnderTest, request: pytest.FixtureRequest) -> None:
    minutes = float(request.config.getoption("--soak-minutes"))
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"soak of {minutes} minutes, seed {seed}")
    rng, prompts = random.Random(seed), make_prompts(Texts())
    with ExitStack() as stack:
        run_dir, right = sidecar.run_dir, outputs_alone(prompts)
        traffics = [Traffic(run_dir, right) for _ in range(2)]
        traffics.append(Traffic(run_dir, outputs_alone(prompts, TWO_RANKS), ranks=2))
        for traffic in traffics:
            stack.callback(traffic.close)
            traffic.burst(prompts, rng)
        chaos = Chaos(sidecar, seed, lambda: [one.engine.pid for one in traffics])
        chaos.start()
        end_s = time.monotonic() + minutes * 60
        try:
            while time.monotonic() < end_s and not chaos.errors:
                traffic = rng.choice(traffics)
                if rng.random() < traffic.killed_each:
                    traffic.kill(prompts, rng)
                traffic.burst(prompts, rng)
        finally:
            chaos.end()
        finish(sidecar, traffics, prompts)
        report(chaos, traffics, sidecar)


def finish(sidecar: SidecarUnderTest, traffics: list[Traffic], prompts: list[list[int]]) -> None:
    """Whole again: everything settles, nothing is left, and hits are back."""
    for traffic in traffics:
        engine = traffic.engine
        engine.wait_attached()
        for number, tokens in list(enumerate(prompts))[-ASKED_AT_THE_END:]:
            result = engine.run(tokens, max_tokens=OUTPUT_TOKENS)
            assert result.output == traffic.right[number]
            traffic.counts["hit_tokens_at_the_end"] += result.hit_tokens
        engine.settle()
        assert engine.inspect().used_blocks == 0, "pins are left"
    wait_settled(sidecar.run_dir)
    ranks = sum(traffic.ranks for traffic in traffics)
    left = mapped_files(sidecar.process.pid)
    assert len(left) == 2 * ranks, f"a fence page and KV memory of each rank that lives: {left}"
    assert sum(traffic.counts["hit_tokens_at_the_end"] for traffic in traffics) > 0


def growth_bytes(memory: list[int]) -> int:
    """From the first third of a life's samples to the last: the most that each held."""
    third = max(1, len(memory) // 3)
    return max(memory[-third:]) - max(memory[:third])


def report(chaos: Chaos, traffics: list[Traffic], sidecar: SidecarUnderTest) -> None:
    """Print the figures; memory must not have grown within a life."""
    lives = [life for traffic in traffics for life in traffic.memory if len(life) >= LIFE_BURSTS]
    growth = [growth_bytes(life) for life in lives]
    counts = sum((traffic.counts for traffic in traffics), Counter())
    pid = sidecar.process.pid
    figures = {
        **counts,
        **chaos.done,
        "sidecar_restarts": chaos.restarts,
        "engine_lives": sum(len(traffic.memory) for traffic in traffics),
        "engine_growth_bytes": growth,
        "sidecar_resident_bytes": resident_bytes(pid),
        "sidecar_descriptors": descriptors(pid),
        "sessions": len(sidecar.status()["sessions"]),
    }
    print(json.dumps(figures))
    assert counts["wrong"] == 0
    assert figures["sessions"] == len(traffics), "a killed engine's session is left"
    assert max(growth, default=0) < GROWTH_BYTES_MAX, "an engine's memory grows"

"""Random lives in vLLM's real schedulers: contents right at every step, nothing left at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.scheduler_configs import chunked, full, mamba, ring, swa
from support.scheduler_harness import SchedulerUnderTest

CHUNKED = [full(16), chunked(16, 64)]  # which vLLM forbids with a drafter
MODELS: list[Sequence[Any]] = [
    [full(16)],
    [full(16), full(32)],
    [full(16), swa(16, 40)],
    [full(32), swa(16, 70), swa(32, 33), ring(32)],
    CHUNKED,
    [swa(16, 50)],
    [full(16), mamba(16)],
    [full(16), mamba(16, scratch=2), swa(16, 40)],
    [full(32), mamba(32, scratch=1)],
    [full(16), mamba(64)],  # this and the next with hits inside a block
    [full(32), swa(16, 40), mamba(64, scratch=2)],
]
MATCH_UNIT = 16
CORPUS = [list(range(base, base + 260)) for base in (10, 300)]


def _random_prompt(rng: random.Random) -> list[int]:
    length = rng.choice([90, 170, 250, rng.randint(1, 260)])  # states are kept where prompts ended
    tokens = rng.choice(CORPUS)[:length]
    return [*tokens, *(rng.randint(0, 500) for _ in range(rng.choice([0, 0, 5, 40])))]


def _disturb(engine: SchedulerUnderTest, rng: random.Random) -> None:
    """Something that may happen; what goes wrong is right again most of the time."""
    node, chance = engine.node, rng.random()
    wrong = rng.random() < 0.2
    if chance < 0.03:
        node.restart()
    elif chance < 0.06:
        node.away = wrong
    elif chance < 0.09:
        node.is_silent = wrong
    elif chance < 0.12:
        node.load_fails = wrong
    elif chance < 0.16:
        node.answers = not wrong
        node.answer_all()
    elif chance < 0.165:
        engine.scheduler.reset_prefix_cache()
    elif chance < 0.17:
        engine.connector.reset_cache()
    elif chance < 0.20:
        node.takes_sends = not wrong
    elif chance < 0.27:
        engine.forget_unused()
    node.load_steps, node.save_steps = rng.randint(0, 6), rng.randint(0, 12)


@pytest.mark.parametrize("seed", range(44))
def test_random_lives(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    specs, asynchronous = MODELS[seed % len(MODELS)], rng.random() < 0.4
    drafted = seed % 3 == 2 and not asynchronous and specs is not CHUNKED
    engine = SchedulerUnderTest(
        tmp_path,
        specs=specs,
        match_unit=MATCH_UNIT if specs in MODELS[-2:] else None,
        drafts=2 if drafted else 0,
        retention=rng.choice([0, 0, None]),
        num_blocks=rng.choice([40, 80]),
        asynchronous=asynchronous,
        v2_runner=rng.random() < 0.3,
        pinned_blocks_max=rng.choice([0, 6, 40]),
        probe_ms_max=rng.choice([0, 5, 100]),
        lookup_wait_us_max=0,
    )
    alive: list[str] = []
    for number in range(250):
        if rng.random() < 0.3 and len(engine.scheduler.requests) < 8:
            name = f"r{number}" if rng.random() < 0.7 else f"r{number % 3}"
            if name not in engine.scheduler.requests:
                engine.add(name, _random_prompt(rng), max_tokens=rng.randint(1, 70))
                alive.append(name)
        if alive and rng.random() < 0.06:
            engine.abort(rng.choice(alive))
        _disturb(engine, rng)
        if engine.scheduler.has_requests() or engine.half._jobs:
            engine.step()
        else:
            engine.drain()
    engine.node.away = engine.node.is_silent = False
    engine.node.takes_sends = engine.node.answers = True
    engine.node.answer_all()
    engine.run(3000)
    assert engine.node.saved, "something was saved"
    engine.assert_idle()

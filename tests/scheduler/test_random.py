"""Random lives in vLLM's real schedulers: contents right at every step, nothing left at the end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvferry_connector.jobs import JobOrder
from kvferry_connector.wire import hot
from support.scheduler_configs import chunked, full, mamba, ring, swa
from support.scheduler_harness import SchedulerUnderTest
from support.scripted_node import StepEnd
from vllm.v1.request import RequestStatus

CHUNKED = [full(16), chunked(16, 64)]  # which vLLM forbids with a drafter
PLAIN = [full(16)]
MODELS: list[Sequence[Any]] = [
    PLAIN,
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
LIVES_BESIDE = 6  # further ones, beside another connector
SEEDS = range(44 + LIVES_BESIDE)
MATCH_UNIT = 16
CORPUS = [list(range(base, base + 260)) for base in (10, 300)]
LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
# What has to have happened over all seeds, at least so often.
HAPPENED = {
    "load done": 15,
    "load failed": 30,
    "load cancelled": 5,
    "save done": 1000,
    "save failed": 10,
    "save cancelled": 100,
    "loads_again": 4,
    "preempted": 60,
    "aborted while it loads": 6,
    "aborted while it is saved": 25,
    "sidecar ends": 100,
    "sidecar ends while it loads": 1,
    "sidecar ends while it saves": 40,
    "rotations": 30,
    "pinned_blocks_max": 1000,
    "probe_ms_max": 15,
    "sends_refused": 200,
    "step with drafts": 500,
    "step ahead with drafts": 200,
    "loads of another connector": 2,
    "later of another connector": 10,
}


def _random_prompt(rng: random.Random) -> list[int]:
    length = rng.choice([90, 170, 250, rng.randint(1, 260)])  # states are kept where prompts ended
    tokens = rng.choice(CORPUS)[:length]
    return [*tokens, *(rng.randint(0, 500) for _ in range(rng.choice([0, 0, 5, 40])))]


class Life:
    """One engine, and what happened to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        beside = seed >= SEEDS.stop - LIVES_BESIDE
        specs, asynchronous = PLAIN if beside else MODELS[seed % len(MODELS)], rng.random() < 0.4
        drafted = seed % 3 == 2 and specs is not CHUNKED and not beside
        self.ahead = asynchronous
        self.engine = engine = SchedulerUnderTest(
            folder,
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
            gather_tokens=rng.choice([0, 512]),
            beside=rng.choice(["before", "after"]) if beside else "",
        )
        self.seen: Counter[str] = Counter()
        self._finish, engine.node._finish = engine.node._finish, self._ended

    def _ended(
        self, end: StepEnd, order: JobOrder, *, is_load: bool, status: str, shorter: int = 0
    ) -> None:
        self.seen[f"{'load' if is_load else 'save'} {status}"] += 1
        self._finish(end, order, is_load=is_load, status=status, shorter=shorter)

    def run(self) -> None:
        """Some hundred steps, then the way back to rest."""
        engine, rng = self.engine, self.rng
        for number in range(250):
            if rng.random() < 0.3 and len(engine.scheduler.requests) < 8:
                name = f"r{number}" if rng.random() < 0.7 else f"r{number % 3}"
                if name not in engine.scheduler.requests:
                    prompt = _random_prompt(rng)
                    self._offer(name, len(prompt))
                    engine.add(name, prompt, max_tokens=rng.randint(1, 70))
            if engine.scheduler.requests and rng.random() < 0.06:
                loading = [
                    one for one in engine.scheduler.requests.values() if one.status is LOADING
                ]
                ended = rng.choice(loading or list(engine.scheduler.requests.values()))
                self._abort(ended.request_id)
            self._disturb()
            if engine.scheduler.has_requests() or engine.half._jobs:
                self._step()
            else:
                engine.drain()
        self._say_now()
        engine.node.away = engine.node.is_silent = False
        engine.node.takes_sends = engine.node.answers = True
        engine.node.answer_all()
        engine.run(3000)
        assert engine.node.saved, "something was saved"
        engine.assert_idle()
        self.seen.update(engine.counts)
        self.seen["preempted"] = sum(one.num_preemptions for one in engine.requests.values())
        if engine.other is not None:
            given = sum(any(tokens) for tokens in engine.other.given.values())
            self.seen["loads of another connector"] = given

    def _step(self) -> None:
        self.engine.step()
        if self.engine.outputs[-1].scheduled_spec_decode_tokens:
            self.seen["step ahead with drafts" if self.ahead else "step with drafts"] += 1

    def _offer(self, name: str, tokens: int, *, later: bool = True) -> None:
        """What the other connector says it has of a prompt of ``tokens``; None: ask later."""
        if self.engine.other is not None:
            offers = [offer for offer in (0, 0, 16, 48) if offer < tokens]
            offer = self.rng.choice([*offers, None] if later else offers)
            self.engine.other.offers[name] = offer
            self.seen["later of another connector"] += offer is None

    def _say_now(self) -> None:
        """The other connector says what it has to all whom it told to ask later."""
        for name, offer in self.engine.other.offers.items() if self.engine.other else ():
            if offer is None:
                self._offer(name, self.engine.requests[name].num_prompt_tokens, later=False)

    def _in(self, status: RequestStatus) -> list[str]:
        requests = self.engine.scheduler.requests
        return [name for name, one in requests.items() if one.status is status]

    def _abort(self, name: str) -> None:
        running = self.engine.node.running
        status = self.engine.requests[name].status
        saved = any(isinstance(one.job, hot.SaveJob) and one.job.request == name for one in running)
        self.seen["aborted while it loads"] += status is LOADING
        self.seen["aborted while it is saved"] += saved
        self.engine.abort(name)

    def _restart(self) -> None:
        """The sidecar ends, and each open job of it with it."""
        node = self.engine.node
        kinds = {type(one.job) for one in node.running}
        self.seen["sidecar ends"] += 1
        self.seen["sidecar ends while it loads"] += hot.LoadJob in kinds
        self.seen["sidecar ends while it saves"] += hot.SaveJob in kinds
        node.restart()
        for one in node.running:
            one.cancelled = True

    def _disturb(self) -> None:
        """Something that may happen; what goes wrong is right again most of the time."""
        engine, node, rng, chance = self.engine, self.engine.node, self.rng, self.rng.random()
        wrong = rng.random() < 0.2
        if chance < 0.03:
            self._restart()
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
        elif chance < (0.8 if self._in(RequestStatus.PREEMPTED) else 0.30):
            engine.forget_unused()
        elif chance < 0.38:
            node.damaged = set(rng.sample(sorted(node.store), len(node.store) // 4))
        elif chance < 0.45 and engine.other is not None:
            self._say_now()
        node.load_steps, node.save_steps = rng.randint(0, 6), rng.randint(0, 12)


@pytest.fixture(scope="module")
def seen_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Counter[str]]:
    """The life of a seed, which has ended well, as what happened in it; each is lived once."""
    known: dict[int, Counter[str]] = {}

    def live(seed: int) -> Counter[str]:
        if seed not in known:
            life = Life(tmp_path_factory.mktemp("life"), seed)
            life.run()
            known[seed] = life.seen
        return known[seed]

    return live


@pytest.mark.parametrize("seed", SEEDS)
def test_random_lives(seed: int, seen_in: Callable[[int], Counter[str]]) -> None:
    assert seen_in(seed)


def test_everything_happened(seen_in: Callable[[int], Counter[str]]) -> None:
    seen = sum((seen_in(seed) for seed in SEEDS), Counter())
    assert {name: seen[name] for name, least in HAPPENED.items() if seen[name] < least} == {}

"""The state machine of an admission: every transition, and any order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvferry_connector.requests import ANSWER_FRESH_S, Admission, Limits, Phase, Send

LIMITS = Limits(probe_s_max=0.1, hint_fresh_s=0.05)
CAP = 192


def asking(local: int = 0, *, now_s: float = 0.0) -> Admission:
    admission = Admission(1, bytes(16))
    assert admission.ask(now_s, local, CAP, 5, LIMITS) == Send(probe=True)
    admission.probed(5, 12)
    admission.asked(now_s, 1, local)
    return admission


def answered(hit: int, local: int = 0, *, now_s: float = 0.0) -> Admission:
    admission = asking(local, now_s=now_s)
    assert admission.answered(now_s, 1, hit, {"host": hit})
    return admission


def test_an_answer_is_given_and_given_again() -> None:
    admission = answered(128, 32)
    assert admission.ask(0.01, 32, CAP, 5, LIMITS) == 96
    assert admission.ask(0.02, 32, CAP, 5, LIMITS) == 96
    assert admission.leased


def test_hit_is_never_longer_than_the_cap() -> None:
    assert answered(256).ask(0.0, 0, CAP, 5, LIMITS) == CAP


def test_hit_of_no_more_than_local_is_unleased() -> None:
    admission = answered(64, 64)
    assert admission.ask(0.0, 64, CAP, 5, LIMITS) == 0
    assert not admission.leased
    assert admission.stored_tokens == 64


def test_nothing_is_asked_when_local_reaches_the_cap() -> None:
    admission = Admission(1, bytes(16))
    assert admission.ask(0.0, CAP, CAP, 5, LIMITS) == 0
    assert admission.phase is Phase.PROBED


def test_later_until_the_time_is_over() -> None:
    admission = asking()
    assert admission.ask(0.05, 0, CAP, 5, LIMITS) is None
    assert admission.ask(0.1, 0, CAP, 5, LIMITS) == 0
    assert admission.phase is Phase.NONE
    assert not admission.answered(0.11, 1, 128, {}), "late"
    assert admission.ask(0.2, 0, CAP, 5, LIMITS) == 0


def test_another_local_length_asks_again_in_the_same_time() -> None:
    admission = asking()
    assert admission.ask(0.05, 32, CAP, 5, LIMITS) == Send(probe=False)
    admission.asked(0.05, 2, 32)
    assert not admission.answered(0.06, 1, 128, {}), "the answer to the first question"
    assert admission.ask(0.1, 32, CAP, 5, LIMITS) == 0


def test_an_old_answer_is_asked_for_again_with_its_own_time() -> None:
    admission = answered(128)
    later_s = ANSWER_FRESH_S + 0.01
    assert admission.ask(later_s, 0, CAP, 5, LIMITS) == Send(probe=False)
    admission.asked(later_s, 2, 0)
    assert admission.ask(later_s + 0.05, 0, CAP, 5, LIMITS) is None


@pytest.mark.parametrize(
    ("hint", "age_s", "expected"),
    [
        (0, 0.0, 0),
        (32, 0.04, 0),
        (32, 0.06, Send(probe=False)),
        (48, 0.0, Send(probe=False)),
    ],
)
def test_fresh_hint_of_nothing_more_answers(hint: int, age_s: float, expected: object) -> None:
    admission = Admission(1, bytes(16))
    admission.probed(5, 12)
    admission.hinted(1.0, hint, hint)
    assert admission.ask(1.0 + age_s, 32, CAP, 5, LIMITS) == expected


def test_new_epoch_voids_everything_and_starts_the_time_anew() -> None:
    admission = answered(128)
    assert admission.ask(0.09, 0, CAP, 6, LIMITS) == Send(probe=True)
    assert (admission.hit_tokens, admission.stored_tokens) == (0, 0)
    admission.probed(6, 12)
    admission.asked(0.09, 2, 0)
    assert admission.ask(0.15, 0, CAP, 6, LIMITS) is None


def test_need_full_does_not_prolong_later() -> None:
    admission = asking()
    admission.void()
    assert admission.ask(0.05, 0, CAP, 5, LIMITS) == Send(probe=True)
    admission.probed(5, 12)
    admission.asked(0.05, 2, 0)
    admission.void()
    assert admission.ask(0.1, 0, CAP, 5, LIMITS) == 0
    assert admission.phase is Phase.NONE


def test_load_and_its_ends() -> None:
    admission = answered(128, 32)
    assert admission.load(9, 96) == 128
    assert admission.leased
    assert admission.ask(0.0, 32, CAP, 5, LIMITS) == 0
    assert not admission.decline(), "the promotion call is no decision"
    assert admission.loaded(ok=True)
    assert admission.phase is Phase.LOADED
    assert not admission.loaded(ok=False), "once"


def test_load_that_was_never_promised_is_still_waited_for() -> None:
    for admission, tokens in ((asking(), 16), (answered(128, 32), 112)):
        assert admission.load(9, tokens) is None
        assert admission.phase is Phase.LOADING


def failed_load(admission: Admission, shorter: int) -> Admission:
    admission.phase, admission.hit_tokens = Phase.ANSWERED, 128
    admission.load(9, 128)
    admission.shorter_tokens = shorter
    assert admission.loaded(ok=False)
    return admission


def test_failed_load_that_left_nothing_whole_is_the_requests_last() -> None:
    admission = failed_load(answered(128), shorter=0)
    assert admission.stored_tokens == 0, "what could not be read is saved anew"
    assert admission.steps_back, "the engine is told once to ask later"
    assert admission.ask(0.0, 0, CAP, 5, LIMITS) == 0
    heir = admission.succeed(2, b"v" * 16)
    assert heir.ask(0.0, 0, CAP, 5, LIMITS) == 0


def test_failed_load_is_followed_by_one_shorter_one_at_most() -> None:
    first = failed_load(answered(128), shorter=64)
    assert first.ask(0.0, 0, CAP, 5, LIMITS) == 0, "only a new admission asks again"
    second = first.succeed(2, b"v" * 16)
    assert (second.phase, second.bound_tokens) == (Phase.PROBED, 64)
    third = failed_load(second, shorter=32).succeed(3, b"v" * 16)
    assert third.ask(0.0, 0, CAP, 5, LIMITS) == 0
    assert third.succeed(4, b"v" * 16).phase is Phase.FAILED


def test_request_whose_shorter_load_was_done_may_fail_once_more() -> None:
    second = failed_load(answered(128), shorter=64).succeed(2, b"v" * 16)
    second.phase = Phase.LOADED
    third = second.succeed(3, b"v" * 16)
    assert (third.phase, third.bound_tokens) == (Phase.PROBED, None)
    assert failed_load(third, shorter=64).succeed(4, b"v" * 16).phase is Phase.FAILED


def test_next_admission_starts_from_nothing() -> None:
    heir = answered(128).succeed(2, b"v" * 16)
    assert (heir.number, heir.version, heir.phase) == (2, b"v" * 16, Phase.PROBED)
    assert heir.ask(0.0, 0, CAP, 5, LIMITS) == Send(probe=True)


def test_declined_answer_is_settled() -> None:
    admission = answered(128)
    assert admission.decline()
    assert not admission.leased
    assert admission.ask(0.0, 0, CAP, 5, LIMITS) == 0
    assert not admission.decline()


class Lives(RuleBasedStateMachine):
    """Any order of events: "later" is bounded, and a promise is only made of a live answer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.epoch = 5
        self.seq = 0
        self.admission = Admission(1, bytes(16))
        self.given: dict[int, int] = {}  # seq -> hit, as the sidecar answered in this epoch
        self.later_since: float | None = None
        self.loads = 0
        self.failures = 0

    @rule(dt=st.floats(0.0, 0.3))
    def wait(self, dt: float) -> None:
        self.now_s += dt

    @rule(local=st.sampled_from([0, 16, 64]), sent=st.booleans())
    def ask(self, local: int, sent: bool) -> None:
        for _ in range(2):
            decision = self.admission.ask(self.now_s, local, CAP, self.epoch, LIMITS)
            if not isinstance(decision, Send) or not sent:
                break
            if decision.probe:
                self.admission.probed(self.epoch, 12)
            self.seq += 1
            self.admission.asked(self.now_s, self.seq, local)
        if isinstance(decision, Send):
            return
        if decision is None:
            if self.later_since is None:
                self.later_since = self.now_s
            assert self.now_s - self.later_since < LIMITS.probe_s_max
        else:
            self.later_since = None
        if decision:
            assert self.failures < 2
            assert local + decision <= min(CAP, self.given[self.admission.seq])
            assert self.admission.epoch == self.epoch

    @rule(hit=st.sampled_from([0, 16, 64, 128, 192]), back=st.integers(0, 2))
    def answer(self, hit: int, back: int) -> None:
        seq = self.seq - back
        if seq <= 0 or self.admission.epoch != self.epoch:
            return
        if self.admission.answered(self.now_s, seq, hit, {}):
            self.given[seq] = hit
            self.later_since = None

    @rule(hit=st.sampled_from([0, 64]))
    def hint(self, hit: int) -> None:
        self.admission.hinted(self.now_s, hit, hit)

    @rule()
    def need_full(self) -> None:
        self.admission.void()

    @rule()
    def restart(self) -> None:
        self.epoch += 1
        self.given.clear()
        self.later_since = None

    @rule(tokens=st.sampled_from([0, 16, 64, 128]))
    def allocate(self, tokens: int) -> None:
        if tokens == 0:
            self.admission.decline()
            assert not self.admission.leased or self.admission.phase is Phase.LOADING
        elif self.admission.phase is Phase.ANSWERED:
            total = self.admission.load(self.seq, tokens)
            assert total is None or total <= self.given.get(self.admission.seq, CAP)
            self.loads += 1
        self.later_since = None

    @rule(ok=st.booleans(), shorter=st.sampled_from([0, 64]))
    def outcome(self, ok: bool, shorter: int) -> None:
        self.admission.shorter_tokens = 0 if ok else shorter
        if self.admission.loaded(ok):
            self.loads -= 1
            self.failures += not ok

    @rule()
    def preempt(self) -> None:
        if self.admission.phase is not Phase.LOADING:  # vLLM never preempts a loading request
            self.admission = self.admission.succeed(self.admission.number + 1, bytes(16))
            self.later_since = None

    @invariant()
    def one_load_at_most(self) -> None:
        assert self.loads == (self.admission.phase is Phase.LOADING)
        if self.failures == 2:
            assert self.admission.phase is Phase.FAILED


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)

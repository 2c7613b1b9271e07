"""What one request may do with the cache: its admission as a state machine.

Pure: no engine, no socket, no clock (times are passed in). An admission is one life of a request
between "holds no KV" and "holds no KV again": a preempted request gets a new one, with a new
number, so an answer, a lease or a job of the old life can never be taken for the new one's.

::

    PROBED --ask--> ASKING --answer--> ANSWERED --allocated(ext>0)--> LOADING --> LOADED | FAILED
       |              | too late          | allocated(0)
       +--------------+----> NONE <-------+

A failed load may be followed by one more, of no more than what is still whole (``bound_tokens``).
Failures are counted for the request, over its admissions: after the second it never loads again,
so a failure cannot loop.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

failures_max = 2  # loads of one request that may fail
ANSWER_FRESH_S = 1.0  # asked again after this: it also renews the lease of a request that waits


class Phase(enum.IntEnum):
    """Where an admission stands."""

    PROBED = 1
    ASKING = 2
    ANSWERED = 3
    LOADING = 4
    LOADED = 5
    NONE = 6
    FAILED = 7


@dataclass(frozen=True, slots=True)
class Send:
    """Send an Ask first, after a probe when ``probe``; then decide again."""

    probe: bool


# What the engine is told: tokens to load, or None for "ask me later"; or what comes before.
Decision = int | None | Send


@dataclass(slots=True, eq=False)
class Admission:
    """One admission of one request. Token counts are prefixes from token 0.

    ``version`` is the namespace version it is stamped with; ``epoch`` the sidecar's that knows
    its first ``hashes`` (0: none does); ``former``: the one before, whose hashes its
    probe may leave out. ``hit_tokens`` is what the last answer leased when it is more than
    ``local_tokens``; ``stored_tokens`` how far the store is known to hold this prefix.
    ``failures``: loads of the request that failed; ``shorter_tokens``: what the last one left
    whole; ``bound_tokens``: no hit may be longer; ``steps_back``: it must be asked later once.
    """

    number: int
    version: bytes
    epoch: int = 0
    hashes: int = 0
    former: Admission | None = None
    phase: Phase = Phase.PROBED
    seq: int = 0
    local_tokens: int = 0
    hit_tokens: int = 0
    stored_tokens: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)
    job: int = 0
    first_ask_s: float | None = None
    answered_s: float = 0.0
    hint_tokens: int | None = None
    hint_s: float = 0.0
    failures: int = 0
    shorter_tokens: int = 0
    bound_tokens: int | None = None
    steps_back: bool = False

    @property
    def leased(self) -> bool:
        """Whether the sidecar may hold a lease of this admission."""
        if self.phase is Phase.ANSWERED:
            return self.hit_tokens > self.local_tokens
        return self.phase in (Phase.ASKING, Phase.LOADING)

    def ask(
        self, now_s: float, local_tokens: int, cap_tokens: int, epoch: int, limits: Limits
    ) -> Decision:
        """Decide what the engine is told that has ``local_tokens`` itself.

        ``cap_tokens`` is the last aligned boundary below the request's length and bounds every
        hit; ``epoch`` is the current sidecar's. Ends in NONE when the time to answer is over.
        """
        if self.phase >= Phase.LOADING or cap_tokens <= local_tokens:
            return 0
        if self.epoch not in (0, epoch):
            self.void()  # another sidecar: a new question, with its own time
            self.first_ask_s = None
        if self.phase is Phase.ANSWERED:
            fresh = now_s - self.answered_s <= ANSWER_FRESH_S
            if fresh and local_tokens == self.local_tokens:
                return max(0, min(self.hit_tokens, cap_tokens) - local_tokens)
            self.first_ask_s = None  # a new question, with its own time
            return Send(probe=False)
        if self.first_ask_s is not None and now_s - self.first_ask_s >= limits.probe_s_max:
            self.phase = Phase.NONE
            return 0
        if self.phase is Phase.ASKING and local_tokens == self.local_tokens:
            return None
        if self.phase is Phase.PROBED and self.hint_tokens is not None:
            fresh = now_s - self.hint_s <= limits.hint_fresh_s
            if fresh and self.hint_tokens <= local_tokens:
                return 0
        return Send(probe=self.epoch == 0)

    def probed(self, epoch: int, hashes: int) -> None:
        """The first ``hashes`` are with the sidecar of ``epoch``."""
        self.epoch, self.hashes = epoch, hashes

    def asked(self, now_s: float, seq: int, local_tokens: int) -> None:
        """Ask ``seq`` went out."""
        self.phase, self.seq, self.local_tokens = Phase.ASKING, seq, local_tokens
        if self.first_ask_s is None:
            self.first_ask_s = now_s

    def answered(self, now_s: float, seq: int, hit_tokens: int, sources: Mapping[str, int]) -> bool:
        """Take the answer to the ask that is out; False for a late one or another's."""
        if self.phase is not Phase.ASKING or seq != self.seq:
            return False
        self.phase, self.answered_s, self.first_ask_s = Phase.ANSWERED, now_s, None
        self.hit_tokens, self.sources = hit_tokens, sources
        self.stored_tokens = hit_tokens
        return True

    def hinted(self, now_s: float, hit_tokens: int, stored_tokens: int) -> None:
        """Take a hint: what the store held at ``now_s``, unleased, and so far on every node."""
        self.hint_tokens, self.hint_s = hit_tokens, now_s
        if self.phase < Phase.LOADING:
            self.stored_tokens = max(self.stored_tokens, stored_tokens)

    def missed(self, now_s: float) -> bool:
        """Whether the last hint answers the ask that is out: there is no more than the engine has.

        Should that ask still bring a lease, it falls with the next heartbeat, which does not name
        it.
        """
        hint = self.hint_tokens
        miss = hint is not None and hint <= self.local_tokens
        return miss and self.answered(now_s, self.seq, hint or 0, {})

    def void(self) -> None:
        """Forget what a sidecar said: it does not know this admission (any more).

        An ask that is out keeps its clock, so that this cannot prolong "later" for ever.
        """
        self.epoch, self.hint_tokens = 0, None
        self.hit_tokens = self.stored_tokens = 0
        if self.phase < Phase.LOADING:
            self.phase = Phase.PROBED

    def load(self, job: int, external_tokens: int) -> int | None:
        """Blocks were allocated for ``external_tokens``: return the total of the load.

        None when that was never promised; the phase is LOADING in both cases, because the
        engine now waits for a report.
        """
        promised = self.phase is Phase.ANSWERED
        self.phase, self.job = Phase.LOADING, job
        total = self.local_tokens + external_tokens
        return total if promised and total <= self.hit_tokens else None

    def loaded(self, ok: bool) -> bool:
        """The load has ended on every rank; False when none was under way."""
        if self.phase is not Phase.LOADING:
            return False
        self.phase = Phase.LOADED if ok else Phase.FAILED
        if not ok:
            self.failures += 1
            self.steps_back = True
            self.stored_tokens = 0  # what could not be read is saved anew
        return True

    def step_back(self) -> bool:
        """Whether the engine is to ask later: once after a failed load.

        vLLM has such a request first among those that hold blocks, though it holds none any more.
        Where it does not fit, nothing behind it would ever run; asked later, it goes behind them.
        """
        now, self.steps_back = self.steps_back, False
        return now

    @property
    def may_try_shorter(self) -> bool:
        """Whether the load failed, for the first time, and left something whole."""
        return (
            self.phase is Phase.FAILED
            and self.failures < failures_max
            and bool(self.shorter_tokens)
        )

    def decline(self) -> bool:
        """Blocks were allocated without ours; True when that settles an open question."""
        if self.phase >= Phase.LOADING:
            return False
        self.phase = Phase.NONE
        return True

    def succeed(self, number: int, version: bytes) -> Admission:
        """Return the next admission of the same request, which holds no KV again."""
        fresh = Admission(number, version, failures=self.failures)
        if self.may_try_shorter:
            fresh.bound_tokens = self.shorter_tokens
        elif self.phase is Phase.FAILED or self.failures >= failures_max:
            fresh.phase = Phase.FAILED
        return fresh


@dataclass(frozen=True, slots=True)
class Limits:
    """How long "later" may be said, and how long a hint of nothing is believed."""

    probe_s_max: float
    hint_fresh_s: float


class EngineRequest(Protocol):
    """What is used of vLLM's Request. ``block_hashes[k]`` covers tokens ``[0, (k + 1) * H)``."""

    request_id: str
    num_computed_tokens: int
    num_preemptions: int
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool
    shared_prefix_boundary: int
    trace_headers: Mapping[str, str] | None

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and the sampled tokens known so far."""


@dataclass(slots=True, eq=False)
class Tracked:
    """One request of the engine.

    ``saved_tokens``: saved so far (or known to be stored); ``due``: its entry in the queue of
    saves.py, 0 for none; ``ran``: a step computed some of it since it holds KV; ``prefill_tokens``:
    what it computes before it decodes; ``tail_tokens``: a state was saved whose attention above is
    still to be saved, 0 for none; ``groups``: the KV cache groups that its load writes.
    """

    request: EngineRequest
    admission: Admission
    preemptions: int
    saved_tokens: int = 0
    due: int = 0
    ran: bool = False
    prefill_tokens: int = 0
    tail_tokens: int = 0
    groups: tuple[int, ...] = ()

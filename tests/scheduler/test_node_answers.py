"""How the scheduler half agrees with further nodes, message by message, in vLLM's real Scheduler.

The own node's sidecar is scripted; what a deputy would hear on the further one the test says.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest
from kvferry_connector.meta import FerryMetadata, FerryWorkerMetadata, Heard, NodeState
from kvferry_connector.nodes import Nodes, spread
from kvferry_connector.wire import hot
from support.scheduler_harness import SchedulerUnderTest, loads_of, saves_of
from vllm.v1.request import RequestStatus

PROMPT = list(range(10, 210))
WHOLE = 192  # tokens of its whole blocks
M = TypeVar("M")


class FurtherNode:
    """The node of rank 1: its sidecar's part is spoken by the test."""

    def __init__(self, engine: SchedulerUnderTest) -> None:
        self._engine, self._epoch = engine, 0
        link, registration = engine.node.link(), engine.node.registration
        assert link is not None
        assert registration is not None
        self._rules = link.save_rules
        _, other = spread(registration, [[0], [1]])
        engine.half._lookup.nodes = Nodes([other], engine.half.stats.count)
        self.starts(20)

    def starts(self, epoch: int) -> None:
        """Its sidecar is there under this epoch; 0: it is away."""
        self._epoch = epoch
        state = NodeState(epoch, self._rules if epoch else ())
        self._engine.half.reported(FerryWorkerMetadata({}, {1: state}))

    def says(
        self, message: hot.Answer | hot.Hint | hot.NeedFull | hot.Error, epoch: int = 0
    ) -> None:
        heard = Heard(1, epoch or self._epoch, message)
        self._engine.half.reported(FerryWorkerMetadata({}, {}, [heard]))

    def live(self) -> tuple[int, ...]:
        """The leases that its sidecar was last told of."""
        metas = [output.kv_connector_metadata for output in self._engine.outputs]
        relays = [meta.relay for meta in metas if isinstance(meta, FerryMetadata) and meta.relay]
        (_, live), _ = relays[-1].beat
        return live

    def told(self, kind: type[M]) -> list[M]:
        """What its sidecar was told so far."""
        found: list[M] = []
        for output in self._engine.outputs:
            metadata = output.kv_connector_metadata
            assert isinstance(metadata, FerryMetadata)
            messages = metadata.relay.messages if metadata.relay is not None else ()
            found += [message for message, _ in messages if isinstance(message, kind)]
        return found


@pytest.fixture
def engine(tmp_path: Path) -> SchedulerUnderTest:
    """Its own node's store holds PROMPT, while it has nothing itself."""
    one = SchedulerUnderTest(tmp_path, probe_ms_max=60_000)
    one.warm_up(PROMPT)
    return one


@pytest.fixture
def further(engine: SchedulerUnderTest) -> FurtherNode:
    return FurtherNode(engine)


def asked(engine: SchedulerUnderTest, further: FurtherNode) -> hot.Ask:
    """Add PROMPT as "b" and step until the further node was asked; nothing is promised."""
    engine.add("b", PROMPT)
    engine.step(3)
    assert loads_of(engine.node) == []
    (ask,) = further.told(hot.Ask)
    (probe,) = further.told(hot.Probe)
    assert (probe.admission, ask.max_tokens) == (ask.admission, WHOLE)
    return ask


def test_all_are_asked_again_with_the_shortest_answer(
    engine: SchedulerUnderTest, further: FurtherNode
) -> None:
    ask = asked(engine, further)
    further.says(hot.Answer(ask.admission, ask.seq, 128, {}))
    engine.step(2)
    shorter = further.told(hot.Ask)[-1]
    assert (shorter.local_tokens, shorter.max_tokens) == (0, 128)
    further.says(hot.Answer(ask.admission, ask.seq, WHOLE, {}))  # to the question before
    engine.step(2)
    assert loads_of(engine.node) == []
    further.says(hot.Answer(ask.admission, shorter.seq, 128, {}))
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 128)]
    engine.assert_idle()


def test_what_one_node_has_alone_is_given_back(
    engine: SchedulerUnderTest, further: FurtherNode
) -> None:
    ask = asked(engine, further)
    further.says(hot.Answer(ask.admission, ask.seq, 0, {}))
    engine.run()
    assert loads_of(engine.node) == []
    for said in (further.told(hot.Ask)[-1], engine.node.sent(hot.Ask)[-1]):
        assert (said.admission, said.max_tokens) == (ask.admission, 0)
    saved = [span for name, *span in saves_of(engine.node) if name == "b"]
    assert (saved[0][0], saved[-1][1]) == (0, WHOLE), "the further node lacks it"
    engine.assert_idle()


def test_a_sidecar_that_started_anew_is_told_all_hashes_again(
    engine: SchedulerUnderTest, further: FurtherNode
) -> None:
    """And what the one before it said is not believed."""
    ask = asked(engine, further)
    further.starts(21)
    further.says(hot.Answer(ask.admission, ask.seq, WHOLE, {}), epoch=20)
    engine.step(2)
    assert loads_of(engine.node) == []
    assert [probe.start for probe in further.told(hot.Probe)] == [0, 0]
    further.says(hot.Answer(ask.admission, further.told(hot.Ask)[-1].seq, WHOLE, {}))
    engine.run()
    assert loads_of(engine.node) == [("b", 0, WHOLE)]
    engine.assert_idle()


def test_a_sidecar_that_does_not_know_an_admission_is_told(
    engine: SchedulerUnderTest, further: FurtherNode
) -> None:
    ask = asked(engine, further)
    further.says(hot.NeedFull(ask.admission))
    engine.step(2)
    assert len(further.told(hot.Probe)) == 2
    further.says(hot.Answer(ask.admission, further.told(hot.Ask)[-1].seq, WHOLE, {}))
    engine.run()
    assert loads_of(engine.node) == [("b", 0, WHOLE)]


def test_a_refused_question_is_a_miss_at_once(
    engine: SchedulerUnderTest, further: FurtherNode
) -> None:
    ask = asked(engine, further)
    further.says(hot.Error("leases-max", "", "", admission=ask.admission))
    engine.run()
    assert loads_of(engine.node) == []
    engine.assert_idle()


def test_a_hint_of_nothing_spares_the_question(
    engine: SchedulerUnderTest, further: FurtherNode
) -> None:
    engine.half._lookup._limits = engine.half._lookup._patient  # however slow the machine is
    engine.node.hints = True
    engine.add("b", PROMPT)
    (probe,) = engine.node.sent(hot.Probe)[-1:]
    further.says(hot.Hint(probe.admission, 0, probe.total))
    engine.run()
    assert further.told(hot.Ask) == []
    saved = [span for name, *span in saves_of(engine.node) if name == "b"]
    assert (saved[0][0], saved[-1][1]) == (0, WHOLE), "what the own node has is no reason to skip"
    engine.assert_idle()


def test_without_a_node_nothing_is_asked_loaded_or_saved(
    engine: SchedulerUnderTest, further: FurtherNode
) -> None:
    further.starts(0)
    before = saves_of(engine.node)
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == []
    assert saves_of(engine.node) == before
    further.starts(22)
    ask = asked_again(engine, further)
    further.says(hot.Answer(ask.admission, ask.seq, WHOLE, {}))
    engine.run()
    assert loads_of(engine.node) == [("c", 0, WHOLE)]
    engine.assert_idle()


def asked_again(engine: SchedulerUnderTest, further: FurtherNode) -> hot.Ask:
    engine.forget_local()
    engine.add("c", PROMPT)
    engine.step(2)
    return further.told(hot.Ask)[-1]


def test_an_abort_reaches_the_further_node(
    engine: SchedulerUnderTest, further: FurtherNode
) -> None:
    engine.node.load_steps = 5
    ask = asked(engine, further)
    further.says(hot.Answer(ask.admission, ask.seq, WHOLE, {}))
    engine.step(2)
    assert engine.requests["b"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert further.live() == (ask.admission,)
    engine.abort("b")
    engine.run()
    engine.step()
    assert further.live() == ()
    assert [one.job for one in further.told(hot.Cancel)] == [engine.node.jobs[-1].job]
    assert ask.admission in [n for one in further.told(hot.Release) for n in one.admissions]
    engine.assert_idle()

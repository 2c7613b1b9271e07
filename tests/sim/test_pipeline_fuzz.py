"""Well-formed messages with absurd contents: an answer or a refusal, never an exception."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_connector.wire.codec import encode_job
from kvferry_connector.wire.hot import (
    Ask,
    Cancel,
    HandOff,
    JobStatus,
    LoadJob,
    OutcomeAck,
    Probe,
    Release,
    SaveJob,
    Submit,
    TableSlice,
)
from kvferry_connector.wire.names import NO_VERSION
from kvferry_sidecar.limits import Limits
from support.pipeline_bed import BLOCK, Bed, make_engine

LIFE = b"L" * 16
number = st.one_of(
    st.integers(-2, 6), st.sampled_from([BLOCK, 2 * BLOCK, 4 * BLOCK, 1 << 31, -(1 << 63), 1 << 63])
)
small = st.integers(0, 3)
life = st.sampled_from([LIFE, b"", b"x" * 16])
version = st.sampled_from([NO_VERSION, b"", b"v" * 16])
frames = st.lists(st.sampled_from([b"", bytes(4), b"\1\0\0\0", bytes(32), bytes(64)]), max_size=2)
slices = st.lists(st.builds(TableSlice, number, number, number), max_size=2)
hand_offs = st.lists(st.builds(HandOff, number, number, number), max_size=1)
loads = st.builds(
    LoadJob, small, life, version, st.just("r"), small, number, number, number, slices
)
saves = st.builds(
    SaveJob,
    small,
    life,
    version,
    st.just("r"),
    small,
    number,
    number,
    number,
    number,
    st.sampled_from([32, 0, -1, 1 << 40]),
    slices,
    hand_offs,
)
messages = st.one_of(
    st.builds(
        Probe,
        st.just("r"),
        small,
        version,
        number,
        number,
        number,
        st.sampled_from([32, 0, -1]),
        st.sampled_from([b"", bytes(32)]),
    ),
    st.builds(Ask, small, number, number, number),
    st.builds(Release, st.lists(number, max_size=2)),
    st.builds(Submit, st.one_of(st.binary(max_size=9), st.builds(encode_job, loads | saves))),
    st.builds(Cancel, small),
    st.builds(JobStatus, number),
    st.builds(OutcomeAck, st.lists(number, max_size=2)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), messages, frames), max_size=25))
def test_absurd_messages_never_break_the_pipeline(script):
    bed, engine = Bed(Limits(outcomes_unacked_max=4)), make_engine(ranks=2)
    bed.stored(engine, 1, 3)
    bed.probe(engine, 1, 1, 3)
    bed.ask(engine, 1)
    for half, message, raw in script:
        bed.say([engine.scheduler, *engine.workers][half], message, raw)
        bed.pass_s(0.01)
        bed.run_copies()
    assert bed.pipeline.check() == []
    for _, message in bed.sent:
        msgspec.msgpack.encode(message)  # every answer can be sent
    for peer in (engine.scheduler, *engine.workers):
        bed.pipeline.on_bye(peer, bed.now_s)
    bed.run_copies()
    bed.pass_s(11)
    bed.assert_clean()

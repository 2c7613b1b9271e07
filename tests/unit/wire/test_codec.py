"""Round trips, bounds, refusals and the evolution rule of the wire."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvferry_connector.wire import attach, codec, hot, version
from support import wire_samples

BINARY = st.binary(max_size=300)


@pytest.mark.parametrize("message", wire_samples.FROM_HALF, ids=lambda m: type(m).__name__)
def test_half_messages_come_back_equal(message: hot.FromHalf) -> None:
    frames = codec.pack(message, [b"raw"], protocol=1, epoch=2, generation=3)
    assert codec.read_header(frames) == codec.Header(1, 1, 2, 3)
    assert codec.read_from_half(frames[1]) == message


@pytest.mark.parametrize("message", wire_samples.FROM_SIDECAR, ids=lambda m: type(m).__name__)
def test_sidecar_messages_come_back_equal(message: hot.FromSidecar) -> None:
    frames = codec.pack(message, [], protocol=1, epoch=2**64 - 1, generation=0)
    assert codec.read_header(frames).epoch == 2**64 - 1
    assert codec.read_from_sidecar(frames[1]) == message


@pytest.mark.parametrize("job", wire_samples.JOBS, ids=lambda m: type(m).__name__)
def test_jobs_come_back_equal(job: hot.Job) -> None:
    assert codec.read_job(codec.encode_job(job)) == job


def test_every_kind_has_a_sample() -> None:
    def kinds(union: object) -> set[object]:
        return set(union.__args__)  # type: ignore[attr-defined]  # a PEP 604 union has them

    assert {type(m) for m in wire_samples.FROM_HALF} == kinds(hot.FromHalf)
    assert {type(m) for m in wire_samples.FROM_SIDECAR} == kinds(hot.FromSidecar)
    assert {type(m) for m in wire_samples.JOBS} == kinds(hot.Job)
    assert {type(m) for m in wire_samples.ATTACH_FROM_PEER} == kinds(attach.FromPeer)
    assert {type(m) for m in wire_samples.ATTACH_TO_PEER} == kinds(attach.ToPeer)


def test_directions_do_not_mix() -> None:
    with pytest.raises(codec.WireError):
        codec.read_from_sidecar(codec.pack(hot.Cancel(1), [], protocol=1, epoch=1, generation=1)[1])


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([b""], "1 frames"),
        ([b""] * 5, "5 frames"),
        ([b"short", b""], "header of 5 bytes"),
        ([codec.HEADER.pack(b"NOPE", 1, 0, 1, 1), b""], "magic"),
        ([codec.HEADER.pack(codec.MAGIC, 1, 2, 1, 1), b"", b""], "announces 2"),
        (
            [codec.HEADER.pack(codec.MAGIC, 1, 0, 1, 1), bytes(codec.body_bytes_max + 1)],
            "body of",
        ),
    ],
)
def test_bad_outer_form_is_refused_by_name(frames: list[bytes], text: str) -> None:
    with pytest.raises(codec.WireError, match=text):
        codec.read_header(frames)


@given(st.lists(BINARY, max_size=5))
def test_random_frames_are_refused_or_read(frames: list[bytes]) -> None:
    try:
        codec.read_header(frames)
        codec.read_from_half(frames[1])
    except codec.WireError:
        return


@given(st.sampled_from(wire_samples.FROM_HALF), st.integers(0, 400), st.integers(0, 255))
def test_mutated_bodies_are_refused_or_read(message: hot.FromHalf, at: int, byte: int) -> None:
    body = bytearray(codec.pack(message, [], protocol=1, epoch=1, generation=1)[1])
    body[at % len(body)] = byte
    try:
        codec.read_from_half(bytes(body))
    except codec.WireError:
        return


def test_a_newer_peer_may_append_fields() -> None:
    body = msgspec.msgpack.encode(["c", 7, "a field of the future"])
    assert codec.read_from_half(body) == hot.Cancel(7)


def test_an_older_peer_may_lack_appended_fields() -> None:
    body = msgspec.msgpack.encode(["O", 7, 0, "done", "", 10, 0.5])
    outcome = codec.read_from_sidecar(body)
    assert isinstance(outcome, hot.Outcome)
    assert outcome.shorter_tokens == 0


def test_protocols_meet_at_the_highest_common_number() -> None:
    newest = version.PROTOCOL_MAX
    assert version.negotiate(1, newest + 5) == newest
    assert version.negotiate(newest + 1, newest + 5) is None


@pytest.mark.parametrize("message", wire_samples.ATTACH_FROM_PEER, ids=lambda m: type(m).__name__)
def test_attach_messages_come_back_from_any_cut(message: attach.FromPeer) -> None:
    data = attach.encode(message) * 2
    for size in (1, 3, len(data)):
        cutter = attach.Reassembler()
        bodies = [b for i in range(0, len(data), size) for b in cutter.feed(data[i : i + size])]
        assert [attach.read_from_peer(b) for b in bodies] == [message, message]


def test_attach_stream_has_a_bound() -> None:
    with pytest.raises(codec.WireError, match="over"):
        attach.Reassembler().feed(attach.LENGTH.pack(attach.attach_bytes_max + 1))


@given(BINARY)
def test_random_attach_bodies_are_refused_or_read(body: bytes) -> None:
    for read in (attach.read_from_peer, attach.read_to_peer):
        try:
            read(body)
        except codec.WireError:
            continue

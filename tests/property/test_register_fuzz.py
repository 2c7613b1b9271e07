"""Hostile registrations against a real sidecar: any geometry, any order, any number of them.

What is accepted lies inside the rank's memory; what is refused is refused by name, in bounded
time and size. Each test ends with ``intact`` (support/fuzzing.py).
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvferry_connector.wire import attach
from kvferry_connector.wire.attach import (
    Bye,
    Group,
    Heartbeat,
    Memory,
    Placement,
    Refused,
    Registered,
    Rotate,
    Shard,
)
from support import nonsense
from support.books import cpu_s
from support.fuzzing import Target, bounded, ended, gates, stream_to
from support.raw_half import KvMemory, RawHalf, RawStream, engine_registration
from support.waiting import wait_until

HUGE = 2**64 - 1


# --- registrations -------------------------------------------------------------------------------

placements = st.builds(
    Placement,
    group=st.just(0) | nonsense.numbers,
    layers=st.sampled_from((["layer.0"], ["layer.1"], ["layer.0", "layer.1"], [], ["other"])),
    buffer=st.just(0) | nonsense.numbers,
    offset=st.sampled_from((0, 64, 1024)) | nonsense.numbers,
    layer_stride=st.sampled_from((0, 1024, 65536)) | nonsense.numbers,
    block_stride=st.sampled_from((1024, 512, 2048)) | nonsense.numbers,
    page_bytes=st.sampled_from((1024, 512)) | nonsense.numbers,
    runs=st.sampled_from((1, 2)) | nonsense.numbers,
    run_bytes=st.sampled_from((0, 512)) | nonsense.numbers,
    run_stride=st.sampled_from((0, 512, 256)) | nonsense.numbers,
)
groups = st.builds(
    Group,
    group=st.just(0) | nonsense.numbers,
    kind=st.sampled_from(("full", "full", "swa", "")) | nonsense.texts,
    block_tokens=st.sampled_from((16, 32)) | nonsense.numbers,
    spec=st.dictionaries(nonsense.texts, nonsense.texts, max_size=2),
    layers=st.sampled_from((["layer.0", "layer.1"], ["layer.0"], [], ["layer.0", "layer.0"])),
    cacheable=st.booleans(),
    eagle=st.booleans(),
    detail=nonsense.texts,
)
registrations = st.fixed_dictionaries(
    {},
    optional={
        "serial": nonsense.numbers,
        "shard": st.builds(Shard, *([nonsense.numbers] * 6)),
        "identity": st.dictionaries(nonsense.texts, nonsense.texts, max_size=3),
        "num_blocks": st.sampled_from((64, 65, 32)) | nonsense.numbers,
        "layout": nonsense.texts,
        "groups": st.lists(groups, max_size=2),
        "placements": st.lists(placements, max_size=3),
        "hash_block_tokens": st.sampled_from((16, 8)) | nonsense.numbers,
    },
)


@pytest.mark.parametrize("examples", gates(200, 10_000))
def test_any_geometry(target: Target, memory: KvMemory, examples: int) -> None:
    """A geometry is refused, or every byte it can reach lies in the memory (jobs prove it)."""

    @bounded(examples)
    @given(registrations)
    def attack(changes: dict[str, Any]) -> None:
        half = RawHalf(target.run_dir, 0, engine_id="geometry", memory=memory)
        half.attach()
        half.stream.send(memory.registration(0, 1, **changes))
        if isinstance(half.stream.receive(), Registered):
            half.stream.send(Bye())
        assert ended(half.stream) == []
        half.close()

    attack()


def registered(target: Target, memory: KvMemory, **changes: Any) -> attach.ToPeer:
    """Register this and return the answer; the stream must end in either case."""
    half = RawHalf(target.run_dir, 0, engine_id=target.new_name(), memory=memory)
    half.attach()
    half.stream.send(memory.registration(0, 1, **changes))
    answer = half.stream.receive()
    assert answer is not None, "neither taken nor refused"
    half.stream.send(Bye())
    assert ended(half.stream) == []
    half.close()
    return answer


def test_overlap_overflow_and_counts_are_refused_by_name(target: Target, memory: KvMemory) -> None:
    (whole,) = memory.registration(0, 1).placements
    change = msgspec.structs.replace
    layers = [f"n{number}" for number in range(5_000)]
    cases: dict[str, dict[str, Any]] = {
        "layers on each other": {"placements": [change(whole, layer_stride=0)]},
        "layers half on each other": {"placements": [change(whole, layer_stride=65_024)]},
        "blocks on each other": {"placements": [change(whole, block_stride=1_023)]},
        "past the end": {"placements": [change(whole, offset=1)]},
        "overflow": {"placements": [change(whole, block_stride=2**62)]},
        "overflow of all": {
            "placements": [change(whole, offset=2**63 - 1, block_stride=2**63 - 1)]
        },
        "one block too many": {"num_blocks": memory.blocks + 1},
        "too many blocks": {"num_blocks": 2**31},
        "too many layers": {"groups": [Group(0, "full", 16, {}, layers)]},
        "too many groups": {"groups": [Group(n, "full", 16, {}, []) for n in range(65)]},
        "too many runs": {
            "placements": [change(whole, runs=40_000, run_bytes=1, page_bytes=40_000)]
        },
    }
    for what, changes in cases.items():
        answer = registered(target, memory, **changes)
        assert isinstance(answer, Refused), what
        assert answer.fields, what
        assert all(field.remedy for field in answer.fields), what


def test_the_largest_geometry_does_not_hold_up_the_loop(target: Target) -> None:
    """4,096 layers, each with its own stride: the overlap test must not be quadratic."""
    count, blocks, runs = 4_096, 2, 16
    names = [f"n{number}" for number in range(count)]
    span = runs * 2 + 2 * count
    places = [
        Placement(
            0, [name], 0, number * span * 2, 0, runs + number, runs, runs=runs, run_bytes=1,
            run_stride=1,
        )
        for number, name in enumerate(names)
    ]  # fmt: skip
    memory = KvMemory(blocks=blocks, page_bytes=count * span, layers=1)
    before_s = cpu_s(target.pid)
    answer = registered(target, memory, groups=[Group(0, "full", 16, {}, names)], placements=places)
    assert isinstance(answer, Registered), answer
    used_s = cpu_s(target.pid) - before_s
    assert used_s < 10.0, f"it took {used_s:.1f} s of processor time"
    memory.close()


def test_a_refusal_of_everything_still_fits_a_message(target: Target, memory: KvMemory) -> None:
    """A refusal quotes what it refuses; what was long is cut, and the answer comes."""
    names = ["n" * 900 + str(number) for number in range(4_000)]
    answer = registered(target, memory, groups=[Group(0, "full", 16, {}, names)], placements=[])
    assert isinstance(answer, Refused)
    assert answer.fields[0].field == "groups[0].layers"
    for changes in ({"role": "\0" * 3_000_000}, {"memories": [Memory(0, 1, "\0" * 3_000_000)]}):
        half = RawHalf(target.run_dir, 0, engine_id=target.new_name(), memory=memory)
        pidfd = os.pidfd_open(os.getpid())
        half.stream.send(half.hello(**changes), [pidfd, memory.fence_fd, memory.fd])
        os.close(pidfd)
        assert isinstance(half.stream.receive(), Refused), "answered, not hung up on"
        assert ended(half.stream) == []
        half.close()


def test_a_refusal_of_very_many_ranks(target: Target, memory: KvMemory) -> None:
    worker = RawHalf(target.run_dir, 5, engine_id="ranks", memory=memory)
    worker.attach()
    scheduler = RawHalf(target.run_dir, engine_id="ranks")
    scheduler.attach()
    ranks = range(10**6, 10**6 + 800_000)
    scheduler.stream.send(engine_registration(ranks, os.urandom(16)))
    assert isinstance(scheduler.stream.receive(), Refused)
    assert ended(scheduler.stream) == []
    scheduler.close()
    worker.leave()


def test_any_order_of_messages(target: Target, memory: KvMemory) -> None:
    """Registered or not, everything out of turn is refused and ends that stream only."""
    life = os.urandom(16)
    first: list[attach.FromPeer] = [
        Heartbeat(1, 0, []), Bye(), Rotate(bytes(16)), memory.registration(0, 1),
        engine_registration([0], life),
    ]  # fmt: skip
    for message in first:
        with stream_to(target) as stream:
            stream.send(message)
            assert stream.expect(Refused).code == "order"
            assert ended(stream) == []
    wrong: list[attach.FromPeer] = [
        Rotate(bytes(16)), Rotate(b""), memory.registration(0, 1),
        engine_registration([0], b"short"), engine_registration([], life),
        engine_registration([-1, -1], life), engine_registration([0], life, alignment_tokens=-1),
    ]  # fmt: skip
    for message in wrong:
        half = RawHalf(target.run_dir, engine_id=target.new_name())
        half.attach()
        half.stream.send(message)
        assert isinstance(half.stream.receive(), Refused), message
        assert ended(half.stream) == []
        half.close()


def test_very_many_live_leases_and_versions(target: Target) -> None:
    half = RawHalf(target.run_dir, engine_id=target.new_name())
    half.attach()
    half.register(engine_registration([0], os.urandom(16)))
    half.beat(2**64 - 1, [*range(200_000), HUGE, -(2**63)])
    for _ in range(300):
        half.stream.send(Rotate(os.urandom(16)))
        half.stream.expect(Registered)
    half.leave()


@pytest.mark.parametrize("rounds", gates(300, 10_000))
def test_attach_churn_keeps_nothing(target: Target, memory: KvMemory, rounds: int) -> None:
    """One process attaching again and again: as Bye, by hanging up, and on top of itself."""
    name = target.new_name()
    for number in range(rounds):
        half = RawHalf(target.run_dir, 0, engine_id=name, memory=memory)
        half.attach()
        half.register(memory.registration(0, 1))
        if number % 3 == 0:
            half.leave()
        else:
            half.close()
    last = RawHalf(target.run_dir, 0, engine_id=name, memory=memory)
    last.attach()
    last.leave()


def test_more_streams_than_allowed(target: Target) -> None:
    bound = 256
    streams = [RawStream(target.run_dir) for _ in range(bound + 8)]
    wait_until(
        lambda: len([stream for stream in streams if stream.readable()]) >= 8, "some are refused"
    )
    refused = [stream for stream in streams if stream.readable()]
    assert refused[0].expect(Refused).code == "connections-max"
    for stream in streams:
        stream.close()


def test_more_sessions_than_allowed(target: Target) -> None:
    halves = [RawHalf(target.run_dir, engine_id=target.new_name()) for _ in range(64)]
    for half in halves[:63]:
        half.attach()
    pidfd = os.pidfd_open(os.getpid())
    halves[63].stream.send(halves[63].hello(), [pidfd])
    os.close(pidfd)
    assert halves[63].stream.expect(Refused).code == "sessions-max"
    halves[63].close()
    for half in halves[:63]:
        half.leave()

"""Hostile attach streams against a real sidecar: it refuses or closes, and serves on.

Whoever connects here is of the right uid and may still send any bytes, any descriptors, any
memory and any geometry. Each test ends with ``intact`` (support/fuzzing.py).
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvferry_connector.wire import attach
from kvferry_connector.wire.attach import (
    Bye,
    Memory,
    Refused,
    Welcome,
)
from kvferry_connector.wire.codec import id_chars_max
from kvferry_connector.wire.names import FENCE_PAGE_BYTES
from support import nonsense
from support.books import cpu_s
from support.fuzzing import Target, bounded, ended, gates, stream_to
from support.memory import sealed_memfd
from support.raw_half import KvMemory, RawHalf
from support.waiting import wait_until

HUGE = 2**64 - 1


# --- bytes -------------------------------------------------------------------------------------

bodies = st.one_of(
    st.binary(max_size=100),
    nonsense.values.map(msgspec.msgpack.encode),
    st.dictionaries(
        st.sampled_from(("type", "rank", "role", "live", "ranks", "seq", "version", "pid")),
        nonsense.values | st.sampled_from(("hello", "engine", "rank", "beat", "bye", "status?")),
    ).map(msgspec.msgpack.encode),
)
chunks = st.one_of(
    st.binary(max_size=64),
    bodies.map(lambda body: attach.LENGTH.pack(len(body)) + body),
    bodies.map(lambda body: attach.LENGTH.pack(len(body) + 7) + body),
    st.sampled_from((0, 1, attach.attach_bytes_max, attach.attach_bytes_max + 1, 2**32 - 1)).map(
        attach.LENGTH.pack
    ),
)


@pytest.mark.parametrize("examples", gates(150, 5_000))
def test_any_bytes_and_descriptors(target: Target, examples: int) -> None:
    @bounded(examples)
    @given(st.lists(st.tuples(chunks, st.integers(0, 3)), min_size=1, max_size=5), st.booleans())
    def attack(parts: list[tuple[bytes, int]], wait: bool) -> None:
        with stream_to(target) as stream, Path("/dev/null").open("rb") as null:
            for data, fds in parts:
                if data:
                    stream.send_bytes(data, [null.fileno()] * fds)
            if wait:  # half a message stays open; ours ends with our end
                with suppress(OSError):  # it may have been closed by the sidecar already
                    stream.socket.shutdown(socket.SHUT_WR)
                ended(stream)

    attack()


def test_half_a_message_is_given_up(target: Target) -> None:
    with stream_to(target) as half, stream_to(target) as silent:
        half.send_bytes(attach.LENGTH.pack(1000) + b"x" * 10)
        assert ended(half) == ended(silent) == []


def test_a_reader_that_never_reads_is_closed(target: Target) -> None:
    """Status answers that nobody takes wait up to a bound; then the stream is closed.

    One read brings thousands of questions: they are answered alike, or the loop stands still.
    """
    query, before_s = attach.encode(attach.StatusQuery()), cpu_s(target.pid)
    with stream_to(target) as stream:
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        before = target.status()["loop"]["attach_refused"].get("attach_out_bytes_max", 0)
        for _ in range(40):
            stream.send_bytes(query * 200)
        wait_until(
            lambda: (
                target.status()["loop"]["attach_refused"].get("attach_out_bytes_max", 0) > before
            ),
            "the stream was given up",
        )
    assert cpu_s(target.pid) - before_s < 1


# --- who and with what ---------------------------------------------------------------------------


def test_wrong_descriptors_are_refused(target: Target, memory: KvMemory) -> None:
    pidfd, other = os.pidfd_open(os.getpid()), os.pidfd_open(target.pid)
    unsealed = os.memfd_create("kvferry-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, memory.total_bytes)
    frozen = sealed_memfd(memory.total_bytes, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    short = sealed_memfd(memory.total_bytes - 1)
    (pipe, pipe_end), plain = os.pipe(), tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    plain.truncate(memory.total_bytes)
    fence, kv = memory.fence_fd, memory.fd
    cases = {
        "no descriptor": [],
        "no memory": [pidfd, fence],
        "one too many": [pidfd, fence, kv, kv],
        "another's pidfd": [other, fence, kv],
        "no pidfd": [kv, fence, kv],
        "fence and memory swapped": [pidfd, kv, fence],
        "a pipe": [pidfd, fence, pipe],
        "a pidfd as memory": [pidfd, fence, pidfd],
        "a file": [pidfd, fence, plain.fileno()],
        "could shrink": [pidfd, fence, unsealed],
        "cannot be written": [pidfd, fence, frozen],
        "smaller than announced": [pidfd, fence, short],
        "very many": [pidfd] + [kv] * 100,
        "as many as go": [pidfd] + [kv] * 250,
    }
    half = RawHalf(target.run_dir, 0, engine_id=target.new_name(), memory=memory)
    for name, fds in cases.items():
        with stream_to(target) as stream:
            stream.send(half.hello(), fds)
            assert isinstance(stream.receive(), Refused), name
            assert ended(stream) == [], name
    half.close()
    plain.close()
    for fd in (pidfd, other, unsealed, frozen, short, pipe, pipe_end):
        os.close(fd)


def test_no_memory_that_was_taken_can_shrink(target: Target, memory: KvMemory) -> None:
    """What could pull pages away under a copy (SIGBUS) is impossible, or harmless: a hole."""
    half = RawHalf(target.run_dir, 0, engine_id=target.new_name(), memory=memory)
    half.attach()
    half.register(memory.registration(0, 1))
    for fd in (memory.fd, memory.fence_fd):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    half.leave()


def test_absurd_sizes_are_refused_or_mapped_without_touching(target: Target) -> None:
    """A sparse memfd may be as large as address space; only what copies touch takes memory."""
    pidfd, fence = os.pidfd_open(os.getpid()), sealed_memfd(FENCE_PAGE_BYTES)
    sparse = sealed_memfd(1 << 42)
    for announced in (0, -1, 1, 1 << 40, 1 << 42, (1 << 42) + 1, 2**63 - 1, HUGE):
        half = RawHalf(target.run_dir, 0, engine_id=target.new_name())
        with target.growth_below(16 << 20):
            hello = half.hello(fence=True, memories=[Memory(0, announced)])
            half.stream.send(hello, [pidfd, fence, sparse])
            answer = half.stream.receive()
        taken = 1 <= announced <= 1 << 42
        assert isinstance(answer, Welcome if taken else Refused), (announced, answer)
        half.close()
    for fd in (pidfd, fence, sparse):
        os.close(fd)


@pytest.mark.parametrize("examples", gates(150, 5_000))
def test_any_hello(target: Target, memory: KvMemory, examples: int) -> None:
    half = RawHalf(target.run_dir, 0, engine_id=target.new_name(), memory=memory)
    pidfd = os.pidfd_open(os.getpid())
    changes = {
        "protocol_min": nonsense.numbers,
        "protocol_max": nonsense.numbers,
        "role": st.sampled_from(("worker", "scheduler")) | nonsense.texts,
        "engine_id": nonsense.texts,
        "instance_id": nonsense.texts,
        "rank": nonsense.numbers,
        "pid": nonsense.numbers,
        "fence": st.booleans(),
        "software": nonsense.texts,
        "memories": st.lists(
            st.builds(Memory, nonsense.numbers, nonsense.numbers, nonsense.texts), max_size=3
        ),
    }

    @bounded(examples)
    @given(st.fixed_dictionaries({}, optional=changes), st.integers(1, 4))
    def attack(changed: dict[str, Any], fds: int) -> None:
        with stream_to(target) as stream:
            offered = [pidfd, memory.fence_fd, memory.fd, memory.fd][:fds]
            stream.send(half.hello(**changed), offered)
            if isinstance(stream.receive(), Welcome):
                stream.send(Bye())
            ended(stream)

    attack()
    half.close()
    os.close(pidfd)


@pytest.mark.parametrize("chars", [id_chars_max, id_chars_max + 1])
def test_ids_at_their_bound(target: Target, chars: int) -> None:
    half = RawHalf(target.run_dir, engine_id="e" * chars, instance_id="i" * id_chars_max)
    if chars <= id_chars_max:
        half.attach()
        assert len(target.status()["sessions"]) == 2
        half.leave()
        return
    pidfd = os.pidfd_open(os.getpid())
    half.stream.send(half.hello(), [pidfd])
    os.close(pidfd)
    assert half.stream.expect(Refused).code == "engine_id"
    half.close()

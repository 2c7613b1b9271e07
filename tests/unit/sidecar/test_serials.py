"""Serials of a rank's registration: what may change with one, and what becomes of the former."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from kvferry_connector.wire.attach import Bye, Memory, Registered, ToPeer, Welcome
from kvferry_native import Layout, Mapping
from support.memory import mapped_files, sealed_memfd
from support.node import HalfClient, Node
from support.node_messages import rank_registration
from support.sessions import close_all, only_session, refused_fields, registered


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as made:
        yield made
        assert not made.errors, made.errors


def say_hello_with(half: HalfClient, fds: list[int]) -> ToPeer:
    half.send(half.hello(memories=[Memory(0, 8192)]), [os.pidfd_open(os.getpid()), *fds])
    return half.receive()


def test_serials(node: Node) -> None:
    fence, memory, other = sealed_memfd(4096), sealed_memfd(8192), sealed_memfd(8192)
    halves = []

    def attach_with(fd: int, serial: int, **changes: object) -> ToPeer:
        half = node.half(0)
        halves.append(half)
        assert isinstance(say_hello_with(half, [fence, fd]), Welcome)
        return registered(half, rank_registration(0, serial=serial, **changes))

    assert isinstance(attach_with(memory, 2), Registered)
    peer = only_session(node).workers[0]
    mapping, geometry = peer.memories[0], peer.geometry
    # The same again: nothing is mapped anew, nothing validated anew.
    assert isinstance(attach_with(memory, 2), Registered)
    assert peer.memories[0] is mapping
    assert peer.geometry is geometry
    # An equal serial with other memory, or another description, contradicts itself.
    assert refused_fields(attach_with(other, 2)).keys() == {"memories"}
    assert refused_fields(attach_with(memory, 2, num_blocks=9)).keys() == {"num_blocks"}
    # A higher one may bring other memory, but not another geometry.
    assert isinstance(attach_with(other, 3), Registered)
    assert peer.memories[0] is not mapping
    assert peer.geometry is not None
    assert peer.geometry.serial == 3
    fields = refused_fields(attach_with(other, 4, identity={"model": "other", "hash_seed": "0"}))
    assert (fields["model"].theirs, fields["model"].ours) == ("other", "tiny")
    # It never falls.
    assert refused_fields(attach_with(other, 2)).keys() == {"serial"}
    assert only_session(node).workers[0] is peer
    assert peer.geometry.serial == 3
    close_all(halves)
    for fd in (fence, memory, other):
        os.close(fd)


def test_what_a_higher_serial_replaces_is_unmapped(node: Node) -> None:
    """Also when the half ends later, and not while a copy's layout still uses it."""
    before = len(mapped_files())
    fence, *memories = sealed_memfd(4096), *(sealed_memfd(8192) for _ in range(3))
    halves = []
    for serial, memory in enumerate(memories, 1):
        half = node.half(0)
        halves.append(half)
        assert isinstance(say_hello_with(half, [fence, memory]), Welcome)
        if serial == 3:
            former, one = only_session(node).workers[0].memories[0], np.array([4096])
            assert isinstance(former, Mapping)
            used = Layout(former, np.array([0]), one, one, 1)
            del former
        assert isinstance(registered(half, rank_registration(0, serial=serial)), Registered)
        assert len(mapped_files()) == before + 2 + (serial == 3), "a fence, a memory, what is used"
    del used
    assert len(mapped_files()) == before + 2
    halves[-1].send(Bye())
    node.pump(lambda: not node.registry.sessions and not node.registry.leaving, "all is unmapped")
    assert len(mapped_files()) == before
    close_all(halves)
    for fd in (fence, *memories):
        os.close(fd)

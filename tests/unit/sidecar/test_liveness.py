"""Proof of death: only the POLLIN bit of a pidfd, once, and no descriptor stays."""

from __future__ import annotations

import os
import subprocess
import time

from kvferry_sidecar.loop import HANG_UP, Loop
from kvferry_sidecar.sessions.identity import proven_dead
from kvferry_sidecar.sessions.liveness import Liveness
from kvferry_sidecar.sessions.model import Peer, Session, SessionKey
from support.memory import open_descriptors


def make_peer() -> Peer:
    return Peer(Session(SessionKey("e", "i")), "worker", 0, 1, b"K", 1, 1, 1)


def raise_it(error: BaseException, what: str) -> None:
    raise error


def test_death_is_told_once_after_the_last_thread_ended() -> None:
    loop = Loop(raise_it)
    dead: list[Peer] = []
    liveness = Liveness(loop, lambda peer, now_s: dead.append(peer))
    child = subprocess.Popen(["sleep", "100"])
    before = open_descriptors()
    peer = make_peer()
    liveness.adopt(peer, os.pidfd_open(child.pid))
    loop.turn(0.01)
    assert (dead, liveness.is_dead(peer), liveness.watches(peer)) == ([], False, True)
    child.kill()
    end = time.monotonic() + 90
    while not dead:
        assert time.monotonic() < end
        loop.turn(0.01)
    loop.turn(0.0)
    assert dead == [peer]
    assert (liveness.is_dead(peer), liveness.watches(peer)) == (True, False)
    assert open_descriptors().keys() == before.keys()
    child.wait()
    loop.close()


def test_a_hang_up_without_the_bit_is_no_proof() -> None:
    loop = Loop(raise_it)
    dead: list[Peer] = []
    liveness = Liveness(loop, lambda peer, now_s: dead.append(peer))
    peer = make_peer()
    liveness.adopt(peer, os.pidfd_open(os.getpid()))
    liveness._ready(peer, HANG_UP, 0.0)
    assert dead == []
    assert liveness.watches(peer)
    liveness.close()
    loop.close()


def test_a_hang_up_alone_proves_nothing_when_asked_either() -> None:
    hung_up, other = os.pipe()
    os.close(other)  # POLLHUP, and nothing to read
    assert not proven_dead(hung_up)
    os.close(hung_up)


def test_forgetting_closes_the_descriptor() -> None:
    loop = Loop(raise_it)
    liveness = Liveness(loop, lambda peer, now_s: None)
    before = open_descriptors()
    peer = make_peer()
    liveness.adopt(peer, os.pidfd_open(os.getpid()))
    liveness.forget(peer)
    liveness.forget(peer)
    assert open_descriptors().keys() == before.keys()
    loop.close()

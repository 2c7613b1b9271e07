"""Halves that attach and register, step by step."""

from __future__ import annotations

from kvferry_connector.wire import attach
from kvferry_connector.wire.attach import FieldRefusal, Ready, Refused, ToPeer, Welcome
from kvferry_sidecar.sessions.model import Session
from support.node import HalfClient, Node
from support.node_messages import engine_registration, rank_registration


def attached(node: Node, rank: int = -1, engine: str = "engine") -> tuple[HalfClient, Welcome]:
    """Return a half that was welcomed."""
    half = node.half(rank, engine)
    welcome = half.say_hello()
    assert isinstance(welcome, Welcome), welcome
    return half, welcome


def registered(half: HalfClient, message: attach.FromPeer) -> ToPeer:
    """Send a registration (or another request) and return the answer."""
    half.send(message)
    return half.receive()


def only_session(node: Node) -> Session:
    """Return the one session there is."""
    (session,) = node.registry.sessions
    return session


def refused_fields(answer: ToPeer) -> dict[str, FieldRefusal]:
    """Return the fields of a refusal by name."""
    assert isinstance(answer, Refused), answer
    return {field.field: field for field in answer.fields}


def ready_session(node: Node, ranks: int = 2) -> list[HalfClient]:
    """Return the halves of a session that is ready, the scheduler half first."""
    halves = [attached(node, rank)[0] for rank in range(-1, ranks)]
    registered(halves[0], engine_registration(range(ranks)))
    for rank in range(ranks):
        registered(halves[rank + 1], rank_registration(rank))
    for half in halves:
        assert isinstance(half.receive(), Ready)
    return halves


def close_all(halves: list[HalfClient]) -> None:
    """Close these halves."""
    for half in halves:
        half.close()

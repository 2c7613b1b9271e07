"""The scheduler half's deputy on a further node of an engine (nodes.py says what for).

It lives in a worker half, in the rank's own process, and is a scheduler half towards the node's
sidecar: the same registration and life, but for the ranks of this node. Sessions, leases, staging
and recovery of the sidecar are as ever. The hook thread of the worker owns it.
"""

from __future__ import annotations

from dataclasses import replace

from kvferry_connector.client import Client
from kvferry_connector.config import FerryConfig
from kvferry_connector.half import Half, refusal_text
from kvferry_connector.link import Link
from kvferry_connector.meta import Heard, NodeState, Relay
from kvferry_connector.wire import hot
from kvferry_connector.wire.attach import RegisterEngine

_FOR_LOOKUPS = (hot.Hint, hot.Answer, hot.NeedFull, hot.Error)


class Deputy:
    """Says to this node's sidecar what is relayed, and collects what it answers."""

    def __init__(self, config: FerryConfig, half: Half, engine: RegisterEngine) -> None:
        self._rank = half.rank
        self._version = engine.version
        scheduler = replace(half, role="scheduler", rank=-1, fence_fd=None)
        self._client = Client(config, scheduler, engine)
        self._client.start()
        self._said: NodeState | None = None
        self._heard: list[Heard] = []

    def obey(self, relay: Relay) -> None:
        """Take a step's relay. What cannot be sent is lost: its question runs out of time."""
        engine = relay.engines.get(self._rank)
        if engine is not None and engine.version != self._version:
            self._version = engine.version
            self._client.rotate(engine.version)
        self._client.set_live(*relay.beat[0])
        self._client.set_pace(relay.beat[1])
        link = self._client.link()
        if link is not None:
            for message, raw in relay.messages:
                self._client.send(link, message, raw)

    def listen(self) -> None:
        """Take in what the sidecar said since the last call."""
        link = self._client.link()
        if link is not None:
            self._heard += [
                Heard(self._rank, link.epoch, message)
                for message, _ in self._client.receive(link)
                if isinstance(message, _FOR_LOOKUPS) and message.admission
            ]

    def take(self) -> tuple[dict[int, NodeState], list[Heard]]:
        """Return the node's state, where it is news, and what was heard since the last call."""
        state = self._state(self._client.link())
        news = {} if state == self._said else {self._rank: state}
        self._said = state
        heard, self._heard = self._heard, []
        return news, heard

    def _state(self, link: Link | None) -> NodeState:
        refused = self._client.refusal
        if refused is not None:
            return NodeState(0, (), refusal_text(refused))
        if link is None or not link.ready or self._client.silent():
            return NodeState(0)
        return NodeState(link.epoch, link.save_rules)

    def close(self) -> None:
        """Leave the sidecar."""
        self._client.close()

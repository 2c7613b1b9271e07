"""An engine whose ranks live on several nodes: what the scheduler half knows of the further ones.

It talks to the sidecar of its own node only. On each further node the rank with the lowest number
is its deputy (deputy.py): a scheduler half towards that node's sidecar, which says there what is
said here and hands back what is answered. Both ways go with what vLLM carries between the halves
in every step anyway; sidecars of different nodes never talk to each other. A hit is what the
sidecars of all nodes have leased, so no load starts that a node could not serve.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from kvferry_connector.jobs import JobOrder
from kvferry_connector.log import logger
from kvferry_connector.meta import Beat, FerryHandshake, NodeState, Relay
from kvferry_connector.wire import hot
from kvferry_connector.wire.attach import RegisterEngine

HERE = -1  # the scheduler half's own node, among deputies' ranks
relayed_max = 4096  # messages that one step carries
answer_steps_min = 4  # an answer takes a step, two with batches in flight, and may be asked again
settle_s_max = 5.0  # how long an engine without requests is kept stepping for the deputies
_AWAY = NodeState(0)


def by_node(shakes: Iterable[FerryHandshake], here: FerryHandshake) -> list[list[int]]:
    """Return the ranks of each node, those beside ``here`` (possibly none) first."""
    nodes: dict[FerryHandshake, list[int]] = {replace(here, rank=HERE): []}
    for shake in sorted(shakes, key=lambda shake: shake.rank):
        nodes.setdefault(replace(shake, rank=HERE), []).append(shake.rank)
    return list(nodes.values())


def spread(engine: RegisterEngine, nodes: Sequence[Sequence[int]]) -> list[RegisterEngine]:
    """Return the engine's registration at each node, this one's first: it alone hears events."""
    return [
        msgspec.structs.replace(
            engine, ranks=list(ranks), nodes=len(nodes), kv_events=engine.kv_events and not number
        )
        for number, ranks in enumerate(nodes)
    ]


@dataclass(slots=True)
class _Gathered:
    """What the nodes said of one admission: hints, and answers to ask ``seq``, by deputy."""

    first_step: int = 0
    seq: int = 0
    hints: dict[int, int] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)
    sources: Mapping[str, int] = field(default_factory=dict)  # as this node's sidecar names them


class Nodes:
    """The further nodes of one engine, each with its registration; its first rank is the deputy."""

    def __init__(self, engines: Iterable[RegisterEngine], count: Callable[[str], None]) -> None:
        self._engines, self._count = {engine.ranks[0]: engine for engine in engines}, count
        self._untold = dict(self._engines)
        self._messages: list[tuple[hot.FromHalf, tuple[bytes, ...]]] = []
        self._beat: Beat = ((0, ()), 0)
        self._states = dict.fromkeys(self._engines, _AWAY)
        self._unmet = set(self._engines)
        self._gathered: dict[int, _Gathered] = {}
        self._step = 0
        self._settle_by_s = time.monotonic() + settle_s_max
        self._mismatch = False
        self._epochs: dict[int, int] = {}  # of the sidecar beside a rank

    # --- towards the deputies ----------------------------------------------------------------

    def relay(self, message: hot.FromHalf, raw: tuple[bytes, ...] = ()) -> bool:
        """Have every deputy say this to its sidecar; False (counted) when a step has too much."""
        if len(self._messages) >= relayed_max:
            self._count("relayed_max")
            return False
        self._messages.append((message, raw))
        return True

    def rotate(self, version: bytes) -> None:
        """Have every node's session under another namespace version."""
        self._engines = {
            rank: msgspec.structs.replace(engine, version=version)
            for rank, engine in self._engines.items()
        }
        self._untold = dict(self._engines)

    def take(self, beat: Beat) -> Relay | None:
        """Return what this step carries to the deputies, whose heartbeats are to say ``beat``."""
        self._step += 1
        if not self._untold and not self._messages and beat == self._beat:
            return None
        relay = Relay(self._untold, tuple(self._messages), beat)
        self._untold, self._messages, self._beat = {}, [], beat
        return relay

    def address(self, orders: Iterable[JobOrder]) -> list[JobOrder]:
        """Return jobs as they go out: with the epochs of the further sidecars, unless to fail."""
        epochs = dict(self._epochs)
        return [one._replace(further=epochs) if one.epoch else one for one in orders]

    def pending(self) -> bool:
        """Whether the engine should step although it has no requests: nodes are to be told, or met.

        Deputies that have not met their sidecar by ``settle_s_max`` are not waited for.
        """
        if self._untold or self._messages:
            return True
        return bool(self._unmet) and time.monotonic() <= self._settle_by_s

    # --- from the deputies -------------------------------------------------------------------

    def note(self, rank: int, state: NodeState) -> bool:
        """Take what a deputy says of its sidecar; True when that is another one, or none."""
        before, self._states[rank] = self._states[rank], state
        if state.trouble and state.trouble != before.trouble:
            logger.error("the node of rank %d is not served: %s", rank, state.trouble)
        if state.epoch or state.trouble:
            self._unmet.discard(rank)
        if state.epoch:
            self._epochs |= dict.fromkeys(self._engines[rank].ranks, state.epoch)
        return state.epoch != before.epoch

    def is_current(self, rank: int, epoch: int) -> bool:
        """Whether this is the sidecar of a deputy's node that may be asked now."""
        return self._states[rank].epoch == epoch

    def ready(self, save_rules: tuple[str, ...]) -> bool:
        """Whether every node may be asked, and saves what this one saves."""
        states = self._states.values()
        if not all(state.epoch for state in states):
            return False
        alike = all(state.save_rules == save_rules for state in states)
        if not alike and not self._mismatch:
            rules = {rank: state.save_rules for rank, state in self._states.items()}
            logger.error(
                "nodes save different things (%s, here %s): the cache stays off. Serve all nodes "
                "with the same version and settings of kvferry", rules, save_rules,
            )  # fmt: skip
        self._mismatch = not alike
        return alike

    # --- what all nodes say of an admission --------------------------------------------------

    def asked(self, number: int, seq: int, *, anew: bool) -> None:
        """Ask ``seq`` goes to all nodes; ``anew``: it begins a question with its own time."""
        gathered = self._gathered.setdefault(number, _Gathered())
        gathered.seq, gathered.hits = seq, {}
        if anew:
            gathered.first_step = self._step

    def early(self, number: int) -> bool:
        """Whether answers could not have come yet, however long the steps take."""
        gathered = self._gathered.get(number)
        return gathered is not None and self._step - gathered.first_step < answer_steps_min

    def hinted(self, number: int, node: int, tokens: int) -> tuple[int, int]:
        """Take a node's hint; returns the least hint so far, and what all nodes have (or 0)."""
        hints = self._gathered.setdefault(number, _Gathered()).hints
        hints[node] = tokens
        least = min(hints.values())
        return least, least if len(hints) > len(self._engines) else 0

    def answered(
        self, number: int, node: int, answer: hot.Answer, hit_tokens: int
    ) -> tuple[list[int], Mapping[str, int]] | None:
        """Take a node's answer; returns all hits and this node's sources with the last of them."""
        gathered = self._gathered.get(number)
        if gathered is None or gathered.seq != answer.seq:
            return None
        gathered.hits[node] = hit_tokens
        if node == HERE:
            gathered.sources = answer.sources
        if len(gathered.hits) <= len(self._engines):
            return None
        return list(gathered.hits.values()), gathered.sources

    def forget(self, number: int) -> None:
        """Nothing is open about this admission any more."""
        self._gathered.pop(number, None)

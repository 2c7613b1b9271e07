"""What engines that publish KV events are told: which objects their saves stored, and which left.

An engine is told of its own saves only, once they are committed, and of the same objects when
they leave the pool, whatever for. Nothing rests on these messages: a lost one leaves a router
with an older view, and what it sends here is at worst a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvferry_connector.wire.hot import FromSidecar, Removed, Stored
from kvferry_native import KEY_BYTES

from kvferry_sidecar.sessions.admissions import Keys
from kvferry_sidecar.sessions.model import Peer

_hashes_max = 1024  # in one message

Names = dict[int, bytes]  # of a group's objects: end token -> prefix hash


class Announcer:
    """Owned by the control loop. Keeps the names of announced objects, the oldest are withdrawn."""

    def __init__(self, send: Callable[[Peer, FromSidecar], None], keys_max: int) -> None:
        self._send = send
        self._keys_max = keys_max
        self._announced: dict[bytes, tuple[Peer, int, bytes]] = {}
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._announced)

    def stored(self, peer: Peer, job: int, groups: dict[int, tuple[Keys, Names]]) -> None:
        """Objects of a save were committed: tell the scheduler half, and remember their names.

        Also when all of them were stored before: until then the half keeps the whole request.
        """
        ends = {group: list(names) for group, (_, names) in groups.items() if names}
        for group, (keys, names) in groups.items():
            for key, name in zip(keys, names.values(), strict=True):
                self._announced[key.tobytes()] = (peer, group, name)
        self.counts["stored"] += sum(map(len, ends.values()))
        self._send(peer, Stored(job, ends))
        if over := len(self._announced) - self._keys_max:
            oldest = list(self._announced)[: max(0, over)]
            self.counts["announced_keys_max"] += len(oldest)
            self._withdraw(oldest)

    def left(self, keys: bytes) -> None:
        """These objects are in the pool no more (16 bytes each)."""
        if self._announced and keys:
            self._withdraw(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))

    def emptied(self) -> None:
        """The pool was cleared."""
        self._withdraw(list(self._announced))

    def gone(self, peer: Peer) -> None:
        """A scheduler half is gone: nobody is left to tell."""
        self._announced = {
            key: known for key, known in self._announced.items() if known[0] is not peer
        }

    def _withdraw(self, keys: Iterable[bytes]) -> None:
        told: dict[Peer, list[tuple[int, bytes]]] = {}
        for key in keys:
            known = self._announced.pop(key, None)
            if known is not None:
                peer, group, name = known
                told.setdefault(peer, []).append((group, name))
        for peer, names in told.items():
            self.counts["removed"] += len(names)
            for at in range(0, len(names), _hashes_max):
                hashes: dict[int, list[bytes]] = {}
                for group, name in names[at : at + _hashes_max]:
                    hashes.setdefault(group, []).append(name)
                self._send(peer, Removed(hashes))

"""The KV memory of one half: which sidecars have it, and taking it back while the engine sleeps."""

from __future__ import annotations

import threading

from kvferry_connector.half import MemoryHandle
from kvferry_connector.wire.attach import RegisterEngine, RegisterRank

Loaned = tuple[RegisterEngine | RegisterRank, tuple[MemoryHandle, ...]]


class Loan:
    """Between the hook thread, which asks, and the lifeline's, which does.

    ``lent``: epochs whose sidecar may have the memory open, until it says Left or is proven dead.
    ``returned`` is set once the memory was asked back and nobody has it.
    """

    def __init__(self) -> None:
        self.lent: set[int] = set()
        self.returned = threading.Event()
        self.asleep = False
        self._next: Loaned | None = None
        self._lock = threading.Lock()  # never held for long

    def recall(self) -> None:
        """Ask the memory back; what was to be lent next is of memory before."""
        with self._lock:
            self.returned.clear()
            self.asleep, self._next = True, None

    def renew(self, loaned: Loaned) -> None:
        """Have this lent once what was lent before is back."""
        with self._lock:
            self._next = loaned

    @property
    def back(self) -> bool:
        """Whether the memory was asked back and nobody has it."""
        return self.asleep and not self.lent

    @property
    def due(self) -> bool:
        """Whether ``settle`` has something to say."""
        return self.back and (self._next is not None or not self.returned.is_set())

    def settle(self) -> Loaned | None:
        """Nobody has it: say so, or return what is to be lent from now on."""
        with self._lock:
            found, self._next = self._next, None
            if found is None:
                self.returned.set()
            else:
                self.asleep = False
            return found

"""What is known of requests that may hit: their chunk keys, per admission of a scheduler half.

Only keys are kept (16 bytes per chunk), never the hashes they were mixed from, except the last
hash: a probe that continues must do so exactly there. Owned by the control loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.outcomes.records import Record
from kvferry_sidecar.sessions.model import SessionKey

Keys = NDArray[np.uint8]


@dataclass(slots=True)
class Admission:
    """One admission: ``total`` hashes known so far, as ``keys[i]`` (n, 16) of the i-th group."""

    number: int
    version: bytes
    num_tokens: int
    total: int
    last_hash: bytes
    keys: list[Keys]
    longest_tokens: int  # hit that a request of this length can have
    answered: bool = False
    hint_tokens: int = 0  # of the last hint
    sampled: bool = False  # counted in the curve of misses by the pool's size
    leased: bool = False  # a lease was taken: that has marked the chunks as used
    record: Record | None = None  # what operators are told of it

    def key_bytes(self) -> int:
        """Bytes of all keys."""
        return sum(keys.nbytes for keys in self.keys)


@dataclass(slots=True)
class Book:
    """All admissions of one life of a scheduler half, oldest first."""

    life: bytes
    session: SessionKey
    generation: int
    admissions: dict[int, Admission] = field(default_factory=dict)


def _nobody(_life: bytes, _number: int) -> None:
    """Nobody wants to know."""


class Admissions:
    """Books by life, bounded in admissions per book and in key bytes over all."""

    def __init__(self, admissions_max: int, key_bytes_max: int) -> None:
        self._admissions_max = admissions_max
        self._key_bytes_max = key_bytes_max
        self._books: dict[bytes, Book] = {}
        self.key_bytes = 0
        self.dropped = 0
        self.on_drop: Callable[[bytes, int], None] = _nobody  # (life, number) is forgotten

    def book(self, life: bytes, session: SessionKey, generation: int) -> Book:
        """Return the book of this life, opening it at its first probe."""
        book = self._books.get(life)
        if book is None:
            book = self._books[life] = Book(life, session, generation)
        return book

    def get(self, life: bytes, number: int) -> Admission | None:
        """Return one admission, or None when it is not known (any more)."""
        book = self._books.get(life)
        return book.admissions.get(number) if book else None

    def make_room(
        self, book: Book, key_bytes: int, keep: int, leased: Callable[[int], bool]
    ) -> str | None:
        """Drop the oldest admissions without a lease until one more fits.

        Never ``keep`` itself, the admission that grows. Returns None when it fits, else which
        bound does not allow it: "admissions" or "key bytes".
        """
        extra = 0 if keep in book.admissions else 1
        if (bound := self._over(book, extra, key_bytes)) is None:
            return None
        for number in list(book.admissions):
            if number == keep or leased(number):
                continue
            self.drop(book.life, number)
            self.dropped += 1
            if (bound := self._over(book, extra, key_bytes)) is None:
                return None
        return bound

    def put(self, book: Book, admission: Admission) -> None:
        """Add an admission, or replace what was known under its number."""
        self.drop(book.life, admission.number)
        book.admissions[admission.number] = admission
        self.key_bytes += admission.key_bytes()

    def drop(self, life: bytes, number: int) -> None:
        """Forget one admission; its lease is not touched here."""
        book = self._books.get(life)
        admission = book.admissions.pop(number, None) if book else None
        if admission is not None:
            self.key_bytes -= admission.key_bytes()
            self.on_drop(life, number)

    def drop_generation(self, generation: int) -> None:
        """The scheduler half is gone: forget all of it."""
        for life in [life for life, b in self._books.items() if b.generation == generation]:
            book = self._books.pop(life)
            self.key_bytes -= sum(a.key_bytes() for a in book.admissions.values())
            for number in book.admissions:
                self.on_drop(life, number)

    def count(self) -> int:
        """Admissions of all engines."""
        return sum(len(book.admissions) for book in self._books.values())

    def check(self) -> list[str]:
        """Violations of the sums; empty when sound."""
        admissions = [a for book in self._books.values() for a in book.admissions.values()]
        real = sum(admission.key_bytes() for admission in admissions)
        return [] if real == self.key_bytes else [f"key bytes: {self.key_bytes}, really {real}"]

    def _over(self, book: Book, extra: int, key_bytes: int) -> str | None:
        if len(book.admissions) + extra > self._admissions_max:
            return "admissions"
        return "key bytes" if self.key_bytes + key_bytes > self._key_bytes_max else None

"""Faults of the hot channel: frames that are lost, late, repeated, overtaken or garbled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvferry_connector.wire import codec
from kvferry_connector.wire.codec import WireError

from kvferry_sidecar.faults.rules import Book, Rule

held_max = 4096  # frames kept back; further ones pass

Pass = Callable[[list[bytes], float], None]  # (frames of one message, now_s)


@dataclass(slots=True)
class _Kept:
    rule: Rule
    due_s: float
    frames: list[bytes]
    on: Pass


class FrameFaults:
    """Stands before a frame's handling, each way. ``now_s``: the loop's clock."""

    def __init__(self, book: Book, now_s: Callable[[], float]) -> None:
        self._book, self._now_s = book, now_s
        self._kept: list[_Kept] = []
        self._behind: dict[bool, _Kept] = {}  # overtaken: it goes on after the next of its way
        book.on_change.append(self._let_go)

    def up(self, frames: list[bytes], on: Pass) -> None:
        """A message of a half came."""
        try:
            name = type(codec.read_from_half(frames[1])).__name__ if len(frames) > 1 else "up"
        except WireError:
            name = "up"
        self._through(True, name, frames, on)

    def down(self, name: str, frames: list[bytes], on: Pass) -> None:
        """A message of kind ``name`` is to be sent."""
        self._through(False, name, frames, on)

    def tick(self, now_s: float) -> float:
        """Let go what is due; returns seconds until the next."""
        due = [kept for kept in self._kept if kept.due_s <= now_s]
        self._kept = [kept for kept in self._kept if kept.due_s > now_s]
        for kept in due:
            self._go_on(kept)
        return min((kept.due_s - now_s for kept in self._kept), default=math.inf)

    def _through(self, up: bool, name: str, frames: list[bytes], on: Pass) -> None:
        now_s = self._now_s()
        rule = self._book.draw(name, "up" if up else "down")
        match rule.action if rule is not None and len(self._kept) < held_max else "pass":
            case "drop":
                pass
            case "garble":
                on([frames[0], b"\xc1" + frames[1], *frames[2:]], now_s)
            case "overtake" if rule is not None and up not in self._behind:
                rule.held += 1
                self._behind[up] = _Kept(rule, math.inf, frames, on)
                return
            case "hold" | "delay" as action if rule is not None:
                rule.held += 1
                due_s = now_s + rule.ms / 1e3 if action == "delay" else math.inf
                self._kept.append(_Kept(rule, due_s, frames, on))
            case action:
                for _ in range(2 if action == "repeat" else 1):
                    on(frames, now_s)
        if up in self._behind:
            self._go_on(self._behind.pop(up))

    def _let_go(self) -> None:
        kept, self._kept = [*self._kept, *self._behind.values()], []
        self._behind.clear()
        for one in kept:
            self._go_on(one)

    def _go_on(self, kept: _Kept) -> None:
        kept.rule.held -= 1
        kept.on(kept.frames, self._now_s())

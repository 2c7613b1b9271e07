"""Rules of the fault kit: one line of text each, and the book that draws from them.

``ACTION TARGET [times=N] [skip=N] [chance=P] [ms=N]``, for example ``drop Outcome times=3``,
``delay load ms=200``, ``kill commit skip=2``. The first rule that fits and fires decides.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec
from kvferry_connector.wire.hot import FromHalf, FromSidecar

from kvferry_sidecar.errors import RequestError

rules_max = 64
UP = frozenset(kind.__name__ for kind in get_args(FromHalf))
DOWN = frozenset(kind.__name__ for kind in get_args(FromSidecar))
FRAMES = UP | DOWN | {"up", "down"}
COPIES = frozenset({"load", "save"})
POOL = frozenset({"reserve", "reserved", "commit", "committed", "doom"})
# action: what it can be done to
ACTIONS: dict[str, frozenset[str]] = {
    "drop": FRAMES,
    "repeat": FRAMES,
    "garble": FRAMES,
    "overtake": FRAMES,
    "hold": FRAMES | COPIES,
    "delay": FRAMES | COPIES | {"commit"},
    "fail": COPIES | {"commit"},
    "break": frozenset({"load"}),
    "kill": COPIES | POOL,
}
_OPTION = re.compile(r"(times|skip|ms)=\d{1,9}|chance=(0(\.\d+)?|1(\.0+)?)")
_FORM = "ACTION TARGET [times=N] [skip=N] [chance=P] [ms=N], see docs/faults.md"


class RuleView(msgspec.Struct, frozen=True):
    """A rule and how often it has been met and has fired; ``held``: what it keeps back now."""

    rule: str
    met: int
    fired: int
    held: int


@dataclass(slots=True, eq=False)
class Rule:
    """``times`` 0: without end. ``skip``: so many are let through first."""

    text: str
    action: str
    target: str
    times: int = 0
    skip: int = 0
    chance: float = 1.0
    ms: int = 100
    met: int = 0
    fired: int = 0
    held: int = 0

    def fires(self, rng: random.Random) -> bool:
        """Note that the target was met; whether the rule acts on it."""
        self.met += 1
        over = bool(self.times) and self.fired >= self.times
        if over or self.met <= self.skip or rng.random() >= self.chance:
            return False
        self.fired += 1
        return True


def parse(text: str) -> Rule:
    """Return the rule of one line. Raises RequestError naming what is wrong with it."""
    action, _, rest = text.strip().partition(" ")
    target, *options = rest.split() or [""]
    if action not in ACTIONS:
        raise RequestError(f"rule {text!r}: no action {action!r}", f"one of {', '.join(ACTIONS)}")
    if target not in ACTIONS[action]:
        targets = ", ".join(sorted(ACTIONS[action]))
        raise RequestError(f"rule {text!r}: nothing to {action} is {target!r}", f"one of {targets}")
    rule = Rule(" ".join(text.split()), action, target)
    for option in options:
        if not _OPTION.fullmatch(option):
            raise RequestError(f"rule {text!r}: {option!r} says nothing", f"write {_FORM}")
        name, _, value = option.partition("=")
        setattr(rule, name, float(value) if name == "chance" else int(value))
    return rule


def parse_all(text: str) -> list[Rule]:
    """Return the rules of a text, separated by ``;``. Raises RequestError."""
    lines = [line for line in text.split(";") if line.strip()]
    if len(lines) > rules_max:
        raise RequestError(f"{len(lines)} rules", f"give at most {rules_max}")
    return [parse(line) for line in lines]


class Book:
    """The rules in force. ``on_change`` is called after they were replaced."""

    def __init__(self, rules: Sequence[Rule], seed: int) -> None:
        self._rules = list(rules)
        self._rng = random.Random(seed)  # noqa: S311 - no secret, and to be repeated
        self.on_change: list[Callable[[], None]] = []

    def draw(self, *targets: str) -> Rule | None:
        """Return the rule that acts on what goes by any of these names."""
        for rule in self._rules:
            if rule.target in targets and rule.fires(self._rng):
                return rule
        return None

    def replace(self, rules: Sequence[Rule]) -> None:
        """Put other rules in force; what the former ones held back goes on."""
        self._rules = list(rules)
        for changed in self.on_change:
            changed()

    def view(self) -> list[RuleView]:
        """Return the rules in force."""
        return [RuleView(r.text, r.met, r.fired, r.held) for r in self._rules]

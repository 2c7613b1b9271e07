"""The hit search over groups: vLLM 0.32's `find_longest_cache_hit`, ported.

Each group accepts the candidate length or shortens it, until nothing changes. An EAGLE group
looks one margin past the candidate and drops it again, once per candidate. There is no closed
form with EAGLE: "every EAGLE group has the block after L" differs from vLLM in about 1 % of
cases, both ways, so the bookkeeping is part of the port.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.masks.finders import Finder, finder
from kvferry_sidecar.masks.kinds import FULL_FAMILY, Kind
from kvferry_sidecar.masks.presence import Presence
from kvferry_sidecar.masks.rules import Rules, SpecGroup


@dataclass(frozen=True, slots=True)
class Hit:
    """``tokens`` all groups agree on; ``longest_tokens`` is what the best group has."""

    tokens: int
    longest_tokens: int

    @property
    def junction_tokens(self) -> int:
        """Where sparse groups should keep a boundary for this shared prefix, or 0."""
        return self.longest_tokens if self.longest_tokens > self.tokens else 0


def find_hit(rules: Rules, present: Presence, *, max_tokens: int) -> Hit:
    """Return the longest hit within ``max_tokens`` (at most the request's tokens - 1).

    ``present`` ends where the request's block hashes end, and so does EAGLE's look past the bound.
    """
    groups = rules.spec_groups
    finders = [finder(rules, group, _joint(present, group)) for group in groups]
    if len(rules.groups) == 1:
        tokens = finders[0].longest(max_tokens, drop=groups[0].eagle) if finders else 0
        return Hit(tokens, tokens)
    return _fixed_point(rules, finders, max_tokens)


def _fixed_point(rules: Rules, finders: list[Finder], max_tokens: int) -> Hit:
    groups = rules.spec_groups
    full = [group.rule.kind in FULL_FAMILY for group in groups]
    one_pass = len(groups) == 2 and full[0]  # a second one would change nothing
    lengths: dict[int, int] = {}
    verified: set[int] = set()
    hit, longest = max_tokens, 0
    while True:
        current = hit
        for i, group in enumerate(groups):
            if full[i] and i in lengths:  # what is there of it is there for every shorter length
                current = min(current, lengths[i])
                continue
            drop = group.eagle and i not in verified
            bound = current
            if drop and group.rule.kind is not Kind.MAMBA:
                bound += rules.eagle_margin(group.members[0])
            found = finders[i].longest(bound, drop=drop)
            if drop:
                verified.add(i)
            elif found < current:
                verified.clear()
            current = lengths[i] = found
            longest = max(longest, current)
        if current >= hit:
            break
        hit = current
        if one_pass:
            break
    return Hit(hit, longest)


def _joint(present: Presence, group: SpecGroup) -> NDArray[np.bool_]:
    """Return what every member of a spec group has."""
    joint = present[group.members[0]]
    for other in group.members[1:]:
        length = min(len(joint), len(present[other]))
        joint = joint[:length] & present[other][:length]
    return joint

"""What the blocks of a scheduled engine hold: the model of KV memory under the real Scheduler.

A block holds (group, names). Attention is named by the prefix hashes of all the boundaries inside
it that are computed; a state by the one hash of the tokens it is the state after, or by a name of
its own where no hash ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry_sidecar.masks.kinds import Kind
from kvferry_sidecar.masks.load import load_mask
from kvferry_sidecar.masks.rules import Rules

Held = tuple[int, frozenset[bytes]]  # group, names


@dataclass(frozen=True)
class Part:
    """One request's tokens ``[start, end)`` of a step, and its tables then.

    ``drafts`` of them are guesses; ``fresh``: the first step since it held no KV.
    """

    start: int
    end: int
    table: tuple[list[int], ...]
    samples: bool
    drafts: int = 0
    fresh: bool = False


@dataclass
class Contents:
    """The blocks of one rank."""

    held: dict[int, Held] = field(default_factory=dict)
    states_checked: int = 0
    guessing: set[str] = field(default_factory=set)  # their states depend on what was accepted
    named: dict[str, int] = field(default_factory=dict)  # hashes known when they last ran
    wrong: set[int] = field(default_factory=set)  # blocks of bytes that are not what they are named

    def begin(self, output: Any) -> None:
        """What the runner does before a forward: zero new blocks, then copy on write."""
        for block in output.new_block_ids_to_zero or ():
            self.held.pop(block, None)
        for copy in output.kv_cache_block_copies or ():
            source = self.held.get(copy.src_block_id)
            if source is not None:
                self.held[copy.dst_block_id] = source

    def forward(
        self, rules: Rules, hash_tokens: int, parts: Mapping[str, Part],
        hashes: Mapping[str, Sequence[bytes]],
    ) -> None:  # fmt: skip
        """Check what was computed (or loaded) before, write what is computed now."""
        for name, part in parts.items():
            if part.fresh:
                self.guessing.discard(name)
                self.named.pop(name, None)
            for group, rule in enumerate(rules.groups):
                slots = part.table[group]
                if rule.kind is Kind.RING:
                    self._use_ring(name, part, group, slots)
                elif rule.kind is Kind.MAMBA:
                    ends = (_state(name, hashes[name], hash_tokens, part.start),
                            _state(name, hashes[name], hash_tokens, part.end))  # fmt: skip
                    self._advance_state(name, part, group, rule.block, ends)
                else:
                    mask = load_mask(rule, total_tokens=part.start)
                    self._fill(rules, (name, group), part, slots, mask.tolist(), hashes[name])
            if part.drafts:
                self.guessing.add(name)
            self.named[name] = min(len(hashes[name]), part.end // hash_tokens)
            if self.wrong:
                self._spread(part, rules.groups[0].block)

    def _spread(self, part: Part, block: int) -> None:
        """What is computed upon wrong bytes is wrong, upon right ones right (one group)."""
        slots = part.table[0]
        written = slots[part.start // block : -(-part.end // block)]
        if self.wrong.isdisjoint(slots[: -(-part.start // block)]):
            self.wrong.difference_update(written)
        else:
            self.wrong.update(written)

    def _use_ring(self, name: str, part: Part, group: int, slots: list[int]) -> None:
        """One block for a request's whole life, which nothing else may write."""
        (block_id,) = slots
        own = (group, frozenset([name.encode()]))
        assert part.fresh or self.held.get(block_id) == own, (name, group, "its ring was written")
        self.held[block_id] = own

    def confirm(
        self, rules: Rules, name: str, part: Part, tokens: int, hashes: Sequence[bytes]
    ) -> None:
        """A step with drafts is over: of what it computed of a request, ``tokens`` are right."""
        right = replace(part, end=tokens)
        for group, rule in enumerate(rules.groups):
            if rule.kind not in (Kind.MAMBA, Kind.RING):
                slots = part.table[group]
                self._fill(rules, (name, group), right, slots, [False] * len(slots), hashes)

    def _fill(
        self, rules: Rules, who: tuple[str, int], part: Part, slots: list[int], mask: list[bool],
        hashes: Sequence[bytes],
    ) -> None:  # fmt: skip
        (_, group), block = who, rules.groups[who[1]].block
        per_block = block // rules.hash_block
        known = min(len(hashes), part.end // rules.hash_block)
        before = part.start // rules.hash_block
        if who[0] in self.guessing:  # what was accepted since was computed, and is named only now
            before = min(before, self.named[who[0]])
        for chunk, block_id in enumerate(slots):
            names = hashes[chunk * per_block : min((chunk + 1) * per_block, known)]
            if not names:
                break
            old = set(names[: max(0, before - chunk * per_block)])
            if block_id == 0:  # it left the window
                assert (chunk + 1) * block <= part.start
                # R-SWA drops generated tokens of a request that runs on.
                holed = rules.groups[group].kind is Kind.RSWA
                assert holed or not mask[chunk], (*who, chunk)
                continue
            if old and mask[chunk]:
                held = self.held.get(block_id, (group, frozenset()))
                assert held[0] == group, (*who, chunk, held)
                assert old <= held[1], (*who, chunk, "what was computed before is not there")
            if len(old) < len(names) or block_id not in self.held:
                self.held[block_id] = (group, frozenset(names))

    def _advance_state(
        self, name: str, part: Part, group: int, block: int, ends: tuple[bytes, bytes]
    ) -> None:
        """The state after ``start`` becomes the one after ``end``, in the slot of ``end``."""
        slots = part.table[group]
        source, target = -(-part.start // block) - 1, -(-part.end // block) - 1
        if part.start and name not in self.guessing:
            self.states_checked += 1
            held = self.held.get(slots[source])
            assert held == (group, frozenset([ends[0]])), (name, group, part, held, ends)
        if slots[target]:
            guessed = part.drafts or name in self.guessing
            self.held[slots[target]] = (group, frozenset([b"guess" if guessed else ends[1]]))


def _state(name: str, hashes: Sequence[bytes], hash_tokens: int, tokens: int) -> bytes:
    """The name of the state after so many tokens."""
    number = tokens // hash_tokens
    if number and tokens % hash_tokens == 0 and number <= len(hashes):
        return hashes[number - 1]
    return f"{name} after {tokens}".encode()

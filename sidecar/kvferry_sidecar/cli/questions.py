"""The questions of `kvferry geometry eval`: one JSON object in, one out."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvferry_sidecar.masks.kinds import Kind, kind_of
from kvferry_sidecar.masks.load import load_mask
from kvferry_sidecar.masks.presence import from_ends
from kvferry_sidecar.masks.rules import GroupRule, Refused, Rules, check
from kvferry_sidecar.masks.search import find_hit
from kvferry_sidecar.masks.store import kept_boundaries, store_mask

tokens_max = 1 << 24
groups_max = 256
# Of all groups together: every array here has an entry per chunk.
chunks_max = 1 << 24

Tokens = Annotated[int, msgspec.Meta(ge=0, le=tokens_max)]
Size = Annotated[int, msgspec.Meta(ge=1, le=tokens_max)]


class GroupText(msgspec.Struct, forbid_unknown_fields=True):
    """One group of a question; see docs/geometry.md."""

    kind: str
    block: Size
    window: Size | None = None
    chunk: Size | None = None
    eagle: bool = False
    cacheable: bool = True
    mode: Literal["align", "none"] | None = None
    window_extra: Tokens = 0
    spec: str = ""


class Load(msgspec.Struct, tag_field="op", tag="load", forbid_unknown_fields=True):
    """Which chunks a hit of ``length`` tokens needs."""

    length: Tokens


class Store(msgspec.Struct, tag_field="op", tag="store", forbid_unknown_fields=True):
    """Which chunks are kept once ``tokens`` tokens of a prompt of ``prefill`` are confirmed."""

    tokens: Tokens
    prefill: Tokens
    shared_prefix: Tokens | None = None


class Find(msgspec.Struct, tag_field="op", tag="hit", forbid_unknown_fields=True):
    """How long the hit is within ``max_length``, with objects that end at ``present``."""

    max_length: Tokens
    hashed: Tokens
    present: dict[str, list[Tokens]]


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """One line."""

    groups: Annotated[list[GroupText], msgspec.Meta(max_length=groups_max)]
    hash_block: Size
    scheduler_block: Size
    alignment: Size
    ask: Load | Store | Find
    partial: bool = False
    retention: Tokens | None = 0
    use_eagle: bool = False
    pcp: Size = 1


_decoder = msgspec.json.Decoder(Question)
_encoder = msgspec.json.Encoder()


def answer(line: bytes, line_bytes_max: int) -> bytes:
    """Return the answer to one line as JSON; never raises for what a line can say."""
    if len(line) > line_bytes_max:
        return _encoder.encode({"refused": f"the line is longer than {line_bytes_max} bytes"})
    try:
        question = _decoder.decode(line)
    except msgspec.DecodeError as error:  # also its subclass for wrong types and values
        return _encoder.encode({"refused": f"the line is no question: {error}"})
    except UnicodeDecodeError as error:
        return _encoder.encode({"refused": f"the line is not UTF-8: {error.reason}"})
    return _encoder.encode(_evaluate(question))


def _evaluate(question: Question) -> dict[str, object]:
    rules = _rules(question)
    refused = rules if isinstance(rules, Refused) else check(rules)
    if refused is not None or isinstance(rules, Refused):
        return {"refused": refused.reason if refused else ""}
    ask = question.ask
    if _chunks(rules, ask) > chunks_max:
        return {"refused": f"the groups have more than {chunks_max} chunks in all"}
    if isinstance(ask, Find):
        return _hit(rules, ask)
    if isinstance(ask, Load):
        masks = [load_mask(rule, total_tokens=ask.length) for rule in rules.groups]
        return {"load": [mask.tolist() for mask in masks]}
    boundaries = kept_boundaries(rules, ask.prefill, ask.shared_prefix or 0)
    masks = [
        store_mask(rules, i, tokens=ask.tokens, boundaries=boundaries)
        for i in range(len(rules.groups))
    ]
    return {"store": [mask.tolist() for mask in masks]}


def _chunks(rules: Rules, ask: Load | Store | Find) -> int:
    if isinstance(ask, Find):
        return sum(ask.hashed // rules.unit(i) for i in range(len(rules.groups)))
    tokens = ask.length if isinstance(ask, Load) else ask.tokens
    return sum(-(-tokens // rule.block) for rule in rules.groups)


def _hit(rules: Rules, ask: Find) -> dict[str, object]:
    names = [str(i) for i in range(len(rules.groups))]
    strange = [name for name in ask.present if name not in names]
    if strange:
        return {"refused": f"present names group {strange[0]!r:.40}; they are 0 to {names[-1]}"}
    present = [
        from_ends(rules, i, ask.present.get(name, ()), hashed_tokens=ask.hashed)
        for i, name in enumerate(names)
    ]
    hit = find_hit(rules, present, max_tokens=ask.max_length)
    return {"hit": hit.tokens}


def _rules(question: Question) -> Rules | Refused:
    groups = []
    for i, text in enumerate(question.groups):
        rule = _group_rule(text)
        if isinstance(rule, str):
            return Refused(f"group {i}: {rule}")
        groups.append(rule)
    return Rules(
        groups=tuple(groups),
        hash_block=question.hash_block,
        scheduler_block=question.scheduler_block,
        alignment=question.alignment,
        partial=question.partial,
        retention=question.retention,
        use_eagle=question.use_eagle,
        pcp=question.pcp,
    )


def _group_rule(text: GroupText) -> GroupRule | str:
    """Return the rule, or the reason of its refusal."""
    kind = kind_of("mamba-none" if (text.kind, text.mode) == ("mamba", "none") else text.kind)
    if not isinstance(kind, Kind):
        return kind
    return GroupRule(
        kind=kind,
        block=text.block,
        window=text.window or 0,
        chunk=text.chunk or 0,
        eagle=text.eagle,
        cacheable=text.cacheable,
        window_extra=text.window_extra,
        spec=text.spec,
    )

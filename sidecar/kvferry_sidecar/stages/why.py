"""Why a lookup found no more than it did: asked once per admission, about its first short answer.

Reads the pool's index and what is remembered of evictions and namespaces; changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvferry_sidecar.geometry.identity import compare_identity
from kvferry_sidecar.outcomes.reasons import Reason
from kvferry_sidecar.outcomes.records import Why
from kvferry_sidecar.plan.chunk_keys import new_keys
from kvferry_sidecar.sessions.admissions import Keys
from kvferry_sidecar.sessions.model import Session
from kvferry_sidecar.stages.shape import SessionShape, form_of
from kvferry_sidecar.tiers.host import Absence, HostTier
from kvferry_sidecar.tiers.store import Form

namespaces_max = 128  # remembered, as many as the pool tells apart
namespaces_asked_max = 32  # looked at after a miss of the whole prompt, the newest first
fields_max = 4  # differing fields that are named

_UNKNOWN = Absence.UNKNOWN  # to name it costs Python 3.11 more than a call
_NEVER = Why(Reason.ABSENT, "not even the first chunk of the prompt is stored")


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """A namespace seen at this epoch, and how the first chunk of a prompt is named in it."""

    engine: str
    identity: Mapping[str, str]
    group: int
    hashes_per_unit: int
    forms: Mapping[int, Form]  # of the objects of each stored group


class Namespaces:
    """Digest -> facts of the namespaces that engines registered: bounded, the oldest goes."""

    def __init__(self) -> None:
        self._known: dict[bytes, NamespaceFacts] = {}

    def learn(self, session: Session, shape: SessionShape) -> None:
        """A session is ready: remember under what its chunks are kept."""
        digest = session.namespaces.get(session.version)
        geometry = next((w.geometry for w in session.workers.values() if w.geometry), None)
        stored = shape.stored_groups()
        if digest is None or geometry is None or not stored:
            return
        self._known.pop(digest, None)
        self._known[digest] = NamespaceFacts(
            "/".join(session.key),
            geometry.identity,
            stored[0].group,
            stored[0].hashes_per_unit,
            {group.group: form_of(group.stripe) for group in stored},
        )
        if len(self._known) > namespaces_max:
            del self._known[next(iter(self._known))]

    def find(self, digest: bytes) -> NamespaceFacts | None:
        """Return what is known of a namespace."""
        return self._known.get(digest)

    def groups(self) -> dict[str, list[int]]:
        """Return the stored groups of every namespace, by its hexadecimal digits."""
        return {digest.hex(): sorted(facts.forms) for digest, facts in self._known.items()}

    def holder(
        self, pool: HostTier, session: Session, hashes: bytes, hash_bytes: int
    ) -> Why | None:
        """Return where else the prompt's first chunk is kept, and which facts differ; or None."""
        own = session.namespaces.get(session.version)
        if len(self._known) == 1 and own in self._known:
            return None  # nowhere else
        mine = self._known.get(own) if own is not None else None
        for digest, facts in islice(reversed(self._known.items()), namespaces_asked_max):
            chunk_bytes = facts.hashes_per_unit * hash_bytes
            if digest == own or len(hashes) < chunk_bytes:
                continue
            keys = new_keys(
                digest,
                facts.group,
                hashes[:chunk_bytes],
                hashes_per_unit=facts.hashes_per_unit,
                hash_bytes=hash_bytes,
                start=0,
            )
            if pool.prefix(keys):
                return Why(Reason.NAMESPACE, _difference(facts, mine))
        return None


def why_short(
    pool: HostTier,
    shape: SessionShape,
    keys: Sequence[Keys],
    *,
    hit_tokens: int,
    wanted_tokens: int,
) -> Why:
    """Return why a hit ends at ``hit_tokens`` though ``wanted_tokens`` were possible."""
    if not hit_tokens and shape.whole and pool.unheard_of(keys[shape.whole[0]]):
        return _NEVER  # as of most misses
    stored = shape.stored_groups()
    held_tokens, run, place = wanted_tokens, -1, -1
    absence: Absence | float = _UNKNOWN
    for at in shape.whole:
        chunks, told = pool.run(keys[at])
        if run < 0 or chunks * stored[at].block_tokens < held_tokens:
            held_tokens, run, place, absence = chunks * stored[at].block_tokens, chunks, at, told
    align = shape.hit_alignment
    reach_tokens = min(held_tokens, wanted_tokens) // align * align
    if reach_tokens > hit_tokens or place < 0:
        return _later_boundary(shape, hit_tokens, reach_tokens)
    group, of_group = stored[place], keys[place]
    if run >= len(of_group):
        return Why(Reason.ABSENT, f"all {run} chunks of group {group.group} are stored")
    where = f"chunk {run} of group {group.group}, after token {run * group.block_tokens}"
    if absence is _UNKNOWN:
        return Why(Reason.ABSENT, where)
    if absence is Absence.BEING_WRITTEN:
        return Why(Reason.BEING_WRITTEN, where)
    return Why(Reason.EVICTED, f"{where}, evicted {absence:.1f} s before")


def _later_boundary(shape: SessionShape, hit_tokens: int, reach_tokens: int) -> Why:
    """Full attention reaches further than the hit: another group, or EAGLE's drop, ends it."""
    stored = f"full attention is stored up to token {reach_tokens}"
    eagle = shape.rules.eagle_ids
    if eagle:
        margin = max(shape.rules.eagle_margin(group) for group in eagle)
        if reach_tokens - hit_tokens <= margin:
            return Why(Reason.EAGLE, f"{stored}, the drafter recomputes the last {margin} tokens")
    others = [g for at, g in enumerate(shape.stored_groups()) if at not in shape.whole]
    names = ", ".join(f"{g.group} ({g.kind})" for g in others) or "each other"
    detail = f"{stored}, but a request can resume there only with group {names}"
    return Why(Reason.BOUNDARY, detail)


def _difference(theirs: NamespaceFacts, mine: NamespaceFacts | None) -> str:
    if mine is None:
        return f"kept for {theirs.engine}"
    fields = compare_identity(mine.identity, theirs.identity)
    if not fields:
        return f"kept for {theirs.engine} under another namespace version (a reset)"
    named = ", ".join(f"{f.field} ({f.theirs} here, {f.ours} there)" for f in fields[:fields_max])
    rest = f" and {len(fields) - fields_max} more" if len(fields) > fields_max else ""
    return f"kept for {theirs.engine}: {named}{rest} differ"

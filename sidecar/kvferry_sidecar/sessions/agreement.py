"""What the halves of one session must agree on, compared field by field.

Every refusal names the field, both values (theirs: the half that registers; ours: what is known)
and what to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvferry_connector.wire.attach import (
    FieldRefusal,
    Group,
    Hello,
    Refused,
    RegisterEngine,
    RegisterRank,
)
from kvferry_connector.wire.names import NONCE_BYTES
from msgspec.structs import replace

from kvferry_sidecar.geometry.identity import compare_identity
from kvferry_sidecar.sessions.model import Peer, RankGeometry, Session
from kvferry_sidecar.sessions.rules import check_rules

_SAME_ARGUMENTS = "start all ranks of the engine with the same arguments and versions"
# What a pipeline stage has of its own: its layers, and what is said of them.
_STAGE_IDENTITY = frozenset({"attention_backends"})
_STAGE_SPEC = frozenset({"backends", "kernel_blocks", "members"})
_NO_STORE = (
    "set tiers.remote.url, the same on every node, and no tiers.remote.policy of none: a rank that "
    "starts on another node finds its part of the cache there"
)
_TWO_STARTS = (
    "an engine's ranks that share a sidecar belong to one start of vLLM: start them together, or "
    "give each start (each pod) a sidecar with a run directory of its own"
)
_REPORT = "report it with both values: the connector describes its engine inconsistently"


def taken(hello: Hello, old: Peer) -> Refused:
    """Return the answer to a half whose place a living process has."""
    place = "the scheduler half" if old.rank < 0 else f"rank {old.rank}"
    return Refused(
        "taken",
        f"{place} of engine {hello.engine_id} is held by a live process (pid {old.pid})",
        [
            FieldRefusal(
                "pid",
                str(hello.pid),
                str(old.pid),
                "end the old process (kill -9 is enough), or give the new engine its own "
                "engine_id or instance_id",
            )
        ],
    )


def check_engine(
    session: Session, theirs: RegisterEngine, ranks_max: int, *,
    shared_store: bool, others: Iterable[Session] = (),
) -> list[FieldRefusal]:  # fmt: skip
    """Compare a scheduler half's registration with itself and the ranks known so far.

    ``shared_store``: what is saved here is written on to a store that nodes share. ``others``: the
    sessions beside this one. None has its life: leases and jobs are known by it.
    """
    found = list(_engine_form(theirs, ranks_max))
    if any(other.life == theirs.life for other in others):
        found.append(FieldRefusal("life", theirs.life.hex(), "of another session", _TWO_STARTS))
    if theirs.nodes > 1 and not shared_store:
        found.append(FieldRefusal("nodes", f"{theirs.nodes} nodes", "no shared store", _NO_STORE))
    if session.life and theirs.life != session.life:
        found.append(
            FieldRefusal(
                "life",
                theirs.life.hex(),
                session.life.hex(),
                "send Bye before a new scheduler half starts, or use a new instance_id",
            )
        )
    known = {rank: one.geometry for rank, one in session.workers.items() if one.geometry}
    for rank, worker in sorted(session.workers.items()):
        if rank not in theirs.ranks:
            found.append(
                FieldRefusal("ranks", str(theirs.ranks), f"rank {rank} attached here", _REPORT)
            )
        if worker.geometry is not None:
            found += _hash_block(theirs.hash_block_tokens, worker.geometry.hash_block_tokens)
            found += _bare_groups(theirs, worker.geometry)
    if known and not found:
        return check_rules(theirs, list(known.values()), complete=known.keys() >= set(theirs.ranks))
    return found


def check_rank(peer: Peer, theirs: RegisterRank, geometry: RankGeometry) -> list[FieldRefusal]:
    """Compare a rank's validated registration with the scheduler half and with another rank."""
    session = peer.session
    found: list[FieldRefusal] = []
    known = {peer.rank: geometry}
    known |= {n: it.geometry for n, it in session.workers.items() if it.geometry and it is not peer}
    if session.ranks and peer.rank not in session.ranks:
        found.append(FieldRefusal("rank", str(peer.rank), f"one of {list(session.ranks)}", _REPORT))
    scheduler = session.scheduler.registration if session.scheduler is not None else None
    if isinstance(scheduler, RegisterEngine):
        found += _hash_block(theirs.hash_block_tokens, scheduler.hash_block_tokens)
        found += _bare_groups(scheduler, geometry)
        complete = known.keys() >= set(scheduler.ranks)
        found = found or check_rules(scheduler, list(known.values()), complete=complete)
    alike: list[Peer] = []
    others: list[Peer] = []
    for rank, other in sorted(session.workers.items()):
        if other is peer or other.geometry is None:
            continue
        if geometry.position == other.geometry.position:
            text = f"tp, pp, dcp = {geometry.position}"
            found.append(FieldRefusal("shard", text, f"rank {rank} has the same", _REPORT))
        same_stage = geometry.position[1] == other.geometry.position[1]
        (alike if same_stage else others).append(other)
    # The ranks known so far agree with each other.
    if alike:
        return found + _differences(theirs, geometry, alike[0])
    return found + (_between_stages(theirs, others[0]) if others else [])


def check_again(
    peer: Peer, theirs: RegisterRank, backing: dict[int, tuple[int, int, int]]
) -> list[FieldRefusal]:
    """Compare a registration with the one this half made before: the serial's rules.

    A lower serial is old; an equal one must say the same of the same memory; a higher one may
    bring other memory.
    """
    before = peer.registration
    if not isinstance(before, RegisterRank):
        return []
    if theirs.serial < before.serial:
        return [
            FieldRefusal(
                "serial",
                str(theirs.serial),
                f"at least {before.serial}",
                "a re-mapping of the KV memory raises the serial; it never falls",
            )
        ]
    if theirs.serial > before.serial:
        return []
    remedy = "raise the serial when the KV memory or its description changes"
    found = [
        FieldRefusal(name, str(getattr(theirs, name)), str(getattr(before, name)), remedy)
        for name in RegisterRank.__struct_fields__
        if getattr(theirs, name) != getattr(before, name)
    ]
    if backing != peer.backing:
        found.append(FieldRefusal("memories", _memories(backing), _memories(peer.backing), remedy))
    return found


def check_digest(peer: Peer, theirs: RegisterRank, geometry: RankGeometry) -> list[FieldRefusal]:
    """Compare a higher serial's registration with the former: only where memory lies may change."""
    if peer.geometry is None or peer.geometry.digest == geometry.digest:
        return []
    return _differences(theirs, geometry, peer)


def _engine_form(theirs: RegisterEngine, ranks_max: int) -> Iterator[FieldRefusal]:
    for name in ("life", "version"):
        value: bytes = getattr(theirs, name)
        if len(value) != NONCE_BYTES:
            yield FieldRefusal(name, f"{len(value)} bytes", f"{NONCE_BYTES} bytes", _REPORT)
    for name in ("hash_block_tokens", "scheduler_block_tokens", "alignment_tokens"):
        tokens: int = getattr(theirs, name)
        if tokens < 1:
            yield FieldRefusal(name, str(tokens), "at least 1", _REPORT)
    if (theirs.retention_tokens or 0) < 0 or theirs.reprefill_tokens < 0:
        numbers = f"{theirs.retention_tokens} and {theirs.reprefill_tokens}"
        yield FieldRefusal("retention_tokens, reprefill_tokens", numbers, "at least 0", _REPORT)
    if not 1 <= len(theirs.ranks) <= ranks_max:
        yield FieldRefusal(
            "ranks",
            f"{len(theirs.ranks)} ranks",
            f"1 to {ranks_max} on one node",
            "raise limits.ranks_max",
        )
    if len(set(theirs.ranks)) != len(theirs.ranks) or any(rank < 0 for rank in theirs.ranks):
        yield FieldRefusal("ranks", str(theirs.ranks[:ranks_max]), "distinct, from 0", _REPORT)


def _bare_groups(engine: RegisterEngine, geometry: RankGeometry) -> list[FieldRefusal]:
    """Each node of several says by itself how far a group reaches: it must have layers of it."""
    bare = [g.group for g in geometry.groups if g.save_rule != "none" and not g.payload_bytes]
    if engine.nodes == 1 or not bare:
        return []
    remedy = "split the pipeline so that each stage has layers of all kinds"
    text = f"no layers of groups {bare} on this rank, {engine.nodes} nodes"
    return [FieldRefusal("groups", text, "layers of every group", remedy)]


def _hash_block(theirs: int, ours: int) -> list[FieldRefusal]:
    if theirs == ours:
        return []
    return [FieldRefusal("hash_block_tokens", str(theirs), str(ours), _SAME_ARGUMENTS)]


def _differences(theirs: RegisterRank, geometry: RankGeometry, other: Peer) -> list[FieldRefusal]:
    """Name what makes two geometries differ; never empty when their digests differ."""
    ours = other.registration
    if other.geometry is None or not isinstance(ours, RegisterRank):
        return []
    found = _num_blocks(theirs, ours)
    if geometry.digest == other.geometry.digest:
        return found
    found += _fields(theirs, ours)
    if not found:
        found.append(
            FieldRefusal(
                "geometry", geometry.digest.hex(), other.geometry.digest.hex(), _SAME_ARGUMENTS
            )
        )
    return found


def _between_stages(theirs: RegisterRank, other: Peer) -> list[FieldRefusal]:
    """Name what two pipeline stages may not differ in: all but their layers."""
    ours = other.registration
    if not isinstance(ours, RegisterRank):
        return []
    return _num_blocks(theirs, ours) + _fields(_stage_free(theirs), _stage_free(ours))


def _stage_free(rank: RegisterRank) -> RegisterRank:
    """Return a registration without what each stage has of its own."""
    groups = [
        replace(
            group,
            layers=[],
            detail="",
            eagle=False,
            # Of several specs, each stage names its own first layer's.
            spec={} if "members" in group.spec else _without(group.spec, _STAGE_SPEC),
        )
        for group in rank.groups
    ]
    return replace(rank, identity=_without(rank.identity, _STAGE_IDENTITY), groups=groups)


def _without(facts: dict[str, str], names: frozenset[str]) -> dict[str, str]:
    return {name: value for name, value in facts.items() if name not in names}


def _num_blocks(theirs: RegisterRank, ours: RegisterRank) -> list[FieldRefusal]:
    if theirs.num_blocks == ours.num_blocks or theirs.serial != ours.serial:
        return []
    numbers = (str(theirs.num_blocks), str(ours.num_blocks))
    return [FieldRefusal("num_blocks", *numbers, _SAME_ARGUMENTS)]


def _fields(theirs: RegisterRank, ours: RegisterRank) -> list[FieldRefusal]:
    """Compare what decides the meaning of a payload's bytes, field by field."""
    found = compare_identity(theirs.identity, ours.identity)
    for name in ("hash_block_tokens", "layout"):
        mine, known = getattr(theirs, name), getattr(ours, name)
        if mine != known:
            found.append(FieldRefusal(name, str(mine), str(known), _SAME_ARGUMENTS))
    for name in ("tp_size", "pp_size", "dcp_size"):
        mine, known = getattr(theirs.shard, name), getattr(ours.shard, name)
        if mine != known:
            found.append(FieldRefusal(f"shard.{name}", str(mine), str(known), _SAME_ARGUMENTS))
    return found + list(_groups(theirs.groups, ours.groups))


def _groups(theirs: list[Group], ours: list[Group]) -> Iterator[FieldRefusal]:
    if len(theirs) != len(ours):
        yield FieldRefusal(
            "groups", f"{len(theirs)} groups", f"{len(ours)} groups", _SAME_ARGUMENTS
        )
        return
    for mine, known in zip(theirs, ours, strict=True):
        for name in Group.__struct_fields__:
            one, two = getattr(mine, name), getattr(known, name)
            if one != two:
                yield FieldRefusal(
                    f"groups[{known.group}].{name}", _short(one), _short(two), _SAME_ARGUMENTS
                )


def _short(value: object, chars_max: int = 512) -> str:
    text = str(value)
    return text if len(text) <= chars_max else f"{text[:chars_max]}... ({len(text)} characters)"


def _memories(backing: dict[int, tuple[int, int, int]]) -> str:
    return ", ".join(
        f"buffer {buffer}: inode {inode}, {total_bytes} bytes"
        for buffer, (_, inode, total_bytes) in sorted(backing.items())
    )

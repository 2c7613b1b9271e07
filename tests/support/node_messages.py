"""Registrations that fit each other, for tests of attaching."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry_connector.wire.attach import Group, RegisterEngine, RegisterRank, Shard

LIFE = bytes(range(16))
VERSION = bytes(16)


def engine_registration(ranks: Sequence[int] = (0,), **changes: object) -> RegisterEngine:
    """Return a scheduler half's registration."""
    fields: dict[str, object] = {
        "life": LIFE,
        "version": VERSION,
        "ranks": list(ranks),
        "hash_block_tokens": 16,
        "scheduler_block_tokens": 16,
        "alignment_tokens": 16,
        "load_failure_policy": "recompute",
    }
    return RegisterEngine(**(fields | changes))  # type: ignore[arg-type]  # fields by name


def rank_registration(rank: int = 0, **changes: object) -> RegisterRank:
    """Return a worker half's registration."""
    fields: dict[str, object] = {
        "serial": 1,
        "shard": Shard(tp_rank=rank, tp_size=2),
        "identity": {"model": "tiny", "hash_seed": "0"},
        "num_blocks": 8,
        "layout": "HND",
        "groups": [Group(0, "full", 16, {}, ["l0"])],
        "placements": [],
        "hash_block_tokens": 16,
    }
    return RegisterRank(**(fields | changes))  # type: ignore[arg-type]  # fields by name

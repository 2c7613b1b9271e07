"""The kinds of KV cache groups whose masks are known exactly, and why others are refused."""

from __future__ import annotations

import enum


class Kind(enum.StrEnum):
    """Values of Group.kind with exact masks."""

    FULL = "full"
    MLA = "mla"
    INDEXER = "indexer"
    RSWA = "rswa"
    SWA = "swa"
    SWA_MLA = "swa-mla"
    CHUNKED = "chunked"
    MAMBA = "mamba"
    RING = "ring"


# Nothing is ever skipped by these; R-SWA's window bounds generated tokens only, never a prefix.
FULL_FAMILY = frozenset({Kind.FULL, Kind.MLA, Kind.INDEXER, Kind.RSWA})
WINDOWED = frozenset({Kind.SWA, Kind.SWA_MLA})
# Kinds whose managers can look inside a block, at every hash boundary.
FINE_LOOKUP = FULL_FAMILY | {Kind.MAMBA}

# Kinds that vLLM has and that cannot be stored by prefix hash, with the reason.
REFUSED_KINDS: dict[str, str] = {
    "mamba-none": "Mamba in mode none has one state per request: no prefix hash names it",
    "sink": "vLLM 0.32 cannot build its own manager for sink attention",
    "cross": "cross-attention depends on the encoder's input, which no prefix hash covers",
    "encoder-only": "encoder-only attention keeps no KV cache",
    "hisparse": "HiSparse groups are short-lived replicas of a host group",
}


def kind_of(name: str) -> Kind | str:
    """Return the kind, or the reason why a group of that name is refused."""
    try:
        return Kind(name)
    except ValueError:
        known = ", ".join(Kind)
        return REFUSED_KINDS.get(name, f"kind {name!r} is unknown; known are {known}")

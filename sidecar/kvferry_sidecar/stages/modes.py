"""How hits are loaded: the settings ``loads.*``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class LoadModes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``mode``: "overlapped" copies what comes; "serialized" one load of a rank at a time.

    In both a copy starts after the engine's step has bound its blocks (``bound_step``), and its
    outcome goes out after the copy engine has synchronised. Serialized, no other load of that rank
    lies between the two: for a device or driver whose concurrent copies are not trusted.
    ``breaker``: do not offer what is slower to load than to compute (stages/breaker.py).
    ``shadow_percent``: of the hits, computed and compared instead (stages/shadow.py).
    """

    mode: Literal["overlapped", "serialized"] = "overlapped"
    breaker: bool = True
    shadow_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0


DEFAULT_MODES = LoadModes()

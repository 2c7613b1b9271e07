"""The kinds of KV cache groups whose masks are known exactly."""

from __future__ import annotations

import enum


class Kind(enum.StrEnum):
    """Values of Group.kind that are served; anything else is refused at registration."""

    FULL = "full"

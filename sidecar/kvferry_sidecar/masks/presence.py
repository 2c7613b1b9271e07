"""What is stored, as the masks and the hit search read it.

Per group one boolean array over its units (`Rules.unit`): index k is True when an object is
stored under the prefix hash at token ``(k + 1) * unit``. The unit is the block, or the hash block
where partial hits look inside blocks. Past the end of the array nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.masks.rules import Rules

Presence: TypeAlias = Sequence[NDArray[np.bool_]]


def from_ends(
    rules: Rules, group: int, ends: Iterable[int], *, hashed_tokens: int
) -> NDArray[np.bool_]:
    """Return the array of one group from end tokens of its objects.

    Ends that lookups of the group never ask for (inside a block, past the hashes) do not count.
    """
    unit = rules.unit(group)
    present = np.zeros(hashed_tokens // unit, dtype=np.bool_)
    places = np.fromiter(ends, dtype=np.int64)
    places = places[(places > 0) & (places % unit == 0) & (places <= len(present) * unit)]
    present[places // unit - 1] = True
    return present

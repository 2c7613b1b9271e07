"""Whether a Mooncake master answers: run as a process, ends with 0 when it does."""

from __future__ import annotations

import os
import sys

from mooncake.store import MooncakeDistributedStore


def main() -> None:
    """Connect as a client without a segment, over TCP to itself, and end without closing."""
    code = MooncakeDistributedStore().setup(
        "127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1]
    )
    os._exit(0 if code == 0 else 1)


if __name__ == "__main__":
    main()

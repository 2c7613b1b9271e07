"""The process of one step: `python -m gpu.step MODULE:FUNCTION [--small]`; one JSON line."""

from __future__ import annotations

import importlib
import json
import resource
import sys
from typing import Any

from gpu.runner import Sizes
from gpu.verdicts import verdict_of


def main(where: str, *flags: str) -> None:
    """Run the step and print its verdict."""
    module, _, name = where.partition(":")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of a GPU's process it would take minutes

    def work() -> dict[str, Any] | None:
        found: dict[str, Any] | None = getattr(importlib.import_module(module), name)(
            Sizes(small="--small" in flags)
        )
        return found

    print(json.dumps(verdict_of(work)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

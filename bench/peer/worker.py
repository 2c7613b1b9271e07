"""An engine process that measures what it is told to: ``python -m bench.peer.worker SETUP.json``.

The setup names a class of ``CLASSES``; each line of stdin names one of its methods and the
arguments, each line of stdout is what the method returned. The end of stdin ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

CLASSES = {
    "steps": ("bench.peer.engine_steps", "Steps"),
    "lookups": ("bench.peer.engine_lookups", "Lookups"),
    "moves": ("bench.peer.engine_moves", "Moves"),
    "recovery": ("bench.peer.engine_recovery", "Recovery"),
    "hybrids": ("bench.peer.engine_hybrids", "Hybrids"),
}


def main(arguments: list[str]) -> int:
    """Build the engine and carry out operations until the end of stdin."""
    # vLLM and its libraries print to stdout: keep the replies' own descriptor out of reach.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setup = json.loads(Path(arguments[0]).read_text())
    module, name = CLASSES[setup["what"]]
    bench: Any = None
    try:
        bench = getattr(importlib.import_module(module), name)(
            setup, lambda event: say(replies, event)
        )
        say(replies, {"pid": os.getpid()})
        for line in sys.stdin:
            order = json.loads(line)
            say(replies, getattr(bench, order["operation"])(**order["arguments"]) or {})
    except Exception as error:  # noqa: BLE001 - the other side raises it, with this process's log
        traceback.print_exc()
        say(replies, {"error": f"{type(error).__name__}: {error}"})
        return 1
    finally:
        if bench is not None:
            bench.close()
    return 0


def say(replies: TextIO, document: dict[str, Any]) -> None:
    """Write one document."""
    replies.write(json.dumps(document) + "\n")
    replies.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

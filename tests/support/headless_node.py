"""A further node of a real engine: ``python -m support.headless_node SETUP`` runs its workers.

SETUP is a JSON file (kvferry_demo.protocol.EngineSetup), as the engine's own but for the node's
number and run directory. It is what ``vllm serve --headless`` does; it ends with the engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvferry_demo import protocol
from kvferry_demo.driver import engine_args_of
from vllm.v1.executor.multiproc_executor import MultiprocExecutor


def main(setup: Path) -> None:
    arguments = engine_args_of(protocol.setup_decoder.decode(setup.read_bytes()))
    executor = MultiprocExecutor(
        arguments.create_engine_config(headless=True), monitor_workers=False
    )
    executor.start_worker_monitor(inline=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

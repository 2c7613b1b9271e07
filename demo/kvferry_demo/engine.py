"""A vLLM engine process that is driven over pipes: ``python -m kvferry_demo.engine SETUP``.

SETUP is a JSON file (protocol.EngineSetup). Commands come in on stdin and replies go out on
stdout, one JSON document per line; everything else that is printed goes to stderr. The end of
stdin ends the process, so an engine never outlives the program that started it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvferry_demo import protocol

if TYPE_CHECKING:
    from kvferry_demo.driver import Driver


def main(arguments: list[str]) -> int:
    """Build the engine and serve commands until Quit or the end of stdin."""
    # vLLM and its libraries print to stdout: keep the replies' own descriptor out of reach.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setup = protocol.setup_decoder.decode(Path(arguments[0]).read_bytes())
    # Only now: importing vLLM takes seconds and prints.
    from kvferry_demo.driver import Driver  # noqa: PLC0415 - stdout is redirected first

    driver = Driver(setup)
    try:
        _send(replies, driver.describe(os.getpid()))
        _serve(driver, replies)
    except Exception as error:
        _send(replies, protocol.Failure(f"{type(error).__name__}: {error}"))
        raise
    finally:
        driver.close()
    return 0


def _serve(driver: Driver, replies: BinaryIO) -> None:
    for line in sys.stdin.buffer:
        command = protocol.command_decoder.decode(line)
        if isinstance(command, protocol.Quit):
            return
        _send(replies, _carry_out(driver, command))


def _carry_out(driver: Driver, command: protocol.Command) -> protocol.Reply:
    match command:
        case protocol.Generate(asks):
            driver.add(asks)
            return protocol.Finished(driver.finish())
        case protocol.Start(asks):
            driver.add(asks)
            return _progress(driver, 0)
        case protocol.Step(count):
            for _ in range(count):
                driver.step()
            return _progress(driver, count)
        case protocol.Finish():
            return protocol.Finished(driver.finish())
        case protocol.Abort(requests):
            driver.abort(requests)
            return _progress(driver, 0)
        case protocol.Settle(deadline_s):
            return protocol.Idle(*driver.settle(deadline_s))
        case protocol.ResetPrefixCache(running, connector):
            return protocol.Done(driver.reset_prefix_cache(running, connector))
        case protocol.ZeroBlocks(blocks):
            driver.zero_blocks(blocks)
            return protocol.Done(True)
        case protocol.Inspect(modules):
            return driver.state({name: _file_of(name) for name in modules})
        case _:
            raise AssertionError(f"no case for {command!r}")


def _progress(driver: Driver, steps: int) -> protocol.Progress:
    return protocol.Progress(driver.running(), driver.ended(), steps)


def _file_of(module: str) -> str:
    """Return where an imported module came from, "" when it is not imported."""
    return str(getattr(sys.modules.get(module), "__file__", None) or "")


def _send(replies: BinaryIO, reply: protocol.Reply) -> None:
    replies.write(protocol.encoder.encode(reply) + b"\n")
    replies.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

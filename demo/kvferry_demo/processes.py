"""Child processes of the demo and of the tests: a sidecar, and an engine driven over pipes."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kvferry_sidecar.cli.query import ask_status
from kvferry_sidecar.errors import NoSidecarError

from kvferry_demo import protocol

ENGINE_START_S = 240.0
ENGINE_REPLY_S = 330.0
SIDECAR_START_S = 180.0
STOP_S = 60.0
_POLL_S = 0.02
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory

# Everything an engine on CPU needs: nothing fetched from a hub, no multiprocessing (the engine
# core lives in the process that is driven), one thread, no CPU pinning, and no compilation.
ENGINE_ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
}
# A user's own configuration must not reach the private sidecar of a demo or a test.
_FOREIGN = ("KVFERRY_CONFIG",)


class ChildError(Exception):
    """A child process did not start, ended early or answered with a failure."""


def in_environment(variables: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """Return ``command`` run with these variables added; the caller's environment stays as is."""
    unset = [part for name in _FOREIGN for part in ("-u", name)]
    return ["env", *unset, *(f"{name}={value}" for name, value in variables.items()), *command]


class Child:
    """A process with a log file; leaving the ``with`` block ends it whatever happened.

    ``own_group``: it leads a process group, which whatever it starts belongs to.
    """

    def __init__(
        self, command: Sequence[str], log: Path, *, pipes: bool = False, own_group: bool = False
    ) -> None:
        self.log = log
        stream = subprocess.PIPE if pipes else subprocess.DEVNULL
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdin=stream,
                stdout=stream if pipes else file,
                stderr=file,
                process_group=0 if own_group else None,
            )

    @property
    def pid(self) -> int:
        """Process id of the child itself (``env`` is replaced by what it runs)."""
        return self.process.pid

    def tail(self, lines: int = 40) -> str:
        """Return the end of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal and wait for the end. Raises subprocess.TimeoutExpired if it lives on."""
        self.process.send_signal(number)
        self.process.wait(STOP_S)

    def stop(self) -> int:
        """End the child in order, by force after ``STOP_S``; return its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Sidecar(Child):
    """``kvferry serve`` with a run directory and a pool of its own."""

    def __init__(
        self,
        run_dir: Path,
        log: Path,
        *,
        pool_name: str,
        pool_bytes: int,
        flags: Sequence[str] = (),
    ) -> None:
        self.run_dir = run_dir
        self.pool_name = pool_name
        serve = ["serve", "--run-dir", str(run_dir)]
        pool = ["--pool-name", pool_name, "--pool-bytes", str(pool_bytes), "--http-listen", ""]
        super().__init__(in_environment({}, [*kvferry_command(), *serve, *pool, *flags]), log)

    def wait_ready(self, deadline_s: float = SIDECAR_START_S) -> dict[str, Any]:
        """Return the status document when the sidecar answers.

        Raises ChildError, with its log, when it does not.
        """
        end_s = time.monotonic() + deadline_s
        while True:
            listens = (self.run_dir / "attach.sock").exists()
            document = self.try_status() if listens else None
            if document is not None:
                return document
            if self.process.poll() is not None:
                raise ChildError(
                    f"the sidecar ended with {self.process.returncode}:\n{self.tail()}"
                )
            if time.monotonic() > end_s:
                raise ChildError(f"no answer of the sidecar in {deadline_s} s:\n{self.tail()}")
            time.sleep(_POLL_S)

    def try_status(self) -> dict[str, Any] | None:
        """Return the status document, or None when the sidecar does not answer."""
        try:
            document: dict[str, Any] = json.loads(ask_status(self.run_dir, SIDECAR_START_S))
        except NoSidecarError:
            return None
        return document

    def loaded_bytes(self) -> int:
        """Return the bytes loaded into engines so far. Raises ChildError without an answer."""
        return int(self.wait_ready()["pipeline"]["ledger"]["loaded_bytes"])

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        unlink_pool(self.pool_name)


class Engine(Child):
    """A real vLLM engine process that carries out one command after the other."""

    def __init__(
        self,
        setup: protocol.EngineSetup,
        folder: Path,
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        python: Sequence[str] = (sys.executable, "-m", "kvferry_demo.engine"),
        own_group: bool = False,
    ) -> None:
        file = folder / f"engine-{secrets.token_hex(4)}.json"
        file.write_bytes(protocol.encoder.encode(setup))
        variables = {**ENGINE_ENVIRONMENT, **(environment or {})}
        command = in_environment(variables, [*python, str(file)])
        super().__init__(command, log, pipes=True, own_group=own_group)
        self._buffer = b""

    def wait_ready(self) -> protocol.Ready:
        """Return the engine's facts when it serves. Raises ChildError when it does not."""
        reply = self._receive(ENGINE_START_S)
        if not isinstance(reply, protocol.Ready):
            raise ChildError(f"the engine began with {reply!r}:\n{self.tail()}")
        return reply

    def call(self, command: protocol.Command) -> protocol.Reply:
        """Carry out one command. Raises ChildError when the engine failed or ended."""
        self.begin(command)
        return self.reply()

    def begin(self, command: protocol.Command) -> None:
        """Give a command without waiting; ``reply`` must follow."""
        assert self.process.stdin is not None, "built with pipes"
        self.process.stdin.write(protocol.encoder.encode(command) + b"\n")
        self.process.stdin.flush()

    def reply(self) -> protocol.Reply:
        """Return the reply to ``begin``. Raises ChildError when the engine failed or ended."""
        reply = self._receive(ENGINE_REPLY_S)
        if isinstance(reply, protocol.Failure):
            raise ChildError(f"the engine failed: {reply.message}\n{self.tail()}")
        return reply

    def wait_attached(self, beyond_epoch: int = 0, deadline_s: float = 90.0) -> int:
        """Wait until the connector is ready at another epoch than the given one; return it.

        Raises ChildError, naming the connector's state, at the deadline.
        """
        end_s = time.monotonic() + deadline_s
        while True:
            state = self.inspect()
            if state.connector == "ready" and state.epoch != beyond_epoch:
                return state.epoch
            if time.monotonic() > end_s:
                raise ChildError(f"the connector is {state.connector!r}:\n{self.tail()}")
            time.sleep(_POLL_S)

    def inspect(self, *modules: str) -> protocol.State:
        """Return what the process holds, and the files of these modules."""
        reply = self.call(protocol.Inspect(list(modules)))
        assert isinstance(reply, protocol.State), reply
        return reply

    def generate(self, *asks: protocol.Ask) -> list[protocol.Result]:
        """Run requests at the same time; return their results in the order given."""
        reply = self.call(protocol.Generate(list(asks)))
        assert isinstance(reply, protocol.Finished), reply
        return reply.results

    def settle(self, deadline_s: float = 60.0) -> None:
        """Step until the engine sleeps. Raises ChildError when something keeps it awake."""
        reply = self.call(protocol.Settle(deadline_s))
        assert isinstance(reply, protocol.Idle), reply
        if not reply.asleep:
            raise ChildError(f"the engine is awake after {deadline_s} s:\n{self.tail()}")

    def quit(self) -> int:
        """Let the engine shut down in order and return its exit code."""
        assert self.process.stdin is not None, "built with pipes"
        self.process.stdin.write(protocol.encoder.encode(protocol.Quit()) + b"\n")
        self.process.stdin.close()
        return self.process.wait(STOP_S)

    def _receive(self, deadline_s: float) -> protocol.Reply:
        assert self.process.stdout is not None, "built with pipes"
        end_s = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            left_s = end_s - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(left_s, 0.0))
            if not ready:
                raise ChildError(f"no reply of the engine in {deadline_s} s:\n{self.tail()}")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise ChildError(f"the engine ended with {self.process.wait()}:\n{self.tail()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return protocol.reply_decoder.decode(line)


def kvferry_command() -> list[str]:
    """Return the command ``kvferry`` of this very interpreter's installation."""
    # Not the script of that name: a wheel may be installed without its scripts on PATH.
    return [
        sys.executable,
        "-c",
        "import sys; from kvferry_sidecar.cli import main; sys.exit(main())",
    ]


def new_pool_name(use: str) -> str:
    """Return a pool name that no other sidecar of this machine has."""
    return f"kvferry-{use}-{secrets.token_hex(6)}"


def unlink_pool(name: str) -> None:
    """Remove a pool segment; its sidecar has ended. Nothing happens when it is gone already."""
    (SHARED_MEMORY / name).unlink(missing_ok=True)

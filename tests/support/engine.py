"""A real vLLM engine under test: the demo's engine process, one command after the other."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from kvferry_demo import protocol
from kvferry_demo.models import engine_settings, write_model
from kvferry_demo.processes import Engine
from kvferry_demo.prompts import encode, read_corpus
from support.group import GroupChild
from support.logs import watch_log
from support.waiting import wait_until

BLOCK_TOKENS = 128
LOADING = "WAITING_FOR_REMOTE_KVS"
# On a busy machine, or one that stands still at times, an answer may take longer than an engine
# should wait for it; the tests are about what comes of the answer.
PATIENCE: Mapping[str, Any] = {"probe_ms_max": 20_000, "silent_ms_max": 60_000}
TWO_RANKS: Mapping[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_cls": "kvferry_demo.worker.SpreadWorker",
}
_numbers = itertools.count()


class EngineUnderTest(GroupChild, Engine):
    """An engine whose requests are named automatically; none of its processes outlives it."""

    facts: protocol.Ready

    def kill_rank(self, number: int) -> None:
        """Kill the process of a rank, where each has one of its own."""
        self.note_shared()
        os.kill(rank_pids(self.pid)[number], signal.SIGKILL)

    def run(
        self, tokens: Sequence[int], *, max_tokens: int = 8, salt: str | None = None
    ) -> protocol.Result:
        """Run one request alone, then let everything settle: its saves are reported."""
        request = ask(tokens, max_tokens=max_tokens, salt=salt)
        results = self.generate(request)  # an aborted one may be reported along with it
        self.settle()
        return next(one for one in results if one.request == request.request)

    def start(self, *asks: protocol.Ask) -> protocol.Progress:
        """Add requests without a step."""
        return self._progress(protocol.Start(list(asks)))

    def step(self, count: int = 1) -> protocol.Progress:
        """Take engine steps."""
        return self._progress(protocol.Step(count))

    def abort(self, *requests: str) -> protocol.Progress:
        """Abort requests between two steps."""
        return self._progress(protocol.Abort(list(requests)))

    def finish(self) -> list[protocol.Result]:
        """Step until every request has ended."""
        reply = self.call(protocol.Finish())
        assert isinstance(reply, protocol.Finished), reply
        return reply.results

    def step_until_status(self, request: str, status: str) -> None:
        """Step until a request has a scheduler status; it must not end before."""

        def reached() -> bool:
            progress = self.step()
            assert request not in progress.finished, f"{request} ended before it was {status}"
            return any(one.request == request and one.status == status for one in progress.running)

        wait_until(reached, f"{request} is {status}")

    def reset_prefix_cache(self) -> bool:
        """Return what vLLM says to reset_prefix_cache."""
        reply = self.call(protocol.ResetPrefixCache())
        assert isinstance(reply, protocol.Done), reply
        return reply.ok

    def _progress(self, command: protocol.Command) -> protocol.Progress:
        reply = self.call(command)
        assert isinstance(reply, protocol.Progress), reply
        return reply


def ask(
    tokens: Sequence[int], *, name: str = "", max_tokens: int = 8, salt: str | None = None
) -> protocol.Ask:
    """Return a request under a name that was not used before, unless one is given."""
    request = name or f"request-{next(_numbers)}"
    return protocol.Ask(request, list(tokens), max_tokens, salt)


class Texts:
    """Hands out pieces of real text that no other test of the module gets."""

    def __init__(self) -> None:
        self._text = read_corpus()
        self._at = 0

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` tokens, begun with their own number so none is a prefix."""
        mark = f"piece {self._at}: ".encode()
        own = count - len(mark)
        start = self._at % (len(self._text) - own)
        self._at += own
        return list(encode(mark + self._text[start : start + own]))[:count]


@cache
def model_dir(model: str) -> Path:
    """Return the model's directory, one per test run: its path is part of the model's identity."""
    folder = Path(tempfile.mkdtemp(prefix="kvf-models-"))
    atexit.register(shutil.rmtree, folder)
    return write_model(model, folder)


def rank_pids(engine_pid: int) -> list[int]:
    """Return the processes of an engine's ranks, where each has one of its own."""
    children = Path(f"/proc/{engine_pid}/task").glob("*/children")
    pids = (int(word) for file in children for word in file.read_text().split())
    return [pid for pid in pids if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def hit_of(tokens: Sequence[int]) -> int:
    """Return the longest hit of a wholly stored prompt: whole blocks below its last token."""
    return (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@contextmanager
def running_engine(
    run_dir: Path | str = "",
    *,
    model: str = "llama",
    environment: Mapping[str, str] | None = None,
    python: Sequence[str] | None = None,
    attached: bool = True,
    connector_extra: Mapping[str, Any] | None = None,
    engine_args: Mapping[str, Any] | None = None,
    **setup: Any,
) -> Iterator[EngineUnderTest]:
    """Yield an engine that serves; with ``attached``, when its connector is ready.

    ``run_dir`` empty: without a connector. ``setup`` overrides fields of EngineSetup.
    """
    with tempfile.TemporaryDirectory(prefix="kvf-engine-") as name:
        folder = Path(name)
        whole = protocol.EngineSetup(
            model_dir=str(model_dir(model)),
            run_dir=str(run_dir),
            connector_extra={**PATIENCE, **(connector_extra or {})},
            engine_args={**engine_settings(model, model_dir(model)), **(engine_args or {})},
            **setup,
        )
        log = folder / "engine.log"
        launch = {} if python is None else {"python": python}
        with (
            watch_log(f"engine {model}", log),
            EngineUnderTest(whole, folder, log, environment=environment, **launch) as engine,
        ):
            engine.facts = engine.wait_ready()
            if run_dir and attached:
                engine.wait_attached()
            yield engine

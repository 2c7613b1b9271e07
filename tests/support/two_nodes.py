"""Two nodes under one engine: two run directories, each with a sidecar, over one real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvferry_sidecar.cli.api import Api
from support.books import read_status, wait_settled
from support.four_ranks import EngineOfRanks, engine_of_ranks
from support.redis_server import RedisServer
from support.server import serving
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags
from support.slow_tiers import POOL_BYTES, settings_of
from support.waiting import wait_until


class TwoNodes:
    """A sidecar per node; of an engine's ranks the first is on the first node, all others not."""

    def __init__(
        self, folder: Path, store: RedisServer, first: SidecarUnderTest, second: SidecarUnderTest
    ) -> None:
        self._folder = folder
        self.store, self.first, self.second = store, first, second

    @contextmanager
    def engine(self, specs: dict[str, Any], **options: Any) -> Iterator[EngineOfRanks]:
        """Yield an engine of two ranks that both nodes serve."""
        options = {"ranks": 2, "apart": self.second.run_dir} | options
        folder = self._folder / f"model-{options.get('dcp', 1)}"  # the config depends on it
        folder.mkdir(exist_ok=True)
        with engine_of_ranks(folder, self.first.run_dir, specs, **options) as engine:
            wait_served(engine)
            yield engine

    def run(
        self, specs: dict[str, Any], name: str, tokens: list[int], *, max_tokens: int = 1,
        **options: Any,
    ) -> int:  # fmt: skip
        """Run one request in an engine of its own, so that the engine itself holds nothing."""
        with self.engine(specs, **options) as engine:
            hit = engine.run(name, tokens, max_tokens)
            # A rank may hear of its own sidecar after the scheduler half has.
            assert set(engine.failures) <= {"sidecar_away"}, engine.failures
        self.idle()
        return hit

    def idle(self) -> None:
        """Nothing is open or leased on either node, and all saved objects are in the store."""
        for sidecar in (self.first, self.second):
            wait_settled(sidecar.run_dir)
            wait_until(lambda one=sidecar: written_on(one), "all is in the store")


@contextmanager
def two_nodes(
    folder: Path, *, pool_bytes: int = POOL_BYTES, **settings: object
) -> Iterator[TwoNodes]:
    """Yield nodes that serve; ``settings`` of both sidecars, with __ for each dot."""
    with ExitStack() as stack:
        store = stack.enter_context(serving(RedisServer(folder)))
        flags = set_flags(settings_of(store.url, settings))
        first, second = (
            stack.enter_context(running_sidecar(pool_bytes=pool_bytes, flags=flags))
            for _ in range(2)
        )
        yield TwoNodes(folder, store, first, second)


def wait_served(engine: EngineOfRanks) -> None:
    """Step until hits are possible on all nodes."""

    def served() -> bool:
        engine.step()
        return engine.connector.attachment()[0] == "ready"

    wait_until(served, "all ranks of all nodes are registered")


def clear_pool(sidecar: SidecarUnderTest) -> None:
    """Drop what the pool holds; the store keeps its own."""
    Api(sidecar.run_dir).act("clear-pool")


def faults(sidecar: SidecarUnderTest, rules: str) -> None:
    """Put these rules of the fault kit in force instead of all others."""
    Api(sidecar.run_dir).act("faults", rules=rules)


def loaded_bytes(sidecar: SidecarUnderTest) -> int:
    """Bytes loaded into engines so far."""
    return int(read_status(sidecar.run_dir)["pipeline"]["ledger"]["loaded_bytes"])


def saved_bytes(sidecar: SidecarUnderTest) -> int:
    """Bytes saved by engines so far."""
    return int(read_status(sidecar.run_dir)["pipeline"]["ledger"]["saved_bytes"])


def written_on(sidecar: SidecarUnderTest) -> bool:
    """Whether nothing waits to be written to the store."""
    waiting: Any = Api(sidecar.run_dir).act("flush")["waiting"]
    return not any(waiting.values())


def from_store(sidecar: SidecarUnderTest) -> int:
    """Tokens of hits that came from the store so far."""
    hits = read_status(sidecar.run_dir)["pipeline"]["journal"]["hit_tokens"]
    return int(hits.get("external", 0))


def asks(sidecar: SidecarUnderTest) -> int:
    """Questions of schedulers so far."""
    return int(read_status(sidecar.run_dir)["pipeline"]["asks"])

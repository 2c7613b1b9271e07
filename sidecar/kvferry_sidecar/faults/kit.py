"""The fault kit of one sidecar: what stands between its parts, if it is enabled."""

from __future__ import annotations

from collections.abc import Callable

from kvferry_native import Pool
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.config import FaultsConfig
from kvferry_sidecar.engines.base import CopyEngine
from kvferry_sidecar.errors import RequestError
from kvferry_sidecar.faults.copies import FaultyCopies, FaultyPool
from kvferry_sidecar.faults.frames import FrameFaults
from kvferry_sidecar.faults.rules import Book, RuleView, parse_all
from kvferry_sidecar.loop import Loop
from kvferry_sidecar.tiers.host import HostTier


class FaultKit:
    """Not enabled, it hands back what it is given. Raises RequestError for a bad rule."""

    def __init__(self, config: FaultsConfig, loop: Loop, log: Log) -> None:
        self._loop, self._log = loop, log
        self._book: Book | None = None
        self._copies: FaultyCopies | None = None
        self.frames: FrameFaults | None = None
        if config.enabled:
            self._book = Book(parse_all(config.rules), config.seed)
            self.frames = FrameFaults(self._book, loop.now_s)
            log.warning(
                "fault injection is enabled: frames, copies and commits fail as the rules say",
                rules=config.rules or "none yet",
                remedy="never in production: remove faults.enabled",
            )

    def pool(self, pool: Pool) -> HostTier:
        """Return the host tier over a pool."""
        return HostTier(pool) if self._book is None else FaultyPool(pool, self._book)

    def copies(self, engine: CopyEngine) -> CopyEngine:
        """Return the engine, or what stands before it."""
        if self._book is None:
            return engine
        self._copies = FaultyCopies(engine, self._book, self._loop.now_s)
        return self._copies

    def start(self, on_copies: Callable[[float], None]) -> None:
        """Let what is due go on in the loop's turns; ``on_copies`` collects results."""
        if self._book is not None:
            self._loop.add_ticker("faults", lambda now_s: self._tick(now_s, on_copies))

    def act(self, rules: str | None, *, dry_run: bool) -> list[RuleView]:
        """Replace the rules, unless ``rules`` is None, and return those in force.

        Raises RequestError when not enabled or for a bad rule, and then nothing has changed.
        """
        if self._book is None:
            raise RequestError(
                "fault injection is not enabled",
                "start a sidecar for tests with --set faults.enabled=true",
            )
        if rules is not None:
            parsed = parse_all(rules)
            if not dry_run:
                self._log.warning("fault rules replaced", rules=rules or "none")
                self._book.replace(parsed)
        return self._book.view()

    def _tick(self, now_s: float, on_copies: Callable[[float], None]) -> float:
        assert self.frames is not None
        assert self._copies is not None
        wait_s = min(self.frames.tick(now_s), self._copies.tick(now_s))
        while self._copies.waiting():
            on_copies(now_s)
        return wait_s

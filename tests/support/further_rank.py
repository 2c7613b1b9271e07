"""A rank beside the one that ScriptedNode plays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvferry_connector.jobs import Report
from support.scripted_node import StepEnd


@dataclass
class FurtherRank:
    """A rank beside the scripted one: it ends each job as that one, ``lag`` steps later.

    With ``fails`` its loads fail, and find ``shorter`` tokens whole.
    """

    rank: int
    lag: int = 0
    fails: bool = False
    shorter: int = 0
    _waiting: deque[StepEnd] = field(default_factory=deque)

    def step(self, first: StepEnd) -> StepEnd:
        """What it reports in the step in which the first rank reports ``first``."""
        self._waiting.append(self._of(first))
        if len(self._waiting) <= self.lag:
            return StepEnd()
        return self._waiting.popleft()

    def _of(self, first: StepEnd) -> StepEnd:
        own = StepEnd(finished=set(first.finished), failed=set(first.failed))
        for job, (report,) in first.reports.items():
            own.reports[job] = [report._replace(rank=self.rank)]
            if self.fails and first.finished:
                failed = Report(self.rank, "failed", "scripted", self.shorter)
                own.reports[job], own.failed = [failed], set(first.finished)
        return own

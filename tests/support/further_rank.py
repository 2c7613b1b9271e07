"""What ranks put out in a step, and a rank beside the one that ScriptedNode plays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvferry_connector.jobs import Report
from kvferry_connector.meta import FerryWorkerMetadata
from support.other_connector import joined
from support.scripted_node import StepEnd
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


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
        own = StepEnd({}, set(first.finished), set(first.failed), ended_step=first.ended_step)
        for job, (report,) in first.reports.items():
            own.reports[job] = [report._replace(rank=self.rank)]
            if self.fails and first.finished:
                failed = Report(self.rank, "failed", "scripted", self.shorter)
                own.reports[job], own.failed = [failed], set(first.finished)
        return own


def rank_output(
    outer: Any, names: list[str], sampled: list[list[int]], end: StepEnd
) -> ModelRunnerOutput:
    said = bool(end.reports or end.ended_step)
    reports = FerryWorkerMetadata(end.reports, ended_step=end.ended_step) if said else None
    kv_output = KVConnectorOutput(
        invalid_block_ids=end.invalid,
        finished_recving=end.finished or None,
        failed_recving=end.failed,
        kv_connector_worker_meta=joined(outer, reports),
    )
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=sampled,
        kv_connector_output=None if kv_output.is_empty() else kv_output,
    )

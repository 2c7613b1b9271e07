"""One reading of the whole sidecar: taken by the control loop, immutable, read by any thread."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry_sidecar.doctor.finding import Finding
from kvferry_sidecar.observe.paths import PathsReading
from kvferry_sidecar.observe.status import Document
from kvferry_sidecar.observe.traces import TracesReading
from kvferry_sidecar.outcomes.histogram import HistogramReading
from kvferry_sidecar.stages.snapshot import PipelineSnapshot


@dataclass(frozen=True, slots=True)
class LoopView:
    """The loop, the sockets and what they refused."""

    turns: int
    longest_turn_s: float
    handler_errors: int
    connections: int
    leaving_halves: int
    attach_refused: dict[str, int]
    frames_refused: dict[str, int]
    log_lines_lost: int
    turn_seconds: HistogramReading
    message_seconds: dict[str, HistogramReading]  # handling one, by kind


@dataclass(frozen=True, slots=True)
class Reading:
    """``taken_s``: monotonic; ``started_s``: seconds since 1970."""

    document: Document
    pipeline: PipelineSnapshot
    loop: LoopView
    taken_s: float
    started_s: float
    findings: tuple[Finding, ...] = ()  # of the doctor, at the start
    traces: TracesReading | None = None
    paths: PathsReading | None = None  # added by the thread that asked

"""A finished record as spans, and whether its trace is kept. Nothing here knows OpenTelemetry.

request                     hashes came .. forgotten by the engine
  probe                     hashes came .. hint
  stage-in                  an ask waited for slower tiers .. answer
  load | save               job taken .. every rank terminal
    fence, queue, copy      the slowest rank's stages
    outcome                 how it ended, at its end
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from kvferry_connector.wire.hot import JobStatusName

from kvferry_sidecar.observe import verdicts
from kvferry_sidecar.outcomes.ledger import STAGES
from kvferry_sidecar.outcomes.records import JobEnd, Record

Fact = str | int | float | bool
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NONE = re.compile("0+")


class Span(NamedTuple):
    """One span with its children; times are monotonic seconds."""

    name: str
    start_s: float
    end_s: float
    facts: dict[str, Fact]
    error: str = ""
    children: tuple[Span, ...] = ()


class Parent(NamedTuple):
    """The engine's trace context (W3C traceparent): hexadecimal ids."""

    trace_id: str
    span_id: str
    sampled: bool


class Keep(NamedTuple):
    """Which traces are kept. Failed ones always, and those with a part of ``slow_ms`` or more."""

    sample_percent: int
    slow_ms: int


def parent_of(record: Record) -> Parent | None:
    """Return the context that the engine handed over; None for none, or one that is none."""
    found = _PARENT.fullmatch(record.trace)
    if found is None or _NONE.fullmatch(found[1]) or _NONE.fullmatch(found[2]):
        return None
    return Parent(found[1], found[2], bool(int(found[3], 16) & 1))


def trace_id_of(record: Record) -> str:
    """Return the trace's id, 32 hexadecimal digits: the engine's, else one made of the record."""
    parent = parent_of(record)
    if parent is not None:
        return parent.trace_id
    name = f"{'/'.join(record.engine)}/{record.admission}/{record.at_s!r}"
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def keeps(record: Record, keep: Keep) -> bool:
    """Say whether the trace of a finished record is exported."""
    if record.load == JobStatusName.FAILED or slowest_s(record) * 1e3 >= keep.slow_ms:
        return True
    if any(job.status == JobStatusName.FAILED for job in record.jobs):
        return True
    parent = parent_of(record)
    if parent is not None:
        return parent.sampled
    return int(trace_id_of(record)[16:], 16) * 100 < keep.sample_percent << 64


def slowest_s(record: Record) -> float:
    """Return the longest of what the sidecar did for a request: lookup, staging, each job."""
    took = [job.ended_s - job.opened_s for job in record.jobs]
    if record.hint_s:
        took.append(record.hint_s - record.at_s)
    if record.held_s and record.answer_s:
        took.append(record.answer_s - record.held_s)
    return max(took, default=0.0)


def last_s(record: Record) -> float:
    """Return when something happened last."""
    ends = (job.ended_s for job in record.jobs)
    return max(record.at_s, record.hint_s, record.answer_s, record.ended_s, *ends)


def spans_of(record: Record) -> Span:
    """Return the request's span with all below it."""
    facts: dict[str, Fact] = {
        "kvferry.request": record.request,
        "kvferry.engine": "/".join(record.engine),
        "kvferry.admission": record.admission,
        "kvferry.prompt_tokens": record.prompt_tokens,
        "kvferry.local_tokens": record.local_tokens or 0,
        "kvferry.wanted_tokens": record.wanted_tokens,
        "kvferry.hit_tokens": verdicts.hit_tokens(record),
        "kvferry.loaded_tokens": record.loaded_tokens,
        "kvferry.reason": str(record.load_reason or record.why.reason),
        "kvferry.verdict": verdicts.verdict(record),
    }
    facts |= {f"kvferry.from.{tier}": tokens for tier, tokens in (record.sources or {}).items()}
    error = str(record.load_reason or "failed") if record.load == JobStatusName.FAILED else ""
    children = tuple(_children(record))
    return Span("request", record.at_s, last_s(record), facts, error, children)


def flat(root: Span) -> Iterator[tuple[Span, int | None]]:
    """Yield every span with the number of its parent in this order; the root's is None."""
    yield root, None
    number = 0
    waiting = [(child, 0) for child in reversed(root.children)]
    while waiting:
        span, above = waiting.pop()
        number += 1
        yield span, above
        waiting += [(child, number) for child in reversed(span.children)]


def _children(record: Record) -> Iterator[Span]:
    if record.hint_tokens is not None:
        facts: dict[str, Fact] = {"kvferry.tokens": record.hint_tokens}
        yield Span("probe", record.at_s, record.hint_s, facts)
    if record.held_s and record.answer_s:
        facts = {"kvferry.tokens": record.offered_tokens, "kvferry.asks": record.asks}
        yield Span("stage-in", record.held_s, record.answer_s, facts)
    for job in record.jobs:
        yield _job(job)


def _job(job: JobEnd) -> Span:
    """Return a job with its slowest rank's stages, which end where the job does."""
    at_s = max(job.opened_s, job.ended_s - sum(job.stages))
    children = []
    for stage, seconds in zip(STAGES, job.stages, strict=True):
        children.append(Span(stage, at_s, at_s + seconds, {}))
        at_s += seconds
    ended: dict[str, Fact] = {"kvferry.status": job.status, "kvferry.reason": str(job.reason)}
    error = str(job.reason or job.status) if job.status == JobStatusName.FAILED else ""
    children.append(Span("outcome", job.ended_s, job.ended_s, ended, error))
    facts: dict[str, Fact] = {
        "kvferry.end_tokens": job.end_tokens,
        "kvferry.moved_bytes": job.moved_bytes,
        **ended,
    }
    return Span(job.kind, job.opened_s, job.ended_s, facts, error, tuple(children))

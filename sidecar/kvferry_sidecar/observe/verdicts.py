"""One request in words: what it hit, why not more, and what became of its load."""

from __future__ import annotations

import msgspec

from kvferry_sidecar.outcomes.ledger import STAGES
from kvferry_sidecar.outcomes.reasons import EXPLANATIONS, Reason
from kvferry_sidecar.outcomes.records import JobEnd, Record


class EventView(msgspec.Struct, frozen=True):
    """One point of the timeline; ``after_s``: since the record began."""

    after_s: float
    what: str
    tokens: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = {}  # seconds of a job's slowest rank
    detail: str = ""


class RecordView(msgspec.Struct, frozen=True):
    """A record as the API gives it. ``age_s``: since it began; ``took_s``: until its last event."""

    request: str
    engine: str
    admission: int
    age_s: float
    took_s: float
    prompt_tokens: int
    local_tokens: int
    wanted_tokens: int
    hit_tokens: int  # offered beyond the engine's own
    loaded_tokens: int
    load: str
    reason: str
    ended: bool
    verdict: str
    remedy: str = ""
    sources: dict[str, int] = {}
    asks: int = 0
    saved_objects: int = 0
    timeline: list[EventView] = []
    jobs_lost: int = 0
    trace_id: str = ""  # of the trace that was sent


def view(record: Record, now_s: float, *, timeline: bool) -> RecordView:
    """Return a record for readers; without its timeline where many are listed."""
    reason = record.load_reason or record.why.reason
    times = [record.hint_s, record.answer_s, record.ended_s, *(j.ended_s for j in record.jobs)]
    return RecordView(
        request=record.request,
        engine="/".join(record.engine),
        admission=record.admission,
        age_s=now_s - record.at_s,
        took_s=max(0.0, max(times) - record.at_s),
        prompt_tokens=record.prompt_tokens,
        local_tokens=record.local_tokens or 0,
        wanted_tokens=record.wanted_tokens,
        hit_tokens=hit_tokens(record),
        loaded_tokens=record.loaded_tokens,
        load=record.load,
        reason=str(reason),
        ended=record.ended_s > 0,
        verdict=verdict(record),
        remedy=EXPLANATIONS[reason].remedy if reason else "",
        sources=dict(record.sources or {}),
        asks=record.asks,
        saved_objects=record.saved_objects,
        timeline=_timeline(record) if timeline else [],
        jobs_lost=record.jobs_lost,
        trace_id=record.trace_id,
    )


def _timeline(record: Record) -> list[EventView]:
    """Return what happened, in order."""
    points = [(record.at_s, EventView(0.0, "hashes", record.prompt_tokens))]
    if record.hint_tokens is not None:
        points.append((record.hint_s, EventView(0.0, "hint", record.hint_tokens)))
    if record.answer_s:
        detail = f"ask {record.asks}" if record.asks > 1 else ""
        answer = EventView(0.0, "answer", record.offered_tokens, detail=detail)
        points.append((record.answer_s, answer))
    if record.held_s:
        points.append((record.held_s, EventView(0.0, "stage-in", detail="waits for slower tiers")))
    if record.load_s:
        points.append((record.load_s, EventView(0.0, "load", record.offered_tokens)))
    points += [(job.ended_s, _job(job)) for job in list(record.jobs)]
    if record.ended_s:
        points.append((record.ended_s, EventView(0.0, "released")))
    return [
        msgspec.structs.replace(event, after_s=at_s - record.at_s)
        for at_s, event in sorted(points, key=lambda point: point[0])
    ]


def _job(job: JobEnd) -> EventView:
    stages = dict(zip(STAGES, job.stages, strict=True))
    detail = ", ".join(f"{stage} {seconds * 1e3:.2f} ms" for stage, seconds in stages.items())
    return EventView(
        after_s=0.0,
        what=f"{job.kind} {job.status}",
        tokens=job.end_tokens,
        moved_bytes=job.moved_bytes,
        seconds=job.ended_s - job.opened_s,
        stages=stages,
        detail=f"{job.reason}, {detail}" if job.reason else detail,
    )


def hit_tokens(record: Record) -> int:
    """Return the tokens that were offered beyond what the engine had itself."""
    return max(0, record.offered_tokens - (record.local_tokens or 0))


def verdict(record: Record) -> str:
    """Return the whole story of a request in one to three sentences."""
    sentences = [_lookup(record), _load(record), _saves(record)]
    return " ".join(sentence for sentence in sentences if sentence)


def _lookup(record: Record) -> str:
    why = _why(record)
    if record.asks:
        return _answer(record, why)
    if record.hint_tokens is None:
        return f"Not looked up: {why}." if why else "Its hashes came; nothing was answered yet."
    if record.hint_tokens:
        if record.ended_s:
            return "The engine did not ask: it had as much itself, or the request ended before."
        return f"{record.hint_tokens:,} tokens are stored; the engine has not asked yet."
    if not record.wanted_tokens:
        return "No hit is possible: the prompt is not longer than one block."
    return f"No hit: {why}."


def _answer(record: Record, why: str) -> str:
    tokens, local = hit_tokens(record), record.local_tokens
    if local is None:
        return f"Answered with nothing: {why}."
    beyond = f" beyond the {local:,} the engine had itself" if local else ""
    if not tokens:
        if record.wanted_tokens <= local:
            return "Nothing to load: the engine had all that could hit itself."
        return f"No hit{beyond}: {why}." if why else f"No hit{beyond}."
    sources = ", ".join(f"{count:,} from {tier}" for tier, count in (record.sources or {}).items())
    whole = f"Hit {tokens:,} tokens{beyond} ({sources})"
    short = record.wanted_tokens - record.offered_tokens
    return f"{whole}; the other {short:,} missed: {why}." if short > 0 and why else f"{whole}."


def _load(record: Record) -> str:
    if record.load == "done":
        return f"Loaded {record.loaded_tokens:,} tokens."
    if record.load == "open":
        return "The load is under way."
    if record.load:
        meaning = EXPLANATIONS[record.load_reason].meaning
        after = "the engine computes the tokens, or does as its kv_load_failure_policy says"
        return f"The load {record.load}: {meaning}; {after}."
    if hit_tokens(record) and record.ended_s:
        return (
            "The engine did not take the hit: the answer came after its time (probe_ms_max), "
            "no blocks were free, or the request ended."
        )
    return ""


def _saves(record: Record) -> str:
    if not record.saves:
        return ""
    return f"Saved {record.saved_objects:,} new objects."


def _why(record: Record) -> str:
    reason, detail = record.why
    if reason is Reason.NONE:
        return ""
    meaning = EXPLANATIONS[reason].meaning
    return f"{meaning} ({detail})" if detail else meaning

"""The status document and the configuration as tables for people."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvferry_sidecar.config import Loaded
from kvferry_sidecar.engines.base import GpuUse
from kvferry_sidecar.observe.progress import WorkStatus
from kvferry_sidecar.observe.status import Document, HalfStatus, PoolStatus, SessionStatus
from kvferry_sidecar.outcomes.histogram import HistogramReading
from kvferry_sidecar.settings import size_text

PIPED_WIDTH = 120


def console() -> Console:
    """Return the console for stdout; piped output gets a fixed width and no colours."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def status(document: Document, *, everything: bool = False) -> RenderableType:
    """Return the status as tables; ``everything`` that is counted, or what tells how it goes.

    What grows with the engines comes last: `kvferry top` shows as much as the terminal has lines.
    """
    state = f"{document.state or 'serving'}, up {duration(document.uptime_s)}"
    parts: list[RenderableType] = [
        Text(
            f"kvferry {document.kvferry} {state}, epoch {document.epoch}, pid {document.pid}, "
            f"{len(document.sessions)} session(s)"
        ),
        *(Text(f"degraded: {text}", style="yellow") for text in document.degraded.values()),
        *(Text(_work(work), style="bold") for work in document.progress),
        *(Text(_ended(work), style="dim") for work in document.ended),
    ]
    if document.pool:
        parts.append(_pool(document.pool))
    pipeline = document.pipeline if isinstance(document.pipeline, Mapping) else {}
    if pipeline:
        parts.append(summary(pipeline))
        if told := curve(pipeline):
            parts.append(Text(told))
        parts.extend(_tiers(pipeline.get("tiers") or ()))
    parts.extend(Text(_gpu(gpu)) for gpu in document.gpus)
    if document.sessions_left_out:
        parts.append(Text(f"{document.sessions_left_out} sessions left out: too many to show"))
    if document.sessions:
        parts.append(_sessions(document.sessions))
    for session in document.sessions:
        parts.extend(Text(f"note: {note}", style="yellow") for note in session.notes)
    parts.extend(_pipeline(pipeline, everything=everything))
    if isinstance(document.loop, Mapping) and everything:
        parts.append(_tree("loop", document.loop))
    return Group(*parts)


def _gpu(gpu: GpuUse) -> str:
    free, total, staging, mapped = map(
        size_text, (gpu.free_bytes, gpu.total_bytes, gpu.staging_bytes, gpu.mapped_bytes)
    )
    return (
        f"GPU {gpu.device}: {free} of {total} free, {staging} staging, {mapped} of engines mapped"
    )


def _work(work: WorkStatus) -> str:
    is_bytes = work.unit == "bytes"
    done, total = (size_text(n) if is_bytes else f"{n:,}" for n in (work.done, work.total))
    left = "" if work.left_s is None else f", about {duration(work.left_s)} to go"
    unit = "" if is_bytes else f" {work.unit}"
    return f"{work.name}: {done} of {total}{unit} in {duration(work.seconds)}{left}"


def _ended(work: WorkStatus) -> str:
    end = "done" if work.done >= work.total else "ended early"
    return f"{_work(msgspec.structs.replace(work, left_s=None))}, {end}"


def settings(loaded: Loaded) -> RenderableType:
    """Return every setting with its value and where it came from."""
    table = _table("configuration", "key", "value", "from")
    for key, value, origin in loaded.rows():
        table.add_row(key, value, origin, style=None if origin.startswith("default") else "bold")
    return table


def _sessions(sessions: Iterable[SessionStatus]) -> Table:
    table = _table(
        "sessions", "engine", "model", "half", "state", "pid", "memory", "beat", "namespace"
    )
    for session in sessions:
        name = f"{session.engine_id}/{session.instance_id}"
        missing = sorted(set(session.ranks) - {half.rank for half in session.halves})
        for number, half in enumerate(session.halves):
            table.add_row(
                name if number == 0 else "",
                session.identity.get("model", "") if number == 0 else "",
                half.role if half.rank < 0 else f"{half.role} {half.rank}",
                _state(session, half),
                str(half.pid),
                size_text(half.memory_bytes) if half.memory_bytes else "-",
                f"{half.beat_age_s:.1f} s ago",
                session.namespace[:12] if number == 0 else "",
            )
        if missing:
            table.add_row("", "", f"worker {', '.join(map(str, missing))}", "not attached")
    return table


def _state(session: SessionStatus, half: HalfStatus) -> str:
    state = "ready" if session.ready else "registered" if half.registered else "attached"
    return state if half.connected else f"{state}, disconnected"


def _pool(pool: PoolStatus) -> Table:
    table = _table("pool", "used", "of", "objects", "leased", "writing", "doomed", "evictions")
    share = pool.used_bytes / pool.total_bytes if pool.total_bytes else 0.0
    table.add_row(
        f"{size_text(pool.used_bytes)} ({share:.0%})",
        size_text(pool.total_bytes),
        f"{pool.ready:,} (at most {pool.keys_max:,})",
        f"{pool.leased:,}",
        f"{pool.writing:,}",
        f"{pool.doomed:,}",
        f"{pool.evictions:,} ({pool.dropped_before_reuse:,} never used)",
    )
    return table


def summary(pipeline: Mapping[str, Any]) -> RenderableType:
    """Return how lookups went: what was offered of what was wanted, and why not the rest."""
    hit, missed = pipeline.get("hit_tokens", 0), pipeline.get("missed_tokens", 0)
    journal = pipeline.get("journal") or {}
    table = _table("lookups", "what", "tokens", "share", "requests")
    wanted = hit + missed
    rows = [
        ("wanted beyond the engines' own", wanted, ""),
        ("offered", hit, pipeline.get("hit_requests", 0)),
        ("loaded", (journal.get("load_tokens") or {}).get("done", 0), ""),
    ]
    requests = journal.get("miss_requests") or {}
    misses = (journal.get("miss_tokens") or {}).items()
    rows += [
        (f"missed: {reason}", tokens, requests.get(reason, 0))
        for reason, tokens in sorted(misses, key=lambda one: -one[1])
    ]
    for what, tokens, count in rows:
        share = f"{tokens / wanted:.0%}" if wanted else "-"
        table.add_row(what, f"{tokens:,}", share, f"{count:,}" if count != "" else "")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _tiers(tiers: Iterable[Mapping[str, Any]]) -> Iterator[Table]:
    """Yield disk and remote stores: whether they work, over what, and what moved."""
    table = _table("slower tiers", "tier", "state", "transport", "read", "written", "calls open")
    for one in tiers:
        counts = one.get("counts") or {}
        sizes = (size_text(counts.get(f"{way}_bytes", 0)) for way in ("get", "put"))
        state = ": ".join(filter(None, (one.get("state"), one.get("reason"))))
        transport = (one.get("facts") or {}).get("transport", "-")
        table.add_row(one.get("name"), state, transport, *sizes, str(one.get("calls_open", 0)))
    if table.row_count:
        yield table


def curve(pipeline: Mapping[str, Any]) -> str:
    """Return what pools of other sizes would hold, in words; empty where nothing is known."""
    one = (pipeline.get("journal") or {}).get("curve") or {}
    wanted = one.get("recent_wanted_tokens", 0)
    if not wanted:
        return ""
    missed = dict(zip(one["sizes"], one["recent_missed_tokens"], strict=True))
    shares = (f"{max(0.0, 1 - missed[size] / wanted):.0%}" for size in (0.5, 1.0, 2.0))
    half, same, double = shares
    return (
        f"the last hour's lookups, estimated: a pool of this size holds {same} of the tokens, "
        f"half of it {half}, twice {double}"
    )


def duration(seconds: float) -> str:
    """Return a time for people, in its two largest units."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (unit, size), (less, smaller) in itertools.pairwise(units):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {less}"
    return f"{seconds:.0f} s"


def _pipeline(pipeline: Mapping[str, Any], *, everything: bool) -> Iterator[RenderableType]:
    """Yield jobs by session, their ends by reason, then whatever else the snapshot counts."""
    rest = dict(pipeline)
    total, sessions = rest.pop("ledger", {}), rest.pop("sessions", {})
    if total:
        numbers = ("accepted", "open", "done", "failed", "cancelled", "refused")
        table = _table("jobs, one per rank", "engine", *numbers, "loaded", "saved")
        for name, totals in (*sessions.items(), ("all", total)):
            sizes = (size_text(totals.get(f"{way}_bytes", 0)) for way in ("loaded", "saved"))
            table.add_row(name, *(f"{totals.get(number, 0):,}" for number in numbers), *sizes)
        yield table
    yield from _latency(rest.get("stage_seconds") or {})
    if reasons := total.get("reasons"):
        yield _tree("outcomes by reason", reasons)
    for violation in rest.pop("violations", ()):
        yield Text(f"violation: {violation}", style="red")
    if everything:
        yield _tree("leases, lookups and outcomes", rest)


def _latency(stages: Mapping[str, Any]) -> Iterator[Table]:
    """Yield how long each stage of loads and saves takes; at most, by bounds of buckets."""
    table = _table("milliseconds by stage, at most", "stage", "p50", "p95", "p99")
    for name, told in stages.items():
        one = msgspec.convert(told, HistogramReading)
        if one.count:
            shares = (one.quantile(share) * 1e3 for share in (0.5, 0.95, 0.99))
            table.add_row(name.replace("/", " "), *(f"{ms:,g}" for ms in shares))
    for column in table.columns[1:]:
        column.justify = "right"
    if table.row_count:
        yield table


def _tree(title: str, tree: Mapping[str, object]) -> Table:
    table = _table(title, "what", "value")
    table.columns[1].justify = "right"
    for name, value in _leaves(tree):
        table.add_row(name, value)
    return table


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", f"{len(value)} entries" if value else "none"
        elif isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{prefix}{name}", str(value)
        elif name.endswith("bytes") and isinstance(value, int):
            yield f"{prefix}{name}", size_text(value)
        else:
            yield f"{prefix}{name}", f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", header_style="bold", box=None)

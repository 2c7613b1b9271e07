"""What is open now, for operators: jobs with their ranks, leases with their owners."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import msgspec
from kvferry_connector.wire.hot import LoadJob

from kvferry_sidecar.masks.load import load_mask
from kvferry_sidecar.outcomes.records import Records
from kvferry_sidecar.sessions.leases import Lease
from kvferry_sidecar.stages.parts import JobRun
from kvferry_sidecar.stages.shape import SessionShape

listed_max = 1000  # jobs and leases of one answer, the oldest first


class RankView(msgspec.Struct, frozen=True):
    """One rank of an open job. ``state``: fence, queued, copying, ended, missing or absent."""

    rank: int
    state: str
    age_s: float
    reason: str = ""


class JobView(msgspec.Struct, frozen=True):
    """One open job."""

    engine: str
    request: str
    job: int
    kind: str
    age_s: float
    start_tokens: int
    end_tokens: int
    ranks: list[RankView]


class LeaseView(msgspec.Struct, frozen=True):
    """One lease. ``idle_s``: since it was confirmed; ``job``: the load that owns it, or 0."""

    engine: str
    request: str
    admission: int
    job: int
    objects: int
    tokens: int
    idle_s: float


class GroupView(msgspec.Struct, frozen=True):
    """One cache group, and the chunks ``[first, chunks)`` that a hit of this length needs."""

    group: int
    kind: str
    block_tokens: int
    window_tokens: int
    save_rule: str
    stripe_bytes: int
    chunks: int
    first: int
    eagle: bool


def group_views(shape: SessionShape, total_tokens: int) -> list[GroupView]:
    """Return what a hit of ``total_tokens`` needs of every group."""
    found = []
    for group, rule in zip(shape.groups, shape.rules.groups, strict=True):
        mask = load_mask(rule, total_tokens=total_tokens)
        found.append(
            GroupView(
                group=group.group,
                kind=group.kind,
                block_tokens=group.block_tokens,
                window_tokens=rule.reach,
                save_rule=group.save_rule,
                stripe_bytes=group.stripe.payload_bytes,
                chunks=len(mask),
                first=int(mask.argmax()) if mask.any() else len(mask),
                eagle=group.group in shape.rules.eagle_ids,
            )
        )
    return found


def job_views(runs: Iterable[JobRun], now_s: float) -> list[JobView]:
    """Return open jobs, oldest first."""
    return [_job(run, now_s) for run in islice(runs, listed_max)]


def lease_views(leases: Iterable[Lease], records: Records, now_s: float) -> list[LeaseView]:
    """Return leases, least recently confirmed first."""
    found = []
    for lease in islice(leases, listed_max):
        record = records.get(lease.key)
        found.append(
            LeaseView(
                engine="/".join(lease.session),
                request=record.request if record is not None else "",
                admission=lease.key.admission,
                job=lease.job or 0,
                objects=lease.entry_count(),
                tokens=lease.total_tokens - lease.local_tokens,
                idle_s=now_s - lease.touched_s,
            )
        )
    return found


def _job(run: JobRun, now_s: float) -> JobView:
    job = run.job
    return JobView(
        engine="/".join(run.session.key),
        request=job.request,
        job=job.job,
        kind=run.work.kind,
        age_s=now_s - run.opened_s,
        start_tokens=job.local_tokens if isinstance(job, LoadJob) else job.start_tokens,
        end_tokens=job.total_tokens if isinstance(job, LoadJob) else job.end_tokens,
        ranks=[_rank(run, rank, now_s) for rank in run.ranks],
    )


def _rank(run: JobRun, rank: int, now_s: float) -> RankView:
    part = run.parts.get(rank)
    if part is None:
        reason = run.absent.get(rank)
        state = "missing" if reason is None else "absent"
        return RankView(rank, state, now_s - run.opened_s, str(reason or ""))
    since_s = part.started_s or part.passed_s or part.accepted_s
    return RankView(
        rank, part.state.value, now_s - since_s, str(part.end.reason) if part.end else ""
    )

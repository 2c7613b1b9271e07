"""Load jobs: a leased prefix is scattered into the engine's blocks and verified on the way."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from kvferry_connector.wire.hot import JobStatusName, LoadJob
from kvferry_connector.wire.names import BOUND_STEP_OFFSET
from kvferry_native import KEY_BYTES
from numpy.typing import NDArray

from kvferry_sidecar.engines.base import CopyStatus, Direction
from kvferry_sidecar.masks.kinds import Kind
from kvferry_sidecar.masks.load import needed_chunks
from kvferry_sidecar.masks.objects import Objects
from kvferry_sidecar.masks.rules import GroupRule
from kvferry_sidecar.outcomes.reasons import Decline, Reason
from kvferry_sidecar.plan.tables import Fault, Table, load_blocks, read_tables
from kvferry_sidecar.sessions.admissions import Keys
from kvferry_sidecar.sessions.leases import Lease, LeaseKey
from kvferry_sidecar.sessions.model import Peer, Session
from kvferry_sidecar.stages.core import Core
from kvferry_sidecar.stages.extents import rank_extents
from kvferry_sidecar.stages.hits import keys_of, stored_hit
from kvferry_sidecar.stages.parts import End, JobRun, Part, PlannedCopy
from kvferry_sidecar.stages.shape import GroupShape, SessionShape, form_of
from kvferry_sidecar.tiers.store import Whose

_NO_KEYS: Keys = np.empty((0, KEY_BYTES), np.uint8)


@dataclass(frozen=True, slots=True)
class _GroupLoad:
    shape: GroupShape
    chunks: NDArray[np.int64]
    keys: Keys  # (n, 16) of the entries; (0, 16) when the admission's are gone
    entries: NDArray[np.uint32]
    blocks: NDArray[np.int32]
    offsets: NDArray[np.uint64]  # of the whole stripes; a rank adds that of its shard
    seeds: NDArray[np.uint32]


def open_load(
    core: Core, session: Session, shape: SessionShape, job: LoadJob, raw: list[bytes]
) -> LoadWork | Decline:
    """Check a load against its lease and tables; from then on the job owns the lease."""
    if len(raw) != 1:
        return Decline(Reason.FRAMES, f"a load has 1 raw frame, {len(raw)} came")
    lease = core.leases.get(LeaseKey(session.life, job.admission))
    if lease is None or lease.job is not None:
        what = "no lease" if lease is None else f"the lease of job {lease.job}"
        return Decline(Reason.LEASE, f"admission {job.admission} has {what}")
    if core.namespace_of(session, job.version) in core.shadows.quarantined:
        return Decline(Reason.QUARANTINED, "its namespace is quarantined")
    if job.version != lease.version:
        return Decline(Reason.VERSION, "the lease was given under another namespace version")
    if not lease.local_tokens <= job.local_tokens <= job.total_tokens <= lease.total_tokens:
        span = f"({job.local_tokens}, {job.total_tokens}]"
        leased = f"({lease.local_tokens}, {lease.total_tokens}]"
        return Decline(Reason.LEASE, f"tokens {span} are not within the lease {leased}")
    tables = read_tables(job.tables, raw[0])
    if isinstance(tables, Fault):
        return Decline(Reason.TABLES, tables.text)
    if unknown := set(tables) - {g.group for g in shape.groups}:
        return Decline(Reason.TABLES, f"groups {sorted(unknown)} do not exist")
    admission = core.admissions.get(session.life, job.admission)
    known = admission if admission is not None and admission.version == job.version else None
    groups = []
    for place, shaped in enumerate(shape.stored_groups()):
        rule = shape.rules.groups[shaped.group]
        keys = known.keys[place] if known is not None else None
        load = _open_group(core, lease, (shaped, rule), job, (tables, keys))
        if isinstance(load, Decline):
            return load
        groups.append(load)
    lease.job = job.job
    return LoadWork(core, shape, lease, job, groups)


def _open_group(
    core: Core,
    lease: Lease,
    group: tuple[GroupShape, GroupRule],
    job: LoadJob,
    known: tuple[dict[int, Table], Keys | None],
) -> _GroupLoad | Decline:
    (shaped, rule), (tables, keys) = group, known
    chunks = needed_chunks(rule, local_tokens=job.local_tokens, total_tokens=job.total_tokens)
    leased = _leased(lease, shaped, chunks, job.total_tokens)
    if leased is None:
        return Decline(Reason.LEASE, f"group {shaped.group}: a chunk is not leased")
    entries, ends = leased
    blocks = load_blocks(
        tables,
        shaped.group,
        rule,
        span=(job.local_tokens, job.total_tokens),
        scratch_slots=shaped.scratch_blocks,
        num_blocks=shaped.num_blocks,
    )
    if isinstance(blocks, Fault):
        return Decline(Reason.TABLES, blocks.text)
    named = _NO_KEYS if keys is None else keys_of(shaped, keys, Objects(chunks, ends))
    offsets, seeds = core.pool.payload_offsets(entries), core.pool.seeds(entries)
    return _GroupLoad(shaped, chunks, named, entries, blocks, offsets, seeds)


class LoadWork:
    """An open load. Owns its lease until every local rank is terminal."""

    kind = "load"
    objects = 0
    fence_offset = BOUND_STEP_OFFSET

    def __init__(
        self,
        core: Core,
        shape: SessionShape,
        lease: Lease,
        job: LoadJob,
        groups: list[_GroupLoad],
    ) -> None:
        self._core = core
        self._shape = shape
        self._lease = lease
        self._job = job
        self._groups = groups

    def copies(self, peer: Peer, rank_index: int) -> list[PlannedCopy]:
        """One verified scatter per group that this rank holds layers of; none when spoiled."""
        planned: list[PlannedCopy] = []
        if self._lease.spoiled:
            return planned
        for index, load in enumerate(self._groups):
            extents = rank_extents(
                peer,
                rank_index,
                load.shape,
                blocks=load.blocks,
                offsets=load.offsets,
                seeds=load.seeds,
            )
            shard = load.shape.stripe.shards[rank_index]
            if extents is None or shard is None:
                continue
            expected, _ = self._core.pool.crcs(load.entries, shard)
            extents = msgspec.structs.replace(extents, expected=expected)
            planned.append(PlannedCopy(index, Direction.SCATTER, extents))
        return planned

    def conclude(self, part: Part) -> End:
        """Done, or failed with the longest shorter prefix that is still complete.

        A stuck copy names none: the same again would cost the same time.
        """
        if self._lease.spoiled:
            return self._failed(Reason.GONE)
        worst = max((result.status for _, result in part.results), default=CopyStatus.DONE)
        if worst is CopyStatus.DONE and len(part.results) == len(part.copies):
            return End(JobStatusName.DONE, Reason.NONE)
        bad = [
            (planned.group_index, result.bad_index)
            for planned, result in part.results
            if result.status is CopyStatus.CHECKSUM
        ]
        if bad:
            return self._corrupt(bad)
        if worst is CopyStatus.FAILED or part.stop is None:
            return self._failed(Reason.COPY_FAILED)
        return part.stop

    def settle(self, run: JobRun) -> None:
        """All ranks are terminal: nobody reads the entries for this job any more."""
        self._core.leases.drop(self._lease)
        if run.all_done():
            seconds = max(
                part.ended_s - (part.passed_s or part.ended_s) for part in run.parts.values()
            )
            tokens = self._job.total_tokens - self._job.local_tokens
            self._core.breaker.loaded(run.session.key, tokens, seconds)
            namespace = self._core.namespace_of(run.session, self._job.version) or b""
            for load in self._groups:
                if len(load.keys):
                    used = np.ascontiguousarray(load.keys)
                    whose = Whose(namespace, load.shape.group)
                    self._core.behind.reused(used, form_of(load.shape.stripe), whose)

    def _corrupt(self, bad: list[tuple[int, int]]) -> End:
        """Doom what was read from the first chunk whose bytes differ; before it all is good.

        Only the first is named: were the rest kept, each further damage in it would cost another
        failed load.
        """
        shorter = self._job.total_tokens
        for group_index, bad_index in bad:
            load = self._groups[group_index]
            self._drop(load.entries[bad_index:])
            self._core.announcer.left(load.keys[bad_index:].tobytes())
            shorter = min(shorter, int(load.chunks[bad_index]) * load.shape.block_tokens)
            self._core.log.error(
                "checksum mismatch",
                engine=self._lease.session.engine_id,
                job=self._job.job,
                group=load.shape.group,
                chunk=int(load.chunks[bad_index]),
            )
        return self._failed(Reason.CHECKSUM, shorter)

    def _drop(self, entries: NDArray[np.uint32]) -> None:
        pool = self._core.pool
        before = pool.stats().ready  # another load may have dropped some of them
        pool.doom(entries)
        self._core.damaged_chunks += before - pool.stats().ready
        self._core.leases.spoil(entries)

    def _failed(self, reason: Reason, below_tokens: int | None = None) -> End:
        """Failed, with what is still complete: shorter than the load, and below the bad chunk.

        It is 0 when the admission's keys are gone.
        """
        admission = self._core.admissions.get(*self._lease.key)
        shorter = 0
        if admission is not None and admission.version == self._job.version:
            most = self._job.total_tokens - 1
            most = most if below_tokens is None else min(most, below_tokens)
            hit = stored_hit(self._core.pool, self._shape, admission.keys, max_tokens=most)
            shorter = hit.tokens
        return End(JobStatusName.FAILED, reason, shorter)


def _leased(
    lease: Lease, shape: GroupShape, chunks: NDArray[np.int64], total_tokens: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]] | None:
    """Return the lease's entries of these chunks (ascending) and their ends, or None.

    None when one is missing. A state is right at its own end only; attention that reaches further
    holds what is before.
    """
    for leased in lease.groups:
        if leased.group == shape.group:
            at = np.searchsorted(leased.chunks, chunks)
            inside = at < len(leased.chunks)
            if not inside.all() or not np.array_equal(leased.chunks[at], chunks):
                return None
            ends = (chunks + 1) * shape.block_tokens
            ends[at == len(leased.chunks) - 1] = leased.last_end
            if shape.kind == Kind.MAMBA and (ends != total_tokens).any():
                return None
            return leased.entries[at], ends
    return None

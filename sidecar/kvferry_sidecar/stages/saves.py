"""Save jobs: new chunks are gathered into reserved slots and published for all ranks at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
from kvferry_connector.wire.hot import JobStatusName, SaveJob
from kvferry_connector.wire.names import DONE_STEP_OFFSET
from numpy.typing import NDArray

from kvferry_sidecar.engines.base import CopyStatus, Direction
from kvferry_sidecar.outcomes.reasons import Decline, Reason
from kvferry_sidecar.plan.shards import EVERY
from kvferry_sidecar.plan.tables import Fault, read_tables
from kvferry_sidecar.sessions.admissions import Keys
from kvferry_sidecar.sessions.leases import LeaseKey
from kvferry_sidecar.sessions.model import Peer, Session
from kvferry_sidecar.stages.core import Core
from kvferry_sidecar.stages.extents import rank_extents
from kvferry_sidecar.stages.hits import refresh
from kvferry_sidecar.stages.parts import End, JobRun, Part, PlannedCopy
from kvferry_sidecar.stages.save_plan import GroupPlan, form_fault, plan_group
from kvferry_sidecar.stages.shape import GroupShape, SessionShape, form_of
from kvferry_sidecar.tiers.host import Owner
from kvferry_sidecar.tiers.store import Whose

Number = TypeVar("Number", np.int32, np.uint32, np.uint64)
_DONE = End(JobStatusName.DONE, Reason.NONE)


class _GroupSave(msgspec.Struct, frozen=True):
    shape: GroupShape
    ends: NDArray[np.int64]
    keys: NDArray[np.uint8]
    entries: NDArray[np.uint32]
    blocks: NDArray[np.int32]
    offsets: NDArray[np.uint64]  # of the whole stripes; a rank adds that of its shard
    seeds: NDArray[np.uint32]


def open_save(
    core: Core, session: Session, shape: SessionShape, job: SaveJob, raw: list[bytes]
) -> SaveWork | Decline:
    """Check a save, then reserve a slot for every chunk that is not there yet."""
    namespace = core.namespace_of(session, job.version)
    if namespace is None:
        return Decline(Reason.VERSION, "the namespace version is not known")
    if namespace in core.shadows.quarantined:
        return Decline(Reason.QUARANTINED, namespace.hex())
    fault = form_fault(job, raw, shape, core.limits.hashes_max)
    if fault is not None:
        return fault
    tables = read_tables(job.tables, raw[0])
    if isinstance(tables, Fault):
        return Decline(Reason.TABLES, tables.text)
    if unknown := tables.keys() - shape.group_ids:
        return Decline(Reason.TABLES, f"groups {sorted(unknown)} do not exist")
    plans = []
    for shaped in shape.stored_groups():
        plan = plan_group(shape.rules, shaped, namespace, job, (tables, raw[1]))
        if isinstance(plan, Decline):
            return plan
        plans.append(plan)
    owner = core.owner_of(namespace)
    work = _reserve_all(core, shape, plans, _prefixes(core, session, shape, job), owner)
    if isinstance(work, SaveWork):
        work.told_hashes = raw[1] if session.kv_events else b""
        work.shadow = _shadow_of(core, LeaseKey(session.life, job.admission), plans, owner)
    return work


@dataclass(frozen=True, slots=True)
class _Shadow:
    """A stored chunk's block, gathered into a slot of its own to be compared."""

    key: LeaseKey
    save: _GroupSave


def _shadow_of(core: Core, key: LeaseKey, plans: list[GroupPlan], owner: Owner) -> _Shadow | None:
    """Reserve a slot for the block of a watched chunk, if this save names it."""
    check = core.shadows.find(key)
    for plan in plans:
        if check is None or plan.shape.group != check.group:
            continue
        rows = np.flatnonzero((plan.keys == check.key).all(axis=1))[:1]
        if len(rows):
            # A key that no chunk has: nothing can hit it, and it is given back unfilled.
            other = np.frombuffer(os.urandom(16), np.uint8).reshape(1, 16)
            one = GroupPlan(plan.shape, plan.ends[rows], other, plan.blocks[rows])
            save = _reserve(core, one, owner)
            if len(save.entries):
                core.shadows.claim(key)
                return _Shadow(key, save)
            core.shadows.drop(key)
    return None


class SaveWork:
    """An open save. Owns its reserved slots until every local rank is terminal."""

    kind = "save"
    fence_offset = DONE_STEP_OFFSET

    def __init__(
        self,
        core: Core,
        shape: SessionShape,
        groups: list[_GroupSave],
        prefixes: list[Keys],
        namespace: bytes,
    ) -> None:
        self._core = core
        self._namespace = namespace
        self._shape = shape
        self.shadow: _Shadow | None = None
        self.told_hashes = b""  # the job's, of an engine that publishes KV events
        self._groups = groups
        self._prefixes = prefixes
        self.objects = sum(len(save.entries) for save in groups)

    def copies(self, peer: Peer, rank_index: int) -> list[PlannedCopy]:
        """One gather per group that this rank holds layers of and that has new chunks for it."""
        planned = []
        groups = self._groups if self.shadow is None else [*self._groups, self.shadow.save]
        for index, save in enumerate(groups):
            turn = save.shape.stripe.turns[rank_index]
            extents = rank_extents(
                peer,
                rank_index,
                save.shape,
                blocks=_by_turn(save.blocks, turn),
                offsets=_by_turn(save.offsets, turn),
                seeds=_by_turn(save.seeds, turn),
            )
            if extents is not None:
                planned.append(PlannedCopy(index, Direction.GATHER, extents))
        return planned

    def conclude(self, part: Part) -> End:
        """Done when every copy is; a save has no partial success."""
        worst = max([result.status for _, result in part.results], default=CopyStatus.DONE)
        if worst is CopyStatus.DONE and len(part.results) == len(part.copies):
            return _DONE
        if worst is CopyStatus.CANCELLED or worst is CopyStatus.DONE:
            return part.stop or End(JobStatusName.FAILED, Reason.COPY_FAILED)
        return End(JobStatusName.FAILED, Reason.COPY_FAILED)

    def settle(self, run: JobRun) -> None:
        """Publish the stripes when all ranks are done, else give the slots back."""
        whole = run.all_done()
        if whole:
            for part in run.parts.values():
                self._store_crcs(part)
        for save in self._groups:
            if not len(save.entries):
                continue
            if whole:
                self._publish(save)
            else:
                self._core.pool.abort(save.entries)
        if whole and self.objects:
            self._count_stored()
        if self.shadow is not None:
            shadow, self.shadow = self.shadow, None
            self._core.shadows.settle(shadow.key, shadow.save.entries, whole=whole)
        if whole and self.told_hashes:
            self._announce(run)
        # The chunks before these were used too, by the engine itself: were they left to grow
        # cold, the head of a shared prefix would be evicted before the tails that need it.
        if self._prefixes:
            refresh(self._core.pool, self._shape, self._prefixes)

    def _publish(self, save: _GroupSave) -> None:
        core = self._core
        core.pool.commit(save.entries)
        if core.behind.wanted:
            whose = Whose(self._namespace, save.shape.group)
            core.behind.entered(save.keys, form_of(save.shape.stripe), whose)

    def _count_stored(self) -> None:
        sizes = [len(save.entries) * save.shape.stripe.payload_bytes for save in self._groups]
        keys = [save.keys for save in self._groups]
        self._core.journal.stored(self._shape, keys, sum(sizes))

    def _announce(self, run: JobRun) -> None:
        scheduler, job = run.session.scheduler, run.job
        if scheduler is None or not isinstance(job, SaveJob):
            return
        size, step = job.hash_bytes, self._shape.hash_block_tokens
        groups = {}
        for save in self._groups:
            places = (
                (end, (end // step - 1 - job.first_hash) * size) for end in save.ends.tolist()
            )
            names = {end: self.told_hashes[at : at + size] for end, at in places}
            groups[save.shape.group] = (save.keys, names)
        self._core.announcer.stored(scheduler, job.job, groups)

    def _store_crcs(self, part: Part) -> None:
        for planned, result in part.results:
            if planned.group_index == len(self._groups):
                continue  # the shadow's, which is never committed
            save = self._groups[planned.group_index]
            stripe = save.shape.stripe
            shard, turn = stripe.shards[part.rank_index], stripe.turns[part.rank_index]
            assert shard is not None, "a copy exists only for a rank with a shard"
            assert result.crcs is not None, "gathers are submitted with crc=True"
            self._core.pool.set_crcs(_by_turn(save.entries, turn), shard, result.crcs)


def _by_turn(values: NDArray[Number], turn: slice) -> NDArray[Number]:
    """Return a rank's turn of a job's chunks, dense: native code takes no strides."""
    return values if turn is EVERY else np.ascontiguousarray(values[turn])


def _prefixes(core: Core, session: Session, shape: SessionShape, job: SaveJob) -> list[Keys]:
    """Keys of the request from its start to the job's end, as far as they are still known."""
    admission = core.admissions.get(session.life, job.admission)
    if admission is None or admission.version != job.version:
        return []
    return [
        keys[: job.end_tokens // group.unit_tokens]
        for group, keys in zip(shape.stored_groups(), admission.keys, strict=True)
    ]


def _reserve_all(
    core: Core,
    shape: SessionShape,
    plans: list[GroupPlan],
    prefixes: list[Keys],
    owner: Owner,
) -> SaveWork | Decline:
    """Reserve for every group, or for none when a stripe is larger than the pool can hold."""
    taken: list[_GroupSave] = []
    for plan in plans:
        try:
            taken.append(_reserve(core, plan, owner))
        except ValueError as error:
            for save in taken:
                core.pool.abort(save.entries)
            return Decline(Reason.STRIPE_BYTES, f"group {plan.shape.group}: {error}")
    return SaveWork(core, shape, taken, prefixes, owner.namespace)


def _reserve(core: Core, plan: GroupPlan, owner: Owner) -> _GroupSave:
    stripe, group = plan.shape.stripe, plan.shape.group
    pool = core.pool
    if not len(plan.keys):
        none = np.empty(0, np.uint32)
        no_offsets = np.empty(0, np.uint64)
        return _GroupSave(plan.shape, plan.ends, plan.keys, none, plan.blocks, no_offsets, none)
    taken = pool.reserve(plan.keys, stripe.payload_bytes, stripe.shard_count, owner, group)
    if len(taken.entries) < len(plan.keys):
        core.skips[Reason.STORED] += taken.stored
        core.skips[Reason.BEING_WRITTEN] += taken.being_written
        core.skips[Reason.POOL_FULL] += taken.full
    ends, keys, blocks = plan.ends, plan.keys, plan.blocks
    if len(taken.entries) < len(keys):
        ends, blocks = ends[taken.index], blocks[taken.index]
        keys = np.ascontiguousarray(keys[taken.index])
    offsets, seeds = pool.payload_offsets(taken.entries), pool.seeds(taken.entries)
    return _GroupSave(plan.shape, ends, keys, taken.entries, blocks, offsets, seeds)

"""Every bound of the sidecar in one place, with its default and unit.

A name ends in ``_max`` (a bound that is counted when hit) or in its unit. Defaults fit one node
with a handful of engines; ``[limits]`` of the configuration overrides each by its name, and
docs/configuration.md lists them all.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

StallMs = Annotated[int, Meta(ge=20)]  # what the watchdog takes
Int32 = Annotated[int, Meta(ge=1, le=2**31 - 1)]  # what ZeroMQ takes


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one sidecar process. All are positive integers; ValueError otherwise."""

    # Attachments: sockets, sessions and the halves in them.
    connections_max: int = 256  # open attach streams, status queries included
    hello_ms_max: int = 5_000  # from accept to a complete Hello; then the stream is closed
    attach_out_bytes_max: int = 8 << 20  # unread bytes of one stream; then it is closed
    versions_max: int = 4  # namespace versions of one session: the current one and drained ones
    sessions_max: int = 64  # engines known at a time
    ranks_max: int = 16  # local worker halves of one session
    heartbeat_ms: int = 1_000  # how often a half beats

    # Probes and leases.
    admissions_max: int = 16_384  # known admissions of one session
    hashes_max: int = 1 << 20  # prefix hashes of one admission
    key_bytes_max: int = 48 << 20  # keys kept for all admissions together
    leases_max: int = 1 << 20  # leased pool entries of one session
    lease_idle_ms_max: int = 30_000  # a lease that no ask and no job confirms falls after this

    # Slower tiers. Staging ends before the engine's own patience (probe_ms_max of the connector).
    stage_ms_max: int = 60  # an ask waits at most this long for objects of slower tiers
    stage_bytes_max: int = 1 << 30  # pool bytes being filled for asks, at most half the pool
    stage_calls_max: int = 8  # calls in flight for one request
    store_call_bytes_max: int = 8 << 20  # payload bytes of one call, at least one object
    store_ms_max: int = 2_000  # a call that takes longer is abandoned; it keeps its memory
    store_retry_ms: int = 250  # a tier that failed is tried again after this
    abandoned_calls_max: int = 4  # abandoned calls that switch a tier off until they return
    write_behind_max: int = 65_536  # objects of one tier that wait to be written

    # What operators ask of the pool's objects.
    scan_places_max: int = 16_384  # places of the index looked at in one turn of the loop
    pinned_percent_max: int = 50  # of the pool that may be pinned hard
    warm_objects_max: int = 65_536  # that wait to be brought into the pool by `kvferry warm`

    # Jobs and outcomes.
    jobs_max: int = 4_096  # jobs in flight per session
    tombstones_max: int = 4_096  # refused job ids per half; then a watermark replaces them
    outcomes_unacked_max: int = 8_192  # outcomes kept per half until acknowledged
    outcome_resend_ms: int = 2_500  # unacknowledged for this long (heartbeats do it): sent again
    fence_ms_max: int = 30_000  # a job whose fence word does not come fails after this
    copy_ms_max: int = 60_000  # a copy running longer is reported as stuck; it keeps its memory
    save_copies_max: int = 64  # save copies in flight, so that loads find threads free
    ranks_wait_ms_max: int = 10_000  # ranks that did not submit their part by then are refused
    fence_poll_us: int = 50  # how often fence words are read while a load waits for one
    sweep_ms: int = 20  # how often deadlines, idle leases and outcomes are looked at

    # The hot channel and the loop.
    messages_per_turn_max: int = 256  # hot frames handled before other work gets its turn
    stall_ms_max: StallMs = 20_000  # a loop without progress for this long ends the process
    router_hwm: Int32 = 10_000  # ZeroMQ high-water mark, messages per peer
    loop_stall_ms_max: int = 15_000  # without a turn of the loop for this long, /livez fails
    drain_ms_max: int = 30_000  # SIGTERM: what is still in flight after this is cancelled

    # What is remembered for operators.
    records_max: int = 10_000  # last requests that `kvferry explain` knows
    announced_keys_max: int = 262_144  # objects whose removal an engine's KV events will tell

    # What one registration may contain.
    groups_max: int = 64  # KV cache groups of one rank
    layers_max: int = 4_096  # layers of one rank
    runs_max: int = 65_536  # contiguous runs of one block of one group (layers x runs per page)
    facts_max: int = 512  # identity entries of one rank, and spec entries of one group
    text_chars_max: int = 4_096  # characters of one name or value

    def __post_init__(self) -> None:
        """Refuse a bound that bounds nothing."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; a bound is at least 1")


DEFAULT_LIMITS = Limits()

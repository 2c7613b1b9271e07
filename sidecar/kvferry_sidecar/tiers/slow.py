"""Opening the slower tiers of a configuration, and closing them.

A tier that cannot be opened because of its medium (a disk that is full, read-only or another
sidecar's) is off, with the reason, and everything else serves.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.config import Config
from kvferry_sidecar.slow_tiers import Policy, disk_paths
from kvferry_sidecar.tiers.disk import DiskStore
from kvferry_sidecar.tiers.remote import open_remote
from kvferry_sidecar.tiers.runner import StoreRunner
from kvferry_sidecar.tiers.store import Memory, Source, StoreError

close_s_max = 2.0  # for calls that are in flight at the end


@dataclass(frozen=True, slots=True)
class OpenedTier:
    """One slower tier. ``runner`` None: it could not be opened, and ``reason`` says why."""

    name: str
    source: Source
    policy: Policy
    runner: StoreRunner | None
    reason: str = ""


class SlowTiers:
    """All slower tiers, in the order they are asked, and what announces their results."""

    def __init__(self, config: Config, pool: Memory, log: Log) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        remote = _open_remote(config, pool, self.wake_fd)  # may refuse: before anything is made
        self.tiers = _open_disks(config, self.wake_fd, log) + remote

    def clear_wake(self) -> None:
        """Results are about to be collected."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def close(self) -> bool:
        """Close the stores; False when a call did not return and may still touch the pool."""
        returned = True
        for tier in self.tiers:
            if tier.runner is not None and not tier.runner.close(close_s_max):
                returned = False
        if returned:
            os.close(self.wake_fd)
        return returned


def _open_disks(config: Config, wake_fd: int, log: Log) -> list[OpenedTier]:
    disk = config.tiers.disk
    paths = disk_paths(disk)
    opened: list[OpenedTier] = []
    for path in paths:
        name = f"disk {path}"
        try:
            store = DiskStore(
                path,
                total_bytes=disk.bytes // len(paths),
                object_bytes=config.tiers.host.slab_bytes,
                free_bytes_min=disk.free_bytes_min,
                log=log,
            )
        except StoreError as error:
            log.warning(f"tier {name} is off", reason=str(error))
            opened.append(OpenedTier(name, "disk", disk.policy, None, str(error)))
        else:
            runner = StoreRunner(store, disk.threads, wake_fd)
            opened.append(OpenedTier(name, "disk", disk.policy, runner))
    return opened


def _open_remote(config: Config, pool: Memory, wake_fd: int) -> list[OpenedTier]:
    """A store that is away now is tried again later; one that cannot be is refused (raises)."""
    remote = config.tiers.remote
    if not remote.url:
        return []
    store = open_remote(remote, config.limits.store_ms_max / 1e3, pool)
    runner = StoreRunner(store, remote.threads, wake_fd)
    return [OpenedTier(store.name, store.source, remote.policy, runner)]

"""The copy engine for engines whose KV memory this process can map: native threads."""

from __future__ import annotations

from kvferry_native import CopyEngine as NativeEngine
from kvferry_native import Layout

from kvferry_sidecar.engines.base import CopyResult, CopyStatus, Direction, Extents

_STATUSES = tuple(CopyStatus)  # by number; an enum's call costs ten times as much


class HostCopyEngine:
    """Implements `engines.base.CopyEngine` over `kvferry_native.CopyEngine`.

    ``pool_address``, ``pool_bytes``: the memory pool offsets are relative to and must stay inside.
    ``pool_owner`` is kept alive by every copy that is not yet collected. Wrong extents raise
    ValueError and start nothing.
    """

    def __init__(
        self, *, threads: int, pool_address: int, pool_bytes: int, pool_owner: object = None
    ) -> None:
        if pool_bytes <= 0:
            raise ValueError(f"pool_bytes is {pool_bytes}: copies need a pool to go to or from")
        self._native = NativeEngine(threads)
        self._pool_address = pool_address
        self._pool_bytes = pool_bytes
        self._pool_owner = pool_owner

    def wake_fd(self) -> int:
        """Descriptor that is readable exactly while results wait."""
        return self._native.eventfd

    def submit(self, ticket: int, direction: Direction, extents: Extents) -> None:
        """Start a copy; its memory belongs to it until its result was collected."""
        if not isinstance(extents.layout, Layout):
            raise TypeError(
                f"the host engine copies by a kvferry_native.Layout, not by a "
                f"{type(extents.layout).__name__}"
            )
        self._native.submit(
            ticket,
            direction,
            extents.layout,
            extents.blocks,
            self._pool_address,
            extents.pool_offsets,
            extents.crc,
            seeds=extents.seeds,
            expected=extents.expected,
            owner=self._pool_owner,
            pool_bytes=self._pool_bytes,
        )

    def cancel(self, ticket: int) -> None:
        """Start no further piece; the result still comes, after the last piece stopped."""
        self._native.cancel(ticket)

    def collect(self) -> list[CopyResult]:
        """Results since the last call; clears wake_fd."""
        return [
            CopyResult(
                ticket=done.ticket,
                status=_STATUSES[done.status],
                moved_bytes=done.moved_bytes,
                seconds=done.seconds,
                bad_index=done.bad_index,
                crcs=done.crcs,
            )
            for done in self._native.poll()
        ]

    def close(self) -> None:
        """Cancel what has not started and wait for what runs; results can still be collected."""
        self._native.close()

"""A sidecar that runs somewhere else: behind a command that puts it into a network namespace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvferry_demo.processes import Child, Sidecar, in_environment, kvferry_command
from support.sidecar import SidecarUnderTest, make_sidecar, set_flags
from support.slow_tiers import POOL_BYTES, settings_of


class SidecarElsewhere(Sidecar):
    """`kvferry serve` behind a command."""

    def __init__(
        self, sidecar: SidecarUnderTest, prefix: tuple[str, ...], pool_bytes: int, flags: list[str]
    ):
        self.run_dir = sidecar.run_dir
        self.pool_name = sidecar.pool_name
        serve = ["serve", "--run-dir", str(self.run_dir), "--pool-name", self.pool_name]
        pool = ["--pool-bytes", str(pool_bytes), "--http-listen", ""]
        command = in_environment({}, [*prefix, *kvferry_command(), *serve, *pool, *flags])
        Child.__init__(self, command, sidecar.log)


@contextmanager
def started(
    url: str, *, prefix: tuple[str, ...] = (), pool_bytes: int = POOL_BYTES, **changes: object
) -> Iterator[SidecarUnderTest]:
    """Yield a sidecar over the store that serves."""
    flags = set_flags(settings_of(url, changes))
    with make_sidecar(pool_bytes=pool_bytes) as sidecar:
        sidecar._process = SidecarElsewhere(sidecar, prefix, pool_bytes, flags)
        sidecar.process.wait_ready()
        yield sidecar

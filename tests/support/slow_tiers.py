"""A sidecar with one slower tier: how it is started or refused, and what its status says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from kvferry_sidecar.cli.commands import run
from support.books import read_status
from support.client_half import ClientEngine
from support.sidecar import SidecarUnderTest, make_sidecar, running_sidecar, set_flags
from support.waiting import wait_until

POOL_BYTES = 16 << 20


def settings_of(url: str, changes: Mapping[str, object]) -> dict[str, object]:
    """Return a remote store's settings; ``changes`` by keys with __ for each dot."""
    patient = {"limits.stage_ms_max": 20_000, "limits.store_ms_max": 6_000}  # a busy machine
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    return {"tiers.remote.url": url} | patient | changed


def disk_settings(*paths: object) -> dict[str, object]:
    """Return the settings of a disk tier on ``paths``, patient with a busy machine."""
    return {
        "tiers.disk.paths": ",".join(map(str, paths)),
        "tiers.disk.bytes": "64MiB",
        "tiers.disk.free_bytes_min": 0,
        "limits.store_ms_max": 20_000,
    }


@contextmanager
def sidecar_over(url: str, **changes: object) -> Iterator[SidecarUnderTest]:
    """Yield a sidecar over the remote store that serves."""
    flags = set_flags(settings_of(url, changes))
    with running_sidecar(pool_bytes=POOL_BYTES, flags=flags) as sidecar:
        yield sidecar


def refusal_of(flags: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `kvferry serve` says when it refuses the flags."""
    with make_sidecar(pool_bytes=POOL_BYTES) as sidecar:
        place = ("--run-dir", str(sidecar.run_dir), "--pool-name", sidecar.pool_name)
        assert run(["serve", *place, "--pool-bytes", str(POOL_BYTES), *flags]) == 2
    return capsys.readouterr().err


def tier(sidecar: SidecarUnderTest) -> dict[str, Any]:
    """Return the status of the only slower tier."""
    (found,) = read_status(sidecar.run_dir)["pipeline"]["tiers"]
    return found


def is_on(sidecar: SidecarUnderTest) -> bool:
    return bool(tier(sidecar)["state"] == "on")


def wait_stored(sidecar: SidecarUnderTest, objects: int) -> None:
    """Wait until that many objects were put since the sidecar started."""
    wait_until(lambda: tier(sidecar)["counts"].get("put_objects", 0) >= objects, "all is stored")


def check_hung(
    sidecar: SidecarUnderTest, engine: ClientEngine, hang: Callable[[], None]
) -> dict[str, Any]:
    """A store that hangs from now on, and is never woken here, costs a miss; the pool serves.

    Returns the tier's status as it was when the sidecar had noticed.
    """
    engine.put("before")
    wait_stored(sidecar, 3)
    hang()
    assert engine.lease("elsewhere", 3)[1].hit_tokens == 0
    wait_until(lambda: not is_on(sidecar), "it is noticed")
    noticed = tier(sidecar)
    engine.put("meanwhile")
    assert engine.get("meanwhile") == 48
    assert engine.get("before") == 48, "the pool serves"
    return noticed

"""What comparing the ways of copying found, kept in the run directory for the next sidecar.

It holds for one GPU in its slot, one boot, driver and version of kvferry, and for the same ways;
with anything else, and from a file that is damaged, there is no answer: they are compared again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import msgspec
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.engines.base import Direction
from kvferry_sidecar.engines.cuda_driver import Driver

Best = dict[tuple[int, int], str]  # the way by (bytes of a run, chunks of a slice)
_file_bytes_max = 16 << 10
_BOOT, _MODULE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/driver/nvidia/version")


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer depends on. ``module``: the kernel's part of the driver, as it says itself."""

    device: str
    bus_id: str
    direction: str
    ways: tuple[str, ...]
    driver: int
    module: str
    boot: str
    kvferry: str


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    facts: Facts
    best: tuple[tuple[int, int, str], ...]


def facts_of(driver: Driver, ordinal: int, direction: Direction, ways: tuple[str, ...]) -> Facts:
    """Return what holds now. Raises CudaError."""
    return Facts(
        device=driver.uuid_of(ordinal).hex(),
        bus_id=driver.bus_id(ordinal),
        direction=direction.name.lower(),
        ways=ways,
        driver=driver.version(),
        module=_line(_MODULE),
        boot=_line(_BOOT),
        kvferry=version("kvferry"),
    )


def _line(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").partition("\n")[0]
    return ""


class StoredWays:
    """One file per GPU and direction; ``folder`` None keeps nothing. Never raises."""

    def __init__(self, folder: Path | None, log: Log) -> None:
        self._folder, self._log = folder, log

    def read(self, facts: Facts, shapes: set[tuple[int, int]]) -> Best:
        """Return what was found under exactly these facts for all shapes, or nothing."""
        path = self._path(facts)
        if path is None:
            return {}
        try:
            with path.open("rb") as file:
                found = msgspec.json.decode(file.read(_file_bytes_max), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._log.warning("ways are compared again", path=str(path), reason=str(error))
            return {}
        best = {(run_bytes, chunks): way for run_bytes, chunks, way in found.best}
        whole = set(best) == shapes and len(found.best) == len(shapes)
        if found.facts != facts or not whole or not set(best.values()) <= {*facts.ways}:
            self._log.info("ways are compared again", path=str(path), reason="something changed")
            return {}
        return best

    def write(self, facts: Facts, best: Mapping[tuple[int, int], str]) -> None:
        """Keep an answer; a reader sees all of it or the one before."""
        path = self._path(facts)
        if path is None:
            return
        lines = tuple((*shape, way) for shape, way in best.items())
        fresh = path.with_suffix(".new")
        try:
            fresh.write_bytes(msgspec.json.encode(_File(facts, lines)))
            fresh.replace(path)
        except OSError as error:
            self._log.warning("which way is the fastest is not kept", reason=str(error))

    def _path(self, facts: Facts) -> Path | None:
        name = f"gpu-{facts.device}-{facts.direction}.json"
        return None if self._folder is None else self._folder / name

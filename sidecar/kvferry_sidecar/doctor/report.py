"""All checks in the order they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvferry_sidecar.config import Config
from kvferry_sidecar.doctor import machine as of_machine
from kvferry_sidecar.doctor import place, stores
from kvferry_sidecar.doctor.finding import Finding, Machine, Verdict, warn
from kvferry_sidecar.errors import ExitCode

Check = Callable[[Machine, Config], Finding | list[Finding]]

CHECKS: Sequence[Check] = (
    place.check_kernel,
    place.check_run_dir,
    of_machine.check_shm,
    of_machine.check_memory,
    of_machine.check_pages,
    of_machine.check_locked_memory,
    of_machine.check_descriptors,
    of_machine.check_processors,
    of_machine.check_numa,
    of_machine.check_clock,
    place.check_gpus,
    place.check_cuda,
    place.check_rdma,
    place.check_http,
    stores.check_disks,
    stores.check_store,
)


class Log(Protocol):
    """The part of a structlog logger that is used here."""

    def info(self, event: str, **facts: object) -> object:
        """Of interest always."""

    def warning(self, event: str, **facts: object) -> object:
        """Something should be changed."""


def examine(config: Config, machine: Machine | None = None) -> list[Finding]:
    """Run every check; one that fails itself is a finding too."""
    where = machine or Machine()
    found: list[Finding] = []
    for check in CHECKS:
        try:
            told = check(where, config)
        except Exception as error:  # noqa: BLE001 - a machine we did not foresee must not stop it
            name = check.__name__.removeprefix("check_")
            text = f"could not be examined: {type(error).__name__}: {error}"
            told = warn(name, text, "report this line, with the kernel's version")
        found += told if isinstance(told, list) else [told]
    return found


def tell(findings: Iterable[Finding], log: Log) -> None:
    """Log what should be changed, and how much was looked at."""
    listed = list(findings)
    bad = [one for one in listed if one.verdict in (Verdict.WARN, Verdict.FAIL)]
    for one in bad:
        log.warning(
            "doctor", check=one.check, verdict=str(one.verdict), text=one.text, remedy=one.remedy
        )
    log.info("doctor", checks=len(listed), to_change=len(bad))


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """Return the code of the worst finding."""
    verdicts = {one.verdict for one in findings}
    if Verdict.FAIL in verdicts:
        return ExitCode.FAILED
    return ExitCode.WARNED if Verdict.WARN in verdicts else ExitCode.OK

"""How a step ended: passed, refused by this machine, or wrong.

``env`` is only for what a container, a sandbox or a device may refuse, named here call by call:
whatever else the driver says is a failure.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

VERDICTS = ("pass", "env", "fail", "late", "skipped")
_FORBIDDEN = frozenset({304, 800, 801, 999})  # operating system, permitted, supported, unknown
_MISSING = 500  # the driver has no such call
# How calls begin, and the codes by which they are refused; None: by any.
REFUSALS: dict[str, frozenset[int] | None] = {
    "cuInit": None,
    "cuDevice": None,  # no GPU, one that another process has alone, or no room for a context
    "cuIpc": _FORBIDDEN | {205},
    "cuMemCreate": _FORBIDDEN,
    "cuMemExportToShareableHandle": _FORBIDDEN,
    "cuMemImportFromShareableHandle": _FORBIDDEN,
    "cuMemHostRegister": _FORBIDDEN | {2},  # memlock
    "cuStreamWriteValue64": _FORBIDDEN,
}
_NO_DRIVER = re.compile(r"there is no CUDA driver here|libcuda\S* cannot be loaded")
# As the sidecar and as the connector say it.
_FAILED_CALL = re.compile(r"\b(cu[A-Z]\w+) failed(?::? (?:with|CUDA_ERROR_\w+)) \(?(\d+)")


class Env(Exception):  # noqa: N818 - a verdict, not an error
    """This machine does not allow what the step needs; the text says what to change."""


def refused(text: str) -> bool:
    """Whether an error of the driver says that this machine does not allow it."""
    if _NO_DRIVER.search(text):
        return True
    found = _FAILED_CALL.search(text)
    if found is None:
        return False
    call, code = found[1], int(found[2])
    return code == _MISSING or any(
        call.startswith(name) and (codes is None or code in codes)
        for name, codes in REFUSALS.items()
    )


def verdict_of(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """Run a step here and return its verdict."""
    try:
        return {"verdict": "pass", "figures": work() or {}}
    except Env as refusal:
        return {"verdict": "env", "why": str(refusal)}
    except Exception as error:  # noqa: BLE001 - every way to fail is a verdict
        if refused(str(error)):
            return {"verdict": "env", "why": str(error)}
        return {"verdict": "fail", "why": f"{type(error).__name__}: {error}",
                "end": traceback.format_exc()[-2000:]}  # fmt: skip

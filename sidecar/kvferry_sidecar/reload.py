"""Settings that change while the sidecar runs: on SIGHUP, by `reload`, or when the file changes.

All layers are read again as at the start. What cannot be read changes nothing: the last good
configuration stays in effect, and logs, status and metrics say so. Of what can, the keys in
``config.HOT`` take effect at once; the others are named and wait for a restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from pathlib import Path

import msgspec
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar import config
from kvferry_sidecar.config import HOT, Config, Loaded
from kvferry_sidecar.errors import ConfigError

file_check_s = 2.0  # how often the file is looked at
DEGRADED = "configuration"


class Differing(msgspec.Struct, frozen=True):
    """A setting that is not in effect as it is on disk; ``needs_restart``: nothing else helps."""

    key: str
    running: str
    on_disk: str
    origin: str
    needs_restart: bool


class Drift(msgspec.Struct, frozen=True):
    """Where the settings in effect are not those of file, environment and flags as they are now.

    ``error``: why they cannot be read; nothing is known then.
    """

    file: str
    settings: list[Differing] = []
    error: str = ""


class Reloader:
    """Owns the configuration in effect. ``apply`` makes the hot settings of a new one count.

    ``degraded`` tells operators of a file that cannot be read.
    """

    def __init__(
        self,
        loaded: Loaded,
        read: Callable[[], Loaded],
        apply: Callable[[Config], None],
        degraded: MutableMapping[str, str],
        log: Log,
    ) -> None:
        self.loaded = loaded
        self._read = read
        self._apply = apply
        self._degraded = degraded
        self._log = log
        self._seen = _version(loaded.file)
        self._check_s = 0.0

    def tick(self, now_s: float) -> float:
        """Reload when the file has changed; returns seconds until it is looked at again."""
        if self.loaded.file is None:
            return math.inf
        if now_s >= self._check_s:
            self._check_s = now_s + file_check_s
            if _version(self.loaded.file) != self._seen:
                self.reload()
        return self._check_s - now_s

    def reload(self, dry_run: bool = False) -> dict[str, object]:
        """Read everything again; returns what changed, or why nothing did."""
        if not dry_run:
            self._seen = _version(self.loaded.file)  # before it is read: a later change counts
        try:
            fresh = self._read()
        except ConfigError as error:
            if not dry_run:
                self._degraded[DEGRADED] = error.message
                self._log.error("configuration kept", error=error.message, remedy=error.remedy)
            return {"error": error.message, "remedy": error.remedy}
        changed = _changes(self.loaded.config, fresh.config)
        hot = {key: value for key, value in changed.items() if key in HOT}
        cold = sorted(set(changed) - set(hot))
        if not dry_run:
            self._take(fresh, hot)
            self._log.info("configuration read", changed=sorted(hot), needs_restart=cold)
        return {"changed": sorted(hot), "needs_restart": cold}

    def drift(self) -> Drift:
        """Read everything again and compare; changes nothing. Any thread may ask."""
        loaded = self.loaded
        file = str(loaded.file or "")
        try:
            fresh = self._read()
        except ConfigError as error:
            return Drift(file, error=error.message)
        running = {key: value for key, value, _ in loaded.rows()}
        return Drift(
            file,
            [
                Differing(key, running[key], value, origin, needs_restart=key not in HOT)
                for key, value, origin in fresh.rows()
                if value != running[key]
            ],
        )

    def _take(self, fresh: Loaded, hot: dict[str, object]) -> None:
        self._degraded.pop(DEGRADED, None)
        kept = config.view(self.loaded.config) | hot
        self.loaded = Loaded(
            config.from_view(kept),
            {key: (fresh if key in hot else self.loaded).origins[key] for key in kept},
            self.loaded.file,
        )
        self._apply(self.loaded.config)


def _changes(old: Config, new: Config) -> dict[str, object]:
    before = config.view(old)
    return {key: value for key, value in config.view(new).items() if before[key] != value}


def _version(file: Path | None) -> tuple[int, int, int] | None:
    """Return what changes with the file: a ConfigMap swaps a link, so the link is followed."""
    try:
        found = file.stat() if file is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)

"""Namespaces that shadow verification found wrong: one hex digest a line, in the run directory.

The pool outlives the process, so its suspicion must too. An operator who has found the cause
removes the file and restarts.
"""

from __future__ import annotations

from pathlib import Path

from structlog.typing import FilteringBoundLogger as Log

FILE = "quarantine"
_DIGEST_BYTES = 16


class Quarantine:
    """The file, and what it means for the state of the sidecar (``degraded``, by topic)."""

    def __init__(self, run_dir: Path, degraded: dict[str, str], log: Log) -> None:
        self._path = run_dir / FILE
        self._degraded = degraded
        self._log = log
        self.namespaces = self._read()
        if self.namespaces:
            self._note()

    def add(self, namespace: bytes, seen: str) -> None:
        """A comparison failed: nothing of this namespace is believed any more."""
        self._log.error(
            "shadow verification failed; the namespace is quarantined",
            namespace=namespace.hex(),
            seen=seen,
            remedy=f"find the cause (docs/operations.md); then delete {self._path} and restart",
        )
        if namespace not in self.namespaces:
            self.namespaces.append(namespace)
        try:
            lines = "".join(f"{one.hex()}\n" for one in self.namespaces)
            fresh = self._path.with_suffix(".new")  # what is known stays where this fails
            fresh.write_text(lines)
            fresh.replace(self._path)
        except OSError as error:
            self._log.error("the quarantine is not kept over a restart", reason=error.strerror)
        self._note()

    def _note(self) -> None:
        self._degraded[FILE] = f"{len(self.namespaces)} namespaces are quarantined: {self._path}"

    def _read(self) -> list[bytes]:
        """Return the digests of the file; a line that is none is logged and kept out."""
        found = []
        try:
            lines = self._path.read_text().split()
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            self._log.error(
                "the quarantine cannot be read", path=str(self._path), reason=str(error)
            )
            return []
        for line in lines:
            try:
                digest = bytes.fromhex(line)
            except ValueError:
                digest = b""
            if len(digest) == _DIGEST_BYTES:
                found.append(digest)
            else:
                self._log.warning(
                    "no digest in the quarantine", path=str(self._path), line=line[:64]
                )
        return found

"""Names both sides must agree on: the run directory's files and the fence page's words."""

from __future__ import annotations

from pathlib import Path

ATTACH_SOCKET = "attach.sock"
LOCK_FILE = "sidecar.lock"
# AF_UNIX paths end at 108 bytes; ctl-<16 hex>.sock is the longest name in the run directory.
run_dir_bytes_max = 80

FENCE_PAGE_BYTES = 4096
BOUND_STEP_OFFSET = 0
DONE_STEP_OFFSET = 64  # its own cache line: two writers never share one

NONCE_BYTES = 16
NO_VERSION = bytes(NONCE_BYTES)


def attach_path(run_dir: Path) -> Path:
    """Return the path of the attach socket."""
    return run_dir / ATTACH_SOCKET


def control_endpoint(run_dir: Path, epoch: int) -> str:
    """Return the ZeroMQ endpoint of one epoch; a fresh one each time the sidecar starts."""
    return f"ipc://{run_dir}/ctl-{epoch:016x}.sock"

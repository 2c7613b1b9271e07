"""Whether the process may have the threads that it is about to start.

Several limits apply (pids.max of every cgroup above, RLIMIT_NPROC, the kernel's own), and libraries
abort where one is reached, without a word of what to change. So it is tried beforehand.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kvferry_sidecar.config import Config
from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.slow_tiers import disk_paths

_others = 8  # the log, HTTP, traces, the watchdog, two of ZeroMQ, and those that map memory
_end_s_max = 1.0


def check(config: Config) -> None:
    """Raise ConfigError where there is no room for the threads of this configuration."""
    disk, remote = config.tiers.disk, config.tiers.remote
    stores = len(disk_paths(disk)) * disk.threads + (remote.threads if remote.url else 0)
    wanted = config.copy.threads + stores + _others
    over = threading.Event()
    tried: list[threading.Thread] = []
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=over.wait, name="tried", daemon=True)
            thread.start()
            tried.append(thread)
    except RuntimeError as error:
        raise ConfigError(
            f"{wanted} threads are needed, and after {len(tried)} of them no further one could be "
            "started",
            "raise the container's limit of pids (docker --pids-limit, podPidsLimit, TasksMax= of "
            "a systemd unit) or RLIMIT_NPROC (ulimit -u)",
        ) from error
    finally:
        over.set()
        for thread in tried:
            _wait_gone(thread)


def _wait_gone(thread: threading.Thread) -> None:
    """Wait until the kernel counts it no more, which is a little after Python's own end of it."""
    thread.join()
    task, end_s = Path(f"/proc/self/task/{thread.native_id}"), time.monotonic() + _end_s_max
    while task.exists() and time.monotonic() < end_s:
        time.sleep(50e-6)

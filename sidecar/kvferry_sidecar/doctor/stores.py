"""Disks and remote stores: there, large enough, and reachable."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from kvferry_sidecar.config import Config
from kvferry_sidecar.doctor.finding import Finding, Machine, fail, ok, warn
from kvferry_sidecar.settings import size_text
from kvferry_sidecar.slow_tiers import disk_paths

connect_s_max = 1.0
_PORTS = {"redis": 6379, "rediss": 6379}
_IN_MEMORY = ("tmpfs", "ramfs")


def check_disks(machine: Machine, config: Config) -> list[Finding]:
    """Every path of the disk tier."""
    paths = disk_paths(config.tiers.disk)
    return [_disk(machine, config, path, len(paths)) for path in paths]


def _disk(machine: Machine, config: Config, path: Path, count: int) -> Finding:
    there = next(one for one in (path, *path.parents) if one.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return fail("disk", f"{there} cannot be written", "give this user a directory of its own")
    space = os.statvfs(there)
    own_bytes = sum(one.stat().st_blocks * 512 for one in path.glob("*") if one.is_file())
    free_bytes = space.f_bavail * space.f_frsize + own_bytes
    wanted_bytes = config.tiers.disk.bytes // count + config.tiers.disk.free_bytes_min
    text = f"{path}: {size_text(free_bytes)} free for {size_text(wanted_bytes)}"
    if free_bytes < wanted_bytes:
        return fail("disk", text, "lower tiers.disk.bytes, or make room: the tier would be off")
    kind = _file_system(machine, there)
    if kind in _IN_MEMORY:
        return warn("disk", f"{path} is on {kind}: memory", "name a directory on a disk")
    return ok("disk", f"{text} ({kind or 'unknown file system'})")


def _file_system(machine: Machine, path: Path) -> str:
    mounts = [line.split() for line in machine.read("proc/mounts").splitlines()]
    inside = [m for m in mounts if path == Path(m[1]) or Path(m[1]) in path.parents]
    return max(inside, key=lambda mount: len(mount[1]), default=("", "", ""))[2]


def check_store(machine: Machine, config: Config) -> list[Finding]:
    """The remote store's address takes a connection; a device is there where RDMA is wanted."""
    remote = config.tiers.remote
    if not remote.url:
        return []
    found = [_reached(remote.url)]
    if remote.protocol == "rdma":
        devices = machine.names("sys/class/infiniband")
        if remote.device and remote.device not in devices:
            text = f"tiers.remote.device {remote.device} is not among {devices}"
            found.append(fail("store", text, "name one that is visible here"))
        elif not devices:
            remedy = "give the container /dev/infiniband, or set tiers.remote.protocol to tcp"
            found.append(fail("store", "tiers.remote.protocol is rdma, no device is here", remedy))
    return found


def _reached(url: str) -> Finding:
    parts = urlsplit(url)
    remedy = "start it, or correct tiers.remote.url; until then this tier misses"
    if parts.scheme == "redis+unix":
        if Path(parts.path).is_socket():
            return ok("store", f"{parts.path} is a socket")
        return warn("store", f"{parts.path} is no socket", remedy)
    port = parts.port or _PORTS.get(parts.scheme)
    where = f"{parts.hostname}:{port}"
    if parts.hostname is None or port is None:
        return warn("store", f"{parts.scheme}: no host and port to try", "give both in the URL")
    try:
        socket.create_connection((parts.hostname, port), connect_s_max).close()
    except OSError as error:
        return warn("store", f"{where} does not answer: {error}", remedy)
    return ok("store", f"{parts.scheme} at {where} takes connections")

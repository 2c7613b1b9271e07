"""Memory, processors and limits of the machine or container."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from kvferry_sidecar.config import Config, HostTierConfig
from kvferry_sidecar.descriptors import descriptors_min
from kvferry_sidecar.doctor.finding import Finding, Machine, fail, note, ok, warn
from kvferry_sidecar.errors import ConfigError, PoolSegmentError
from kvferry_sidecar.placement import placement
from kvferry_sidecar.settings import size_text
from kvferry_sidecar.tiers import hugepages
from kvferry_sidecar.tiers.segment import held_bytes

OWN_BYTES = 120 << 20  # what the sidecar takes beside its pool
_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
_unlimited_bytes = 1 << 60  # what cgroup v1 says for no limit


def check_shm(machine: Machine, config: Config) -> Finding:
    """Shared memory: a tmpfs with room for the pool."""
    host, check = config.tiers.host, "shared memory"
    if host.hugepages_dir:
        return ok(check, f"the pool is in {host.hugepages_dir}")
    mounts = [line.split() for line in machine.read("proc/mounts").splitlines()]
    kind = next((mount[2] for mount in reversed(mounts) if mount[1] == str(machine.shm)), "")
    try:
        space = os.statvfs(machine.shm)
    except OSError as error:
        return fail(check, f"{machine.shm}: {error.strerror}", "mount a tmpfs there")
    segment = machine.shm / host.name
    has_bytes = segment.stat().st_blocks * 512 if segment.exists() else 0
    free_bytes = space.f_bavail * space.f_frsize + has_bytes
    wanted, free = size_text(host.bytes), size_text(free_bytes)
    if host.bytes > free_bytes:
        return fail(
            check,
            f"the pool of {wanted} does not fit {machine.shm}, which has {free} left",
            "lower tiers.host.bytes, or enlarge it (docker --shm-size, emptyDir of medium Memory)",
        )
    if kind != "tmpfs":
        return warn(
            check,
            f"{machine.shm} is {kind or 'no mount of its own'}, not a tmpfs",
            "mount a tmpfs there: on a disk every save would be written to it",
        )
    return ok(check, f"tmpfs with {free} for a pool of {wanted}")


def check_memory(machine: Machine, config: Config) -> Finding:
    """The container's limit, else the machine's memory, against what the sidecar takes."""
    limit = memory_limit_bytes(machine)
    kilobytes = [line.split() for line in machine.read("proc/meminfo").splitlines()]
    total = next((int(line[1]) << 10 for line in kilobytes if line[0] == "MemTotal:"), 0)
    bound = min(limit or total, total or limit)
    host = config.tiers.host
    pool_bytes = 0 if host.hugepages_dir else host.bytes  # reserved pages are counted apart
    wanted = pool_bytes + host.keys_max * 64 + OWN_BYTES
    what = "the container's limit" if limit and limit <= total else "this machine's memory"
    if bound and wanted > bound:
        return fail(
            "memory",
            f"pool, index and sidecar take {size_text(wanted)}, {what} is {size_text(bound)}",
            "lower tiers.host.bytes or raise the limit: the pool counts for whoever makes it",
        )
    return ok("memory", f"{size_text(wanted)} of {size_text(bound)} ({what})")


def memory_limit_bytes(machine: Machine) -> int:
    """Return the limit of this process's cgroup, 0 for none."""
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = machine.read(path)
        if text.isdecimal():
            return int(text) if int(text) < _unlimited_bytes else 0
    return 0


def check_pages(machine: Machine, config: Config) -> Finding:
    """Huge pages for the pool: 4 KiB pages cost TLB misses and a slow exit."""
    if folder := config.tiers.host.hugepages_dir:
        return _check_reserved_pages(folder, config.tiers.host)
    text = machine.read("sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "force", "advise"):
        return ok("huge pages", f"shmem_enabled is {chosen}")
    seconds = config.tiers.host.bytes / (1 << 30) * 0.062
    return note(
        "huge pages",
        f"the pool is in 4 KiB pages (shmem_enabled: {chosen or 'unknown'}); unmapping it takes "
        f"about {seconds:.1f} s",
        "echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled, on the node",
    )


def _check_reserved_pages(folder: str, host: HostTierConfig) -> Finding:
    path = Path(folder)
    try:
        page = hugepages.page_bytes(path)
        free_bytes = hugepages.free_bytes(path, page) + held_bytes(path / host.name)
    except PoolSegmentError as error:
        return fail("huge pages", error.message, error.remedy)
    text = f"{size_text(free_bytes)} of {size_text(page)} pages for a pool of "
    text += size_text(host.bytes)
    if free_bytes < host.bytes:
        return fail("huge pages", text, hugepages.remedy(host.bytes - free_bytes, page))
    return ok("huge pages", text)


def check_descriptors(_machine: Machine, config: Config) -> Finding:
    """Enough descriptors for the sessions that are allowed."""
    limits = config.limits
    wanted = limits.sessions_max * (limits.ranks_max + 1) * 2 + limits.connections_max + 256
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return ok("descriptors", f"{wanted} may be needed, the hard limit allows them")
    text = f"the hard limit is {hard}, all limits together need {wanted}"
    remedy = "raise it (ulimit -Hn, LimitNOFILE=), or lower limits.sessions_max"
    if hard < descriptors_min:
        return fail("descriptors", text, remedy)
    return warn("descriptors", text, remedy)


def check_locked_memory(machine: Machine, config: Config) -> Finding:
    """Locked memory is needed to pin the pool for a GPU or a NIC."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= config.tiers.host.bytes:
        return ok("locked memory", "the whole pool may be pinned")
    text = f"RLIMIT_MEMLOCK is {size_text(soft)}"
    if config.copy.gpu:
        return warn(
            "locked memory",
            f"{text}: a driver or sandbox that counts it refuses to pin the pool for a GPU",
            "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, IPC_LOCK)",
        )
    if machine.names("sys/class/infiniband"):
        return warn(
            "locked memory",
            f"{text}: the pool cannot be registered with the RDMA devices here",
            "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, the container's ulimits)",
        )
    return note("locked memory", f"{text}; nothing here needs more")


def check_processors(machine: Machine, config: Config) -> Finding:
    """Copy threads against the processors this process may use."""
    cpus = len(os.sched_getaffinity(0))
    quota, _, period = machine.read("sys/fs/cgroup/cpu.max").partition(" ")
    allowed = int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else cpus
    usable = min(float(cpus), allowed)
    threads = config.copy.threads
    if threads + 1 > usable:
        return warn(
            "processors",
            f"{threads} copy threads and the control loop share {usable:g} processors",
            "lower copy.threads, or give the container more CPU: a throttled loop delays lookups",
        )
    return ok("processors", f"{usable:g} for {threads} copy threads and the control loop")


def check_numa(machine: Machine, config: Config) -> Finding:
    """Where the pool's memory will lie."""
    host = config.tiers.host
    if host.numa:
        try:
            placed = placement(host.numa, host.bytes, machine.proc.parent)
        except ConfigError as error:
            return fail("NUMA", error.message, error.remedy)
        bound_to = ", ".join(map(str, placed.nodes)) if placed else ""
        return ok("NUMA", f"the pool is bound to {bound_to} (tiers.host.numa = {host.numa!r})")
    nodes = [n for n in machine.names("sys/devices/system/node") if n[4:].isdecimal()]
    if len(nodes) < 2:
        return ok("NUMA", "one node")
    allowed = machine.read("proc/self/status").partition("Mems_allowed_list:")[2].split()[:1]
    if allowed and "," not in allowed[0] and "-" not in allowed[0]:
        return ok("NUMA", f"{len(nodes)} nodes, bound to node {allowed[0]}")
    return note(
        "NUMA",
        f"{len(nodes)} nodes, and the pool may lie on any of them",
        "bind the pool to the engine's node (tiers.host.numa, or the whole sidecar: numactl, a "
        "topology manager): copies across nodes are slower",
    )


def check_clock(machine: Machine, _config: Config) -> Finding:
    """A slow clock is read several times per message."""
    source = machine.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source and source not in _CLOCKS:
        return warn(
            "clock",
            f"the clock source is {source}: reading it is a system call",
            "boot with tsc as clock source where the machine's is stable",
        )
    return ok("clock", f"source {source or 'unknown'}")

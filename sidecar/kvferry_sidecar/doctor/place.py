"""Kernel, run directory, addresses and devices."""

from __future__ import annotations

import os
import stat

from kvferry_sidecar.config import Config
from kvferry_sidecar.doctor.finding import Finding, Machine, fail, note, ok, warn
from kvferry_sidecar.engines.cuda_driver import CudaError, Driver
from kvferry_sidecar.errors import HttpError
from kvferry_sidecar.locks import sidecar_of
from kvferry_sidecar.observe.http.guard import read_token
from kvferry_sidecar.observe.http.server import bind_tcp

_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "9p", "fuse")


def kernel_version(machine: Machine) -> tuple[int, int]:
    """Return (major, minor) of the running kernel, (0, 0) when it cannot be read."""
    parts = machine.read("proc/sys/kernel/osrelease").split(".")
    try:
        return int(parts[0]), int(parts[1].partition("-")[0])
    except (IndexError, ValueError):
        return 0, 0


def check_kernel(machine: Machine, _config: Config) -> Finding:
    """Process descriptors: how engines prove who they are, and that they are dead."""
    version = kernel_version(machine)
    name = f"Linux {version[0]}.{version[1]}"
    if version < (5, 3):
        return fail("kernel", f"{name} has no pidfds", "run Linux 5.3 or newer")
    if (6, 5) <= version < (6, 9):
        return warn(
            "kernel",
            f"{name} compares process ids: engine and sidecar must see the same ones",
            "share the PID namespace (shareProcessNamespace: true), or run 6.9 or newer",
        )
    if version < (6, 5):
        return note(
            "kernel",
            f"{name} cannot name a socket's peer by pidfd: its uid and the passed pidfd decide",
            "run 6.9 or newer",
        )
    return ok("kernel", f"{name}: peers are identified by the kernel")


def check_run_dir(machine: Machine, config: Config) -> Finding:
    """The directory of the sockets: private, ours, local, and free."""
    path, check = config.run_dir, "run directory"
    try:
        found = path.lstat()
    except FileNotFoundError:
        parent = next(one for one in path.parents if one.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return ok(check, f"{path} will be made")
        return fail(check, f"{path} is not there and cannot be made", f"mkdir -m 0700 {path}")
    except OSError as error:
        return fail(check, f"{path}: {error.strerror}", "set another run_dir")
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return fail(check, f"{path} is no directory of uid {os.geteuid()}", "set another run_dir")
    if found.st_mode & 0o027:
        mode = stat.S_IMODE(found.st_mode)
        return fail(check, f"{path} has mode {mode:04o}: others reach it", f"chmod 0700 {path}")
    kind = _file_system(machine, str(path))
    if kind.startswith(_NETWORK_FILE_SYSTEMS):
        return fail(check, f"{path} is on {kind}", "sockets need a local file system")
    holder = sidecar_of(path)
    if holder:
        return note(check, f"{path} is in use by a sidecar ({holder})")
    return ok(check, f"{path} is private and free")


def _file_system(machine: Machine, path: str) -> str:
    best = ("", "")
    for line in machine.read("proc/mounts").splitlines():
        _, where, kind, *_ = line.split()
        inside = path == where or path.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]


def check_http(_machine: Machine, config: Config) -> list[Finding]:
    """The addresses can be bound, and the token can be read."""
    found = []
    running = bool(sidecar_of(config.run_dir))
    named = {"http.listen": config.http.listen, "http.probes_listen": config.http.probes_listen}
    for key, address in named.items():
        if address and not running:
            try:
                bind_tcp(key, address).close()
                found.append(ok("HTTP", f"{key} {address} is free"))
            except HttpError as error:
                found.append(fail("HTTP", error.message, error.remedy))
    host = config.http.listen.rpartition(":")[0]
    if host and host not in ("127.0.0.1", "localhost", "[::1]"):
        found.append(
            warn(
                "HTTP",
                f"http.listen {config.http.listen} shows request ids and settings to a network",
                "listen on loopback, and give a network http.probes_listen",
            )
        )
    try:
        read_token(config.http.token_file)
    except HttpError as error:
        found.append(fail("HTTP token", error.message, error.remedy))
    return found


def check_gpus(machine: Machine, _config: Config) -> list[Finding]:
    """GPUs that are visible here, by the driver's own word."""
    found = []
    for slot in machine.names("proc/driver/nvidia/gpus"):
        lines = machine.read(f"proc/driver/nvidia/gpus/{slot}/information").splitlines()
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
        uuid = facts.get("GPU UUID", "").strip()
        model = facts.get("Model", "").strip()
        found.append(ok("GPU", f"{model or 'NVIDIA'} {uuid} at {slot}"))
    nodes = [name for name in _devices(machine) if name.startswith("nvidia")]
    if not found and not nodes:
        return [note("GPU", "none is visible here: engines on CPU only")]
    if found and not nodes:
        found.append(
            fail(
                "GPU",
                "the driver lists GPUs, but /dev has none of them",
                "give the container access (runtimeClassName: nvidia, NVIDIA_VISIBLE_DEVICES)",
            )
        )
    return found


def check_cuda(_machine: Machine, config: Config) -> list[Finding]:
    """Where engines on GPUs are served: a driver, and GPUs whose memory other processes open."""
    if not config.copy.gpu:
        return []
    try:
        driver = Driver()
        version = "{}.{}".format(*divmod(driver.version() // 10, 100))
        opens = [driver.opens_memory(ordinal) for ordinal in range(driver.count)]
    except CudaError as error:
        text, _, remedy = str(error).partition("; ")
        return [fail("CUDA", text, remedy or "see docs/gpu.md: what it needs")]
    found = [ok("CUDA", f"driver of CUDA {version}, {len(opens)} GPUs")]
    shut = [ordinal for ordinal, can in enumerate(opens) if not can]
    if shut:
        remedy = "run engines there without the cache: MIG, WSL and some sandboxes have no IPC"
        found.append(fail("CUDA", f"memory of another process cannot be opened on {shut}", remedy))
    return found


def _devices(machine: Machine) -> list[str]:
    try:
        return sorted(path.name for path in machine.dev.iterdir())
    except OSError:
        return []


def check_rdma(machine: Machine, _config: Config) -> list[Finding]:
    """RDMA devices, the state of their ports, and their addresses."""
    found = []
    for device in machine.names("sys/class/infiniband"):
        root = f"sys/class/infiniband/{device}/ports"
        for port in machine.names(root):
            state = machine.read(f"{root}/{port}/state").partition(":")[2].strip()
            gids = [machine.read(f"{root}/{port}/gids/{n}") for n in _gids(machine, root, port)]
            used = [gid for gid in gids if gid.replace("0", "").strip(":") not in ("", "fe8")]
            text = f"{device} port {port}: {state or 'unknown'}, {len(used)} GIDs"
            if state != "ACTIVE":
                remedy = "see its cable and link (ibv_devinfo); stores over it will not answer"
                found.append(warn("RDMA", text, remedy))
            else:
                found.append(ok("RDMA", f"{text} ({', '.join(used[:2])})"))
    return found or [note("RDMA", "no device is visible here")]


def _gids(machine: Machine, root: str, port: str) -> list[str]:
    return sorted(machine.names(f"{root}/{port}/gids"), key=int)[:16]

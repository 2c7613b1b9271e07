"""What a Hello must look like, and the mapping of the memory that came with it."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Sequence

from kvferry_connector.wire.attach import FieldRefusal, Hello, Memory, Refused
from kvferry_connector.wire.codec import id_chars_max
from kvferry_connector.wire.names import FENCE_PAGE_BYTES
from kvferry_connector.wire.version import PROTOCOL_MAX, PROTOCOL_MIN, negotiate
from kvferry_native import Mapping

from kvferry_sidecar.engines.cuda_driver import CudaError
from kvferry_sidecar.geometry.device import DeviceMemory
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.sessions.registry import Backing, Offer
from kvferry_sidecar.sessions.tenants import Credentials, Tenants

rank_max = 1 << 20
refusal_fields_max = 64
refusal_chars_max = 1024  # of each text in a refusal: all of it fits one message
# (memory, life, its descriptor if one came); raises CudaError
OpenDevice = Callable[[Memory, int, int | None], DeviceMemory]
_MEMORY_KINDS = ("memfd", "cuda", "cuda-fd")


class HelloError(Exception):
    """The Hello is not accepted; ``refused`` is the answer."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.refused = Refused(code, message)


def check(hello: Hello, fds: int) -> int:
    """Return the protocol to speak. ``fds``: how many descriptors came. Raises HelloError."""
    protocol = negotiate(hello.protocol_min, hello.protocol_max)
    if protocol is None:
        raise HelloError(
            "protocol",
            f"the engine speaks protocols {hello.protocol_min} to {hello.protocol_max}, the "
            f"sidecar {PROTOCOL_MIN} to {PROTOCOL_MAX}; install compatible versions of kvferry",
        )
    scheduler = hello.role == "scheduler"
    if not scheduler and hello.role != "worker":
        raise HelloError("role", f"role {hello.role!r} is neither scheduler nor worker")
    if scheduler != (hello.rank == -1) or not -1 <= hello.rank <= rank_max:
        raise HelloError(
            "rank", f"rank {hello.rank} for a {hello.role} half; a scheduler half has -1"
        )
    for name in ("engine_id", "instance_id"):
        chars = len(getattr(hello, name))
        if not 1 <= chars <= id_chars_max:
            raise HelloError(name, f"{name} has {chars} characters; it has 1 to {id_chars_max}")
    if len(hello.host) > id_chars_max or not 0 <= hello.dp_rank <= rank_max:
        raise HelloError(
            "host",
            f"host has {len(hello.host)} characters (at most {id_chars_max}), or data-parallel "
            f"rank {hello.dp_rank} is not 0 to {rank_max}",
        )
    if scheduler and (hello.fence or hello.memories):
        raise HelloError("memories", "a scheduler half has no fence page and no memory")
    if not scheduler and not hello.fence:
        raise HelloError("fence", "a worker half comes with its fence page")
    unknown = [memory for memory in hello.memories if memory.kind not in _MEMORY_KINDS]
    if unknown:
        raise HelloError(
            "memory-kind",
            f"buffer {unknown[0].buffer} is of kind {unknown[0].kind!r}; this sidecar maps "
            f"{', '.join(_MEMORY_KINDS)}",
        )
    files = sum(memory.kind != "cuda" for memory in hello.memories)
    expected = 1 + int(hello.fence) + files
    if fds != expected:
        raise HelloError(
            "descriptors",
            f"{fds} descriptors came; this Hello needs {expected} (pidfd, fence page, memories)",
        )
    buffers = [memory.buffer for memory in hello.memories]
    if len(set(buffers)) != len(buffers):
        raise HelloError("memories", f"buffer numbers {buffers} are not distinct")
    return protocol


def refused_stream(limits: Limits) -> Refused:
    """Return the answer to a stream more than may be open."""
    text = f"{limits.connections_max} streams are open; raise limits.connections_max"
    return Refused("connections-max", text)


def refused_tenant(
    who: Credentials, tenants: Tenants, others: Sequence[Sequence[str]], limits: Limits
) -> Refused | None:
    """Return why another user's process gets no stream, or None. ``others``: tenants of each."""
    mine = tenants.of(who)
    if not mine:
        return refused_user(who.uid)
    return tenants.over_share(mine, others, limits.connections_max, "limits.connections_max")


def refused_user(uid: int) -> Refused:
    """Return the answer to a process of a user who may not attach."""
    return Refused(
        "uid",
        f"uid {uid} may not attach; run engine and sidecar as one uid (this is uid "
        f"{os.geteuid()}), or bind a tenant to it (namespaces.bound)",
    )


def readable(refused: Refused) -> Refused:
    """Cut what a refusal quotes: it may be as long as the message that is refused."""

    def cut(text: str) -> str:
        return text if len(text) <= refusal_chars_max else f"{text[: refusal_chars_max - 3]}..."

    fields = [
        FieldRefusal(cut(field.field), cut(field.theirs), cut(field.ours), cut(field.remedy))
        for field in refused.fields[:refusal_fields_max]
    ]
    return Refused(refused.code, cut(refused.message), fields)


def map_offer(hello: Hello, fds: Sequence[int], life: int, open_device: OpenDevice) -> Offer:
    """Map the fence page and the memories; ``fds`` in Hello's order, and they stay the caller's.

    ``life`` is the number of the half's process. Raises HelloError when a descriptor is not what
    it should be, or memory of a GPU cannot be opened.
    """
    offer = Offer()
    rest = list(fds)
    if hello.fence:
        _check_file("the fence page", rest[0], FENCE_PAGE_BYTES)
        offer.fence = _map("the fence page", rest.pop(0), FENCE_PAGE_BYTES)
    for memory in hello.memories:
        buffer, what = memory.buffer, f"buffer {memory.buffer}"
        fd = None if memory.kind == "cuda" else rest.pop(0)
        if memory.kind != "memfd" or fd is None:
            opened = _open(memory, life, fd, open_device)
            offer.memories[buffer], offer.backing[buffer] = opened
        else:
            offer.backing[buffer] = _check_file(what, fd, memory.total_bytes)
            offer.memories[buffer] = _map(what, fd, memory.total_bytes, ahead=True)
    return offer


def _open(
    memory: Memory, life: int, fd: int | None, open_device: OpenDevice
) -> tuple[DeviceMemory, Backing]:
    try:
        device = open_device(memory, life, fd)
    except CudaError as error:
        raise HelloError("cuda", f"buffer {memory.buffer}: {error}") from error
    number = memory.cuda.buffer_id if memory.cuda is not None else 0
    return device, (-1 - device.ordinal, number, memory.total_bytes)


def _check_file(what: str, fd: int, total_bytes: int) -> Backing:
    """Refuse what is no file of that size for ever: a page behind its end would be SIGBUS here."""
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # EINVAL: a file that cannot be sealed
        seals = 0
    if not stat.S_ISREG(status.st_mode) or not seals & fcntl.F_SEAL_SHRINK:
        raise HelloError(
            "memory", f"{what} is no memfd with F_SEAL_SHRINK: its owner could cut it off"
        )
    if not 1 <= total_bytes <= status.st_size:
        raise HelloError(
            "memory-size", f"{what} has {status.st_size} bytes, {total_bytes} were announced"
        )
    return status.st_dev, status.st_ino, total_bytes


def _map(what: str, fd: int, total_bytes: int, *, ahead: bool = False) -> Mapping:
    try:
        return Mapping(fd, total_bytes, ahead)
    except (OSError, RuntimeError, ValueError) as error:
        raise HelloError(
            "memory", f"{what} ({total_bytes} bytes) cannot be mapped: {error}"
        ) from error

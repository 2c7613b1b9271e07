"""Who attaches: the half's facts, its memory handles, and the Hello made of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry_connector.wire import attach
from kvferry_connector.wire.codec import WireError
from kvferry_connector.wire.version import PROTOCOL_MAX, PROTOCOL_MIN

# How a log says what state a half is in: its name, the run directory, the reason, the directory.
STATE_TEXTS = {
    "away": "kvferry: %s has no sidecar at %s (%s): nothing is loaded or saved until one is there. "
    "Start `kvferry serve --run-dir %s`, or correct run_dir in kv_connector_extra_config",
    "refused": "kvferry: %s was refused by the sidecar at %s: %s. See also the log of the sidecar "
    "in %s",
    "untrusted": "kvferry: %s refused to attach at %s: %s. Nothing is handed over until "
    "%s is in order",
    "registered": "kvferry: %s is registered with the sidecar at %s (%s); waiting for the other "
    "halves in %s",
    "ready": "kvferry: %s uses the sidecar at %s (%s); see `kvferry status --run-dir %s`",
    "asleep": "kvferry: %s has its KV memory back from the sidecar at %s (%s), and lends it again "
    "when the engine wakes up (%s)",
    "stopped": "kvferry: %s has left the sidecar at %s (%s, %s)",
}


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """One KV buffer and the descriptor that maps it, borrowed from its owner (None on a GPU)."""

    memory: attach.Memory
    fd: int | None = None


@dataclass(frozen=True, slots=True)
class Half:
    """Who attaches. ``role`` is "scheduler" (``rank`` -1) or "worker" (with its ``fence_fd``)."""

    role: str
    engine_id: str
    instance_id: str
    rank: int = -1
    fence_fd: int | None = None
    dp_rank: int = 0

    @property
    def name(self) -> str:
        """What a log calls it."""
        return "the scheduler" if self.role == "scheduler" else f"rank {self.rank}"


def introduce(
    half: Half, memories: Sequence[MemoryHandle], pidfd: int
) -> tuple[attach.Hello, list[int]]:
    """Return Hello and the descriptors that travel with it, in the order Hello documents.

    Raises WireError when there are more buffers than the protocol carries.
    """
    fence = [half.fence_fd] if half.fence_fd is not None else []
    fds = [pidfd, *fence, *(handle.fd for handle in memories if handle.fd is not None)]
    if len(fds) > attach.attach_fds_max:
        raise WireError(
            f"{len(memories)} KV buffers; the protocol carries at most {attach.attach_fds_max - 2}"
        )
    hello = attach.Hello(
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        role=half.role,
        engine_id=half.engine_id,
        instance_id=half.instance_id,
        rank=half.rank,
        pid=os.getpid(),
        fence=bool(fence),
        memories=[handle.memory for handle in memories],
        host=os.uname().nodename,
        dp_rank=half.dp_rank,
    )
    return hello, fds


def refusal_text(refused: attach.Refused) -> str:
    """Return a refusal as one line: the message, then each field with both values."""
    fields = "; ".join(
        f"{field.field}: engine {field.theirs}, sidecar {field.ours} ({field.remedy})"
        for field in refused.fields
    )
    return f"{refused.message}{': ' if fields else ''}{fields}"

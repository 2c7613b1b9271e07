"""What a running sidecar says of the engines that are attached to it."""

from __future__ import annotations

from kvferry_sidecar.doctor.finding import Finding, note, ok, warn
from kvferry_sidecar.observe.status import Document, SessionStatus


def check_engines(document: Document) -> list[Finding]:
    """One or more lines per engine."""
    found = [
        line
        for session in document.sessions
        for line in (*_engine(session), *_equal_ids(session, document))
    ]
    return found or [note("engines", "none is attached")]


def _equal_ids(session: SessionStatus, document: Document) -> list[Finding]:
    """CUDA tells processes apart by the numbers of their ids, each in its own PID namespace."""
    on_gpu = bool((document.config or {}).get("copy", {}).get("gpu"))
    equal = [half.rank for half in session.halves if half.rank >= 0 and half.pid == document.pid]
    if not (on_gpu and equal):
        return []
    return [
        warn(
            _name(session),
            f"ranks {equal} and the sidecar all have process id {document.pid}, in PID namespaces "
            "of their own: CUDA does not open their memory",
            "share the PID namespace (shareProcessNamespace: true, hostPID)",
        )
    ]


def _name(session: SessionStatus) -> str:
    return f"engine {session.engine_id}/{session.instance_id}"


def _engine(session: SessionStatus) -> list[Finding]:
    check = _name(session)
    facts = session.identity
    version = facts.get("vllm_version", "unknown")
    hashes = facts.get("hash_algorithm", "unknown")
    found = []
    if session.ready:
        seed = facts.get("hash_seed_probe", "unknown")[:8]
        groups = len(session.block_tokens)
        text = f"ready; vLLM {version}, hashes {hashes} of seed {seed}, {groups} KV cache groups"
        found.append(ok(check, text))
    else:
        there = {half.rank for half in session.halves if half.registered and half.rank >= 0}
        missing = sorted(set(session.ranks) - there)
        found.append(
            warn(
                check,
                f"not ready: ranks {missing} are not registered",
                "see their lines in the engine's log, and `attach refused` in the sidecar's",
            )
        )
    if session.load_failure_policy and session.load_failure_policy != "recompute":
        found.append(
            warn(
                check,
                f"kv_load_failure_policy is {session.load_failure_policy}: a lost object ends its "
                "request with an error",
                "set it to recompute in --kv-transfer-config",
            )
        )
    silent = [half.rank for half in session.halves if not half.connected]
    if silent:
        found.append(warn(check, f"halves {silent} are disconnected", "see the engine's log"))
    found += [warn(check, text, "start both engines alike to share") for text in session.notes]
    return found

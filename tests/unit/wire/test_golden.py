"""Golden bytes: what stands here is on the wire of released versions and never changes.

A new field is appended with a default (version.py); it adds bytes at the end and a new line in
golden.json. Regenerate for a new kind only: ``python tests/unit/wire/test_golden.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvferry_connector.wire import attach, codec, hot
from msgspec.structs import replace
from support import wire_samples

GOLDEN = Path(__file__).parent / "golden.json"
FIRST = Path(__file__).parent / "golden_first.json"  # before fields were appended to a kind


def current() -> dict[str, str]:
    """Return hex bytes per message kind, as encoded now."""
    found = {
        f"hot.{type(m).__name__}": b"".join(
            bytes(f) for f in codec.pack(m, [], protocol=1, epoch=1, generation=2)
        ).hex()
        for m in [*wire_samples.FROM_HALF, *wire_samples.FROM_SIDECAR]
    }
    found |= {f"job.{type(j).__name__}": codec.encode_job(j).hex() for j in wire_samples.JOBS}
    found |= {
        f"attach.{type(m).__name__}": attach.encode(m).hex()
        for m in [*wire_samples.ATTACH_FROM_PEER, *wire_samples.ATTACH_TO_PEER]
    }
    return found


def test_bytes_on_the_wire_have_not_changed() -> None:
    assert current() == json.loads(GOLDEN.read_text())


def test_what_peers_sent_before_fields_were_appended_reads_as_their_defaults() -> None:
    first = {name: bytes.fromhex(text) for name, text in json.loads(FIRST.read_text()).items()}
    (save,) = [job for job in wire_samples.JOBS if isinstance(job, hot.SaveJob)]
    old_save = codec.read_job(first["job.SaveJob"])
    assert old_save == replace(save, prefill_tokens=0, junction_tokens=0, tail_tokens=0)
    (probe,) = [message for message in wire_samples.FROM_HALF if isinstance(message, hot.Probe)]
    old_probe = codec.read_from_half(first["hot.Probe"][codec.HEADER.size :])
    assert old_probe == replace(probe, trace="", former=0)
    for message in wire_samples.ATTACH_FROM_PEER:
        body = first.get(f"attach.{type(message).__name__}", b"")[attach.LENGTH.size :]
        if isinstance(message, attach.Hello):
            hello = replace(message, memories=message.memories[:1], host="", dp_rank=0)
            assert attach.read_from_peer(body) == hello
        if isinstance(message, attach.Heartbeat):
            assert attach.read_from_peer(body) == replace(message, acks=[], token_ns=0)
        if isinstance(message, attach.RegisterEngine):
            engine = replace(
                message, retention_tokens=0, use_eagle=False, reprefill_tokens=0, kv_events=False,
                nodes=1,
            )  # fmt: skip
            assert attach.read_from_peer(body) == engine
        if isinstance(message, attach.RegisterRank):
            plain = [
                replace(
                    group,
                    window_tokens=0,
                    window_extra_tokens=0,
                    chunk_tokens=0,
                    scratch_blocks=0,
                    tp_replicas=1,
                )
                for group in message.groups
            ]
            assert attach.read_from_peer(body) == replace(message, groups=plain)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n")

"""One filled sample of every message kind; the golden bytes and the round trips use them."""

from __future__ import annotations

from kvferry_connector.wire import attach, hot

LIFE = bytes(range(16))
VERSION = bytes(16)

JOBS: list[hot.Job] = [
    hot.LoadJob(7, LIFE, VERSION, "req-1", 3, 11, 128, 512, [hot.TableSlice(0, 1, 3)]),
    hot.SaveJob(
        job=8,
        life=LIFE,
        version=VERSION,
        request="req-1",
        admission=3,
        step=12,
        start_tokens=512,
        end_tokens=640,
        first_hash=4,
        hash_bytes=32,
        tables=[hot.TableSlice(0, 4, 1)],
        hand_offs=[hot.HandOff(1, 9, 640)],
        prefill_tokens=700,
        junction_tokens=256,
        tail_tokens=576,
    ),
]

FROM_HALF: list[hot.FromHalf] = [
    hot.Probe("req-1", 3, VERSION, 0, 5, 700, 32, b"", f"00-{'ab' * 16}-{'cd' * 8}-01", 2),
    hot.Ask(admission=3, seq=1, local_tokens=128, max_tokens=640),
    hot.Release([1, 2]),
    hot.Submit(b"job-bytes"),
    hot.Cancel(7),
    hot.JobStatus(7),
    hot.OutcomeAck([7, 8]),
]

FROM_SIDECAR: list[hot.FromSidecar] = [
    hot.Stored(8, {0: [528, 544], 1: [544]}),
    hot.Removed({1: [b"hash-of-32-bytes"]}),
    hot.Hint(3, 512, 5),
    hot.Answer(3, 1, 512, {"host": 384}),
    hot.NeedFull(3),
    hot.Outcome(7, 0, "failed", "checksum", 0, 0.25, 384),
    hot.JobState(7, "running"),
    hot.Error("bad-frame", "what and why", "what to do", 7, 3),
]

MEMORIES = [
    attach.Memory(0, 4096),
    attach.Memory(1, 8192, "cuda", attach.CudaMemory(b"h" * 64, 512, 1 << 21, b"u" * 16, 9, 42)),
]
ATTACH_FROM_PEER: list[attach.FromPeer] = [
    attach.Hello(1, 1, "worker", "engine", "abcde", 0, 42, True, MEMORIES, "x", "vllm-0", 1),
    attach.RegisterEngine(LIFE, VERSION, [0], 128, 128, 128, "recompute", None, True, 2, True, 3),
    attach.RegisterRank(
        serial=1,
        shard=attach.Shard(),
        identity={"model": "tiny"},
        num_blocks=4,
        layout="LBNHC",
        groups=[
            attach.Group(
                0,
                "full",
                128,
                {"dtype": "float32"},
                ["l0", "l1"],
                window_tokens=40,
                window_extra_tokens=3,
                chunk_tokens=256,
                tp_replicas=2,
                scratch_blocks=2,
            )
        ],
        placements=[attach.Placement(0, ["l0", "l1"], 0, 0, 4096, 1024, 1024)],
        hash_block_tokens=128,
    ),
    attach.Rotate(LIFE),
    attach.Heartbeat(5, 9, [3], [7, 8], 41_000),
    attach.Bye(),
    attach.StatusQuery(),
]

ATTACH_TO_PEER: list[attach.ToPeer] = [
    attach.Welcome(1, 77, 2, "ipc:///run/x/ctl.sock", b"K\0\0\0\0\0\0\0\2", 1000),
    attach.Refused("geometry", "no", [attach.FieldRefusal("page_bytes", "1", "2", "fix")]),
    attach.Registered("00ff", ["all"]),
    attach.Ready("00ff", [0], ["all"]),
    attach.HeartbeatAck(5),
    attach.StatusReply(b"{}"),
    attach.Left(),
]

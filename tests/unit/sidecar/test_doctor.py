"""The preflight: each check on a machine as it is, and on files that say something else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import msgspec
import pytest
import structlog
from kvferry_sidecar import config, locks
from kvferry_sidecar.cli import main
from kvferry_sidecar.doctor import engines, machine, place, report, stores
from kvferry_sidecar.doctor.finding import Machine, Verdict, fail, note, ok, warn
from kvferry_sidecar.engines import cuda_driver
from kvferry_sidecar.errors import ExitCode
from kvferry_sidecar.observe import status
from kvferry_sidecar.settings import Setting
from support import fake_cuda
from support.raw_half import RawHalf, engine_registration
from support.sidecar import running_sidecar


def settings(**flags):
    given = {key.replace("__", "."): Setting(value, "flag") for key, value in flags.items()}
    return config.load(None, given, {}).config


@pytest.fixture
def tree(tmp_path):
    """A machine whose files are the test's."""

    def make(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Machine(tmp_path / "proc", tmp_path / "sys", tmp_path / "dev")

    return make


def at(tmp_path, path, text=""):
    where = tmp_path / path
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(text)


def test_this_machine_is_examined_without_a_surprise():
    findings = report.examine(settings(tiers__host__bytes="1MiB"))
    assert {one.check for one in findings} >= {
        "kernel", "run directory", "shared memory", "memory", "huge pages", "descriptors",
        "processors", "NUMA", "clock", "GPU", "RDMA", "locked memory",
    }  # fmt: skip
    assert not [one for one in findings if "could not be examined" in one.text]
    assert all(one.remedy for one in findings if one.verdict in (Verdict.WARN, Verdict.FAIL))


@pytest.mark.parametrize(
    ("release", "verdict", "words"),
    [
        ("5.2.1", "fail", "no pidfds"),
        ("6.1.0-debian", "note", "uid and the passed pidfd"),
        ("6.6.9", "warn", "PID namespace"),
        ("6.18-rc1", "ok", "identified by the kernel"),
        ("strange", "fail", "no pidfds"),
    ],
)
def test_kernels(tree, tmp_path, release, verdict, words):
    at(tmp_path, "proc/sys/kernel/osrelease", release + "\n")
    found = place.check_kernel(tree(), settings())
    assert found.verdict == verdict
    assert words in found.text + found.remedy


def test_a_pool_that_does_not_fit():
    found = machine.check_shm(Machine(), settings(tiers__host__bytes="900TiB"))
    assert (found.verdict, "does not fit" in found.text) == ("fail", True)


def test_shared_memory_on_a_disk(tree, tmp_path):
    at(tmp_path, "proc/mounts", f"/dev/sda1 {tmp_path}/dev/shm ext4 rw 0 0\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = machine.check_shm(tree(), settings(tiers__host__bytes="1MiB"))
    assert found.verdict == "warn"
    assert "is ext4, not a tmpfs" in found.text


@pytest.mark.parametrize(
    ("file", "limit", "verdict"),
    [
        ("sys/fs/cgroup/memory.max", str(1 << 30), "fail"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", str(1 << 30), "fail"),
        ("sys/fs/cgroup/memory.max", "max", "ok"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", str(0x7FFFFFFFFFFFF000), "ok"),
    ],
)
def test_the_limit_of_the_container(tree, tmp_path, file, limit, verdict):
    at(tmp_path, "proc/meminfo", "MemTotal:       67108864 kB\n")
    at(tmp_path, file, limit)
    found = machine.check_memory(tree(), settings(tiers__host__bytes="4GiB"))
    assert found.verdict == verdict
    assert ("the container's limit" in found.text) == (verdict == "fail")


def test_a_throttled_container(tree, tmp_path):
    at(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000")
    found = machine.check_processors(tree(), settings(copy__threads=1))
    assert found.verdict == "warn"
    assert "share 1.5 processors" in found.text


def test_pages_and_clock(tree, tmp_path):
    at(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [never] deny")
    at(tmp_path, "sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet")
    found = machine.check_pages(tree(), settings(tiers__host__bytes="100GiB"))
    assert "4 KiB pages (shmem_enabled: never); unmapping it takes about 6.2 s" in found.text
    assert machine.check_clock(tree(), settings()).verdict == "warn"


@pytest.mark.parametrize(("allowed", "verdict"), [("0-1", "note"), ("1", "ok")])
def test_two_nodes(tree, tmp_path, allowed, verdict):
    for node in ("node0", "node1"):
        at(tmp_path, f"sys/devices/system/node/{node}/x")
    at(tmp_path, "proc/self/status", f"Name:\tx\nMems_allowed_list:\t{allowed}\n")
    assert machine.check_numa(tree(), settings()).verdict == verdict


def test_a_pool_on_named_nodes(tree, tmp_path):
    at(tmp_path, "proc/self/status", "Mems_allowed_list:\t0-1\n")
    found = machine.check_numa(tree(), settings(tiers__host__numa="interleave"))
    assert (found.verdict, "bound to 0, 1" in found.text) == ("ok", True)
    assert machine.check_numa(tree(), settings(tiers__host__numa="2")).verdict == "fail"


def test_gpus_by_their_uuid(tree, tmp_path):
    slot = "proc/driver/nvidia/gpus/0000:01:00.0/information"
    at(tmp_path, slot, "Model: \t NVIDIA H200\nGPU UUID: \t GPU-12ab\n")
    found = place.check_gpus(tree(), settings())
    assert found[0].text == "NVIDIA H200 GPU-12ab at 0000:01:00.0"
    assert found[1].verdict == "fail", "no device node"
    at(tmp_path, "dev/nvidia0")
    assert [one.verdict for one in place.check_gpus(tree(), settings())] == ["ok"]


def test_a_driver_and_gpus_whose_memory_others_open(tree, monkeypatch):
    def examined(**gpu):
        return [(str(one.verdict), one.text) for one in place.check_cuda(tree(), settings(**gpu))]

    assert examined() == []
    load = cuda_driver.ctypes.CDLL
    fake = {cuda_driver.LIBRARY: str(fake_cuda.library())}
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: load(fake.get(name, name)))
    ((verdict, text),) = examined(copy__gpu="true")
    assert verdict == "ok"
    assert text.endswith("2 GPUs")
    monkeypatch.setenv("FAKE_CUDA_NO_IPC", "1")
    assert examined(copy__gpu="true")[1] == (
        "fail", "memory of another process cannot be opened on [1]"
    )  # fmt: skip
    fake[cuda_driver.LIBRARY] = "no-such-library"
    ((verdict, text),) = examined(copy__gpu="true")
    assert (verdict, "no CUDA driver" in text) == ("fail", True)


def test_equal_process_ids_are_told_where_cuda_would_refuse_them():
    half = status.HalfStatus("worker", 1, 1, 7, 1, True, True, 0.0)
    session = status.SessionStatus("e", "i", True, [1], "", [], [], [half], {})

    def told(pid, *, gpu):
        config = {"copy": {"gpu": gpu}}
        document = status.Document(1, "0", "0", pid, [session], None, None, None, config)
        return [one.text for one in engines.check_engines(document) if one.verdict == "warn"]

    assert told(7, gpu=False) == told(8, gpu=True) == []
    (text,) = told(7, gpu=True)
    assert "ranks [1] and the sidecar all have process id 7" in text


@pytest.mark.parametrize(
    ("limit_bytes", "gpu", "rdma", "verdict", "text"),
    [
        (-1, True, False, "ok", "may be pinned"),
        (1 << 30, True, True, "ok", "may be pinned"),
        (65536, True, False, "warn", "64 KiB: a driver or sandbox"),
        (65536, False, True, "warn", "64 KiB: the pool cannot be registered"),
        (65536, False, False, "note", "nothing here needs more"),
    ],
)
def test_locked_memory(tree, tmp_path, monkeypatch, limit_bytes, gpu, rdma, verdict, text):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (limit_bytes, -1))
    if rdma:
        at(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state")
    wanted = settings(copy__gpu=str(gpu).lower(), tiers__host__bytes="1GiB")
    found = machine.check_locked_memory(tree(), wanted)
    assert (found.verdict, text in found.text) == (verdict, True)
    assert verdict != "warn" or "LimitMEMLOCK" in found.remedy


def test_rdma_ports(tree, tmp_path):
    port = "sys/class/infiniband/mlx5_0/ports/1"
    at(tmp_path, f"{port}/state", "4: ACTIVE")
    at(tmp_path, f"{port}/gids/0", "fe80:0000:0000:0000:0000:0000:0000:0000")
    at(tmp_path, f"{port}/gids/3", "0000:0000:0000:0000:0000:ffff:0a01:0203")
    at(tmp_path, "sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    good, bad = place.check_rdma(tree(), settings())
    assert "ACTIVE, 1 GIDs (0000:0000:0000:0000:0000:ffff:0a01:0203)" in good.text
    assert (bad.verdict, bad.text) == ("warn", "mlx5_1 port 1: DOWN, 0 GIDs")


def test_run_directories(tmp_path):
    def examined(path):
        return place.check_run_dir(Machine(), settings(run_dir=str(path)))

    assert examined(tmp_path / "new/one").verdict == "ok"
    wide = tmp_path / "wide"
    wide.mkdir(mode=0o755)
    wide.chmod(0o755)
    assert examined(wide).remedy == f"chmod 0700 {wide}"
    (tmp_path / "file").write_text("")
    assert examined(tmp_path / "file").verdict == "fail"


def test_a_run_directory_on_a_network(tree, tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    at(tmp_path, "proc/mounts", f"x / ext4 rw 0 0\nserver:/y {tmp_path} nfs4 rw 0 0\n")
    found = place.check_run_dir(tree(), settings(run_dir=str(tmp_path / "run")))
    assert (found.verdict, "is on nfs4" in found.text) == ("fail", True)


def test_addresses_and_token(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        wide = "0.0.0.0:0"
        found = place.check_http(
            Machine(),
            settings(
                run_dir=str(tmp_path / "x"), http__listen=address,
                http__probes_listen=wide, http__token_file=str(tmp_path / "none"),
            ),
        )  # fmt: skip
    assert [(one.check, str(one.verdict)) for one in found] == [
        ("HTTP", "fail"), ("HTTP", "ok"), ("HTTP token", "fail")
    ]  # fmt: skip
    open_to_all = place.check_http(Machine(), settings(http__listen="0.0.0.0:0"))
    assert open_to_all[-1].verdict == "warn"


def test_a_check_that_fails_itself_is_a_finding(monkeypatch):
    def check_moon(_machine, _settings):
        raise OSError("no moon")

    monkeypatch.setattr(report, "CHECKS", [check_moon])
    (found,) = report.examine(settings())
    assert (found.check, found.verdict) == ("moon", "warn")
    assert "could not be examined: OSError: no moon" in found.text


def test_exit_codes_follow_the_worst():
    fine, small, bad = ok("a", "b"), warn("a", "b", "c"), fail("a", "b", "c")
    assert report.exit_code([fine, note("a", "b")]) == ExitCode.OK
    assert report.exit_code([fine, small]) == ExitCode.WARNED
    assert report.exit_code([small, bad, fine]) == ExitCode.FAILED


def test_findings_are_logged_once(monkeypatch):
    with structlog.testing.capture_logs() as lines:
        report.tell([ok("a", "b"), warn("c", "d", "e")], structlog.get_logger())
    assert [line["event"] for line in lines] == ["doctor", "doctor"]
    assert (lines[0]["check"], lines[0]["remedy"]) == ("c", "e")
    assert (lines[1]["checks"], lines[1]["to_change"]) == (2, 1)


def test_looking_at_a_run_directory_of_ones_own_keeps_its_lock(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    lock = locks.lock_run_dir(run_dir)
    assert locks.sidecar_of(run_dir) == "this process"
    place.check_run_dir(Machine(), settings(run_dir=str(run_dir)))
    code = "import sys, pathlib; from kvferry_sidecar.locks import sidecar_of as s; "
    code += "print(s(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(run_dir)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"pid {os.getpid()}" in told
    lock.release()
    assert locks.sidecar_of(run_dir) == ""


def test_the_command_and_the_engines_of_a_running_sidecar(capsys):
    with running_sidecar(pool_bytes=8 << 20) as sidecar:
        half = RawHalf(sidecar.run_dir, engine_id="lonely")
        half.attach()
        half.register(engine_registration([0, 1], b"l" * 16, load_failure_policy="fail"))
        flags = ["--run-dir", str(sidecar.run_dir), "--pool-bytes", "8MiB"]
        flags += ["--pool-name", sidecar.pool_name]
        assert main(["doctor", "--json", *flags]) == ExitCode.WARNED
        told = json.loads(capsys.readouterr().out)
        lonely = [one["text"] for one in told if one["check"] == "engine lonely/one"]
        assert lonely[0] == "not ready: ranks [0, 1] are not registered"
        assert lonely[1].startswith("kv_load_failure_policy is fail")
        assert any("is in use by a sidecar" in one["text"] for one in told)
        assert main(["doctor", *flags]) == ExitCode.WARNED
        assert "remedy: set it to recompute" in capsys.readouterr().out
        half.leave()
        assert main(["doctor", *flags]) == ExitCode.OK
        assert "none is attached" in capsys.readouterr().out
        assert '"check": "kernel"' not in sidecar.log.read_text(), "nothing to change: not logged"


def test_engines_that_nearly_share_are_told():
    facts = {"vllm_version": "0.32", "hash_algorithm": "sha256", "hash_seed_probe": "5eed5eed77"}
    near = ["dtype differs"]
    session = status.SessionStatus("e", "i", True, [0], "", [16, 16], [], [], facts, near)
    document = status.Document(1, "0", "0", 1, [session], None, None, None, None)
    fine, near = engines.check_engines(document)
    assert (fine.verdict, near.text) == ("ok", "dtype differs")
    assert fine.text == "ready; vLLM 0.32, hashes sha256 of seed 5eed5eed, 2 KV cache groups"
    assert msgspec.json.encode(near)


def disk(path, total_bytes):
    return {"tiers__disk__paths": str(path), "tiers__disk__bytes": total_bytes}


def test_disks(tree, tmp_path):
    at(tmp_path, "proc/mounts", f"x / ext4 rw 0 0\ny {tmp_path}/memory tmpfs rw 0 0\n")
    (tmp_path / "memory").mkdir()
    small = "64MiB"
    small_free = {"tiers__disk__free_bytes_min": "1MiB"}
    (found,) = stores.check_disks(tree(), settings(**disk(tmp_path / "new", small), **small_free))
    assert (found.verdict, "(ext4)" in found.text) == ("ok", True)
    (found,) = stores.check_disks(tree(), settings(**disk(tmp_path, "900TiB")))
    assert (found.verdict, "free for 900" in found.text) == ("fail", True)
    memory = settings(**disk(tmp_path / "memory", small), **small_free)
    (found,) = stores.check_disks(tree(), memory)
    assert (found.verdict, "tmpfs: memory" in found.text) == ("warn", True)
    assert stores.check_disks(tree(), settings()) == []


def test_remote_stores(tree, tmp_path):
    def examined(url, **more):
        found = stores.check_store(tree(), settings(tiers__remote__url=url, **more))
        return [(str(one.verdict), one.text) for one in found]

    assert stores.check_store(tree(), settings()) == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ((verdict, text),) = examined(f"redis://127.0.0.1:{port}/0")
        assert (verdict, text) == ("ok", f"redis at 127.0.0.1:{port} takes connections")
    ((verdict, text),) = examined(f"redis://127.0.0.1:{port}/0")
    assert (verdict, "does not answer" in text) == ("warn", True)
    path = tmp_path / "redis.sock"
    assert examined(f"redis+unix://{path}")[0][0] == "warn"
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
        assert examined(f"redis+unix://{path}")[0][0] == "ok"
    rdma = {"tiers__remote__protocol": "rdma", "tiers__remote__device": "mlx5_9"}
    at(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    found = examined(f"mooncake://127.0.0.1:{port}", **rdma)
    assert found[-1] == ("fail", "tiers.remote.device mlx5_9 is not among ['mlx5_0']")

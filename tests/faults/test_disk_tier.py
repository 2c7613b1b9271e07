"""The disk under a real sidecar: it serves the next one, and its failures cost nothing."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry_demo.processes import unlink_pool
from support.books import read_status, wait_settled
from support.client_half import ClientEngine, client_engine
from support.mounts import NEEDS_ROOT, tmpfs
from support.sidecar import SidecarUnderTest, make_sidecar, running_sidecar, set_flags
from support.slow_tiers import tier
from support.waiting import wait_until


def flags(*paths: Path) -> list[str]:
    settings = {
        "tiers.disk.paths": ",".join(map(str, paths)),
        "tiers.disk.bytes": 32 * len(paths) << 20,
        "tiers.disk.free_bytes_min": "0",
        "limits.stage_ms_max": 20_000,  # the machine of a test may be slow
        "limits.store_ms_max": 20_000,
    }
    return set_flags(settings)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarUnderTest]:
    with make_sidecar(pool_bytes=16 << 20, flags=flags(tmp_path)) as found:
        found.start()
        yield found


def written(sidecar: SidecarUnderTest, objects: int) -> None:
    wait_until(lambda: tier(sidecar)["facts"]["objects"] >= objects, "all is on the disk")


def lose_the_pool(sidecar: SidecarUnderTest, engine: ClientEngine, number: int) -> None:
    """End the sidecar, remove its pool, start the next one."""
    epoch = engine.wait_ready()
    os.kill(sidecar.process.pid, number)
    sidecar.process.process.wait(60)
    unlink_pool(sidecar.pool_name)
    sidecar.restart()
    engine.wait_ready(beyond_epoch=epoch)


def test_objects_outlive_process_and_pool(sidecar: SidecarUnderTest) -> None:
    with client_engine(sidecar.run_dir, blocks=200) as engine:
        prompts = [f"kept {number}" for number in range(10)]
        for prompt in prompts:
            engine.put(prompt, range(1, 9))
        written(sidecar, 80)
        lose_the_pool(sidecar, engine, signal.SIGKILL)
        assert read_status(sidecar.run_dir)["pool"]["ready"] == 0
        admission, answer = engine.lease(prompts[0], 8)
        assert (answer.hit_tokens, answer.sources) == (128, {"disk": 128})
        assert [engine.get(prompt, range(20, 28)) for prompt in prompts[1:]] == [128] * 9
        again = engine.lease(prompts[1], 8)[1]
        assert again.sources == {"host": 128}, "what was brought stays in the pool"
        load = engine.submit(engine.load_job(admission, range(30, 38)))
        assert engine.ended(load).status == "done"
        assert engine.holds(prompts[0], range(30, 38))


def test_a_drain_writes_everything_down(sidecar: SidecarUnderTest) -> None:
    with client_engine(sidecar.run_dir, blocks=200) as engine:
        for number in range(8):
            engine.put(f"late {number}", range(1, 101))
        lose_the_pool(sidecar, engine, signal.SIGTERM)
        assert [engine.get(f"late {number}", range(101, 200)) for number in range(8)] == [1584] * 8
        wait_settled(sidecar.run_dir)


def test_damaged_bytes_on_the_disk_are_misses(sidecar: SidecarUnderTest, tmp_path: Path) -> None:
    with client_engine(sidecar.run_dir) as engine:
        engine.put("whole")
        engine.put("damaged")
        written(sidecar, 6)
        data = tmp_path / "kvferry" / "objects"
        lost = engine.content("damaged", 1)
        with data.open("r+b") as file:
            at = file.read().index(lost)
            file.seek(at + 100)
            file.write(bytes([lost[100] ^ 1]))
        lose_the_pool(sidecar, engine, signal.SIGKILL)
        assert engine.get("damaged") == 16, "the chunk before it is good"
        assert engine.get("whole") == 48
        assert tier(sidecar)["counts"]["damaged"] == 1


def test_a_disk_that_fails_is_off_and_the_rest_serves(sidecar: SidecarUnderTest) -> None:
    with client_engine(sidecar.run_dir) as engine:
        engine.put("before")
        written(sidecar, 3)
        # No byte beyond the first mebibyte of any file, as on a disk that is full.
        resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        engine.put("after")
        off = wait_until(lambda: _off(sidecar), "the tier is off")
        assert "the disk failed" in off["reason"]
        assert engine.get("before") == 48
        assert engine.get("after") == 48
        engine.put("later")
        assert engine.get("later") == 48
        wait_settled(sidecar.run_dir)


def test_a_disk_that_cannot_be_opened_is_off_with_the_reason(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with make_sidecar(pool_bytes=16 << 20, flags=flags(missing)) as sidecar:
        sidecar.start()
        with client_engine(sidecar.run_dir) as engine:
            engine.put("served")
            assert engine.get("served") == 48
        off = tier(sidecar)
        assert (off["state"], off["source"]) == ("off", "disk")
        assert "No such file" in off["reason"]


@NEEDS_ROOT
def test_of_several_paths_those_that_can_be_used_share_the_objects(tmp_path: Path) -> None:
    """One is full, one read-only, one not there: each is off with its reason, and named."""
    whole = [tmp_path / "one", tmp_path / "two"]
    for path in whole:
        path.mkdir()
    with tmpfs(tmp_path / "full", "8m") as full, tmpfs(tmp_path / "fixed", "64m", "ro") as fixed:
        broken = {full: "lower tiers.disk.bytes", fixed: "Read-only", tmp_path / "no": "No such"}
        paths = [full, whole[0], fixed, whole[1], *list(broken)[2:]]
        with (
            running_sidecar(pool_bytes=16 << 20, flags=flags(*paths)) as sidecar,
            client_engine(sidecar.run_dir) as engine,
        ):
            prompts = [f"shared {number}" for number in range(8)]
            for prompt in prompts:
                engine.put(prompt)
            wait_until(lambda: sum(objects_on(sidecar).values()) == 24, "all is on the disks")
            assert set(objects_on(sidecar)) == {f"disk {path}" for path in whole}
            assert all(objects_on(sidecar).values()), "both have some"
            tiers = {one["name"]: one for one in read_status(sidecar.run_dir)["pipeline"]["tiers"]}
            for path, words in broken.items():
                assert tiers[f"disk {path}"]["state"] == "off"
                assert words in tiers[f"disk {path}"]["reason"]
            lose_the_pool(sidecar, engine, signal.SIGKILL)
            assert [engine.get(prompt) for prompt in prompts] == [48] * 8
            wait_settled(sidecar.run_dir)


def objects_on(sidecar: SidecarUnderTest) -> dict[str, int]:
    """Return how many objects each disk that is on has."""
    tiers = read_status(sidecar.run_dir)["pipeline"]["tiers"]
    return {one["name"]: one["facts"]["objects"] for one in tiers if one["state"] == "on"}


def _off(sidecar: SidecarUnderTest) -> dict[str, Any] | None:
    found = tier(sidecar)
    return found if found["state"] == "off" else None


def test_an_index_cut_off_under_it_ends_it_with_words_and_the_next_starts_empty(
    sidecar: SidecarUnderTest, tmp_path: Path
) -> None:
    with client_engine(sidecar.run_dir) as engine:
        epoch = engine.wait_ready()
        engine.put("before")
        written(sidecar, 3)
        os.truncate(tmp_path / "kvferry" / "index" / "data.mdb", 4096)
        # Written behind, through pages that are no more; its outcome may come, or not.
        engine.submit(engine.save_job("after", (1, 2, 3)))
        assert sidecar.process.process.wait(90) == -signal.SIGBUS
        assert "Bus error" in sidecar.log.read_text()
        sidecar.restart()
        engine.wait_ready(beyond_epoch=epoch)
        assert tier(sidecar)["state"] == "on"
        assert "disk index replaced" in sidecar.log.read_text()
        assert engine.get("before") == 48
        engine.put("later")
        written(sidecar, 3)
        wait_settled(sidecar.run_dir)

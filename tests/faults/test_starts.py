"""Starts that must be refused, loudly and without leaving anything; and pools that are no pools."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from kvferry_sidecar.errors import ExitCode
from support.books import descriptors
from support.client_half import client_engine
from support.mounts import NEEDS_ROOT
from support.other_users import COUNTED
from support.serving import Serving, servings
from support.sidecar import set_flags
from support.waiting import wait_until

SHM = Path("/dev/shm")


def test_two_run_directories_naming_one_pool() -> None:
    with servings(2, pools=1) as (one, two):
        process = one.start_ready()
        with client_engine(one.run_dir) as engine:
            engine.put("mine")
            two.start()
            code, text = two.ended()
            assert code not in (0, None)
            assert f"pid {process.pid}" in text, "it names the holder"
            assert "remedy" in text
            assert not two.path.exists()
            assert engine.get("mine") == 48, "the holder's pool is untouched"


def test_a_second_sidecar_on_the_same_run_directory() -> None:
    with servings(1) as (one,):
        process = one.start_ready()
        second = Serving(one.run_dir, f"{one.pool_name}-2")
        with client_engine(one.run_dir) as engine:
            engine.put("mine")
            second.start()
            code, text = second.ended()
            assert code not in (0, None)
            assert f"pid {process.pid}" in text
            assert not (SHM / second.pool_name).exists(), "refused before it took memory"
            assert engine.get("mine") == 48, "and the first one's sockets are still there"


def test_a_killed_holder_does_not_hold() -> None:
    with servings(2, pools=1) as (one, two):
        one.start_ready().send_signal(signal.SIGKILL)
        one.ended()
        two.start_ready()
        assert two.status()["pool"]["ready"] == 0


@pytest.mark.parametrize("where", [0, 8, 24, 4_000])
def test_a_damaged_pool_header_is_replaced_loudly(where: int) -> None:
    with servings(1) as (one,):
        one.start_ready()
        with client_engine(one.run_dir) as engine:
            engine.put("lost")
        stop(one)
        with (SHM / one.pool_name).open("r+b") as segment:
            segment.seek(where)
            segment.write(b"\xa5" * 96)
        one.start_ready()
        with client_engine(one.run_dir) as engine:
            hit = engine.get("lost")  # compares every byte of what it calls a hit
            engine.put("new")
            assert engine.get("new") == 48
        text = stop(one)
        if where < 4_000:  # beyond the header's fields it may stay a pool
            assert hit == 0
            assert "pool replaced: its objects are lost" in text


def test_a_foreign_file_under_the_pools_name_is_replaced_loudly() -> None:
    with servings(1) as (one,):
        foreign = SHM / one.pool_name
        foreign.touch(mode=0o600)  # others may not open it: it can only be ours
        foreign.write_bytes(os.urandom(12_345))
        one.start_ready()
        with client_engine(one.run_dir) as engine:
            engine.put("new")
            assert engine.get("new") == 48
        text = stop(one)
        assert "pool replaced: its objects are lost" in text
        assert "12345 bytes" in text


def test_a_directory_or_link_under_the_pools_name_is_refused(tmp_path: Path) -> None:
    with servings(1) as (one,):
        segment = SHM / one.pool_name
        segment.mkdir()
        try:
            one.start()
            code, text = one.ended()
            assert code not in (0, None)
            assert "tiers.host.name" in text
            assert "Traceback" not in text
        finally:
            segment.rmdir()
        victim = tmp_path / "victim"
        victim.write_bytes(b"precious")
        segment.symlink_to(victim)
        one.start()
        code, text = one.ended()
        assert code not in (0, None)
        assert "Traceback" not in text
        assert victim.read_bytes() == b"precious"


def test_sockets_that_cannot_be_removed_are_no_bad_end() -> None:
    with servings(1) as (one,):
        process = one.start_ready()
        with client_engine(one.run_dir) as engine:
            engine.put("held")
            admission, _ = engine.lease("held", 3)
            load = engine.submit(engine.load_job(admission, (4, 5, 6), step=1))
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: one.status()["pipeline"]["draining"], "it drains, and so looks away")
            sockets = [one.run_dir / "http.sock", *one.run_dir.glob("ctl-*.sock")]
            for path in sockets:
                path.unlink()
                path.mkdir()  # as on a file system that is read-only by now, unlink() fails
            assert len(sockets) == 2
            engine.memory.bound(1)
            assert engine.ended(load).status == "done"
        code, text = one.ended()
        assert code == 0, text
        assert "Traceback" not in text


@pytest.mark.parametrize("pool_bytes", ["64TiB", "9000000000GiB"])
def test_a_pool_that_cannot_fit_is_refused_with_the_remedy(pool_bytes: str) -> None:
    with servings(1, flags=("--pool-bytes", pool_bytes)) as (one,):
        one.start()
        code, text = one.ended()
        assert code not in (0, None)
        assert "remedy: " in text
        assert "Traceback" not in text
        assert not (SHM / one.pool_name).exists()
        left = {path.name for path in one.run_dir.iterdir()}
        assert left <= {"sidecar.lock"}, "no socket, nothing that looks like a sidecar"


def stop(serving: Serving) -> str:
    """End a sidecar in order and return what it wrote."""
    assert serving.process is not None
    serving.process.send_signal(signal.SIGTERM)
    code, text = serving.ended()
    assert code == 0, text
    return text


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_started_with_closed_standard_streams_it_serves(closed: str) -> None:
    """No file of its own has their numbers: what libraries and the watchdog say goes there."""
    with servings(1) as (one,):
        one.prefix = ("sh", "-c", f'exec "$@" {closed}', "sh")
        process = one.start_ready()
        open_as = Path(f"/proc/{process.pid}/fd")
        assert str((open_as / "2").readlink()) == "/dev/null"
        assert ("0<" in closed) == (str((open_as / "1").readlink()) == "/dev/null")
        process.send_signal(signal.SIGUSR2)  # prints where its threads are
        with client_engine(one.run_dir) as engine:
            engine.put("kept")
            assert engine.get("kept") == 48
        process.send_signal(signal.SIGTERM)
        assert one.ended() == (0, "")


def test_many_connections_to_the_hot_socket_do_not_end_it() -> None:
    """libzmq aborts where it gets no descriptor to accept with: the soft limit is raised."""
    small = {"limits.sessions_max": 1, "limits.ranks_max": 1, "limits.connections_max": 8}
    with servings(1, flags=set_flags(small)) as (one,), ExitStack() as streams:
        one.prefix = ("sh", "-c", 'ulimit -Sn 400; exec "$@"', "sh")
        process = one.start_ready()
        (control,) = one.run_dir.glob("ctl-*.sock")
        for _ in range(500):
            stream = streams.enter_context(socket.socket(socket.AF_UNIX))
            stream.connect(str(control))
        wait_until(lambda: process.poll() is not None or descriptors(process.pid) > 500, "accepted")
        with client_engine(one.run_dir) as engine:
            engine.put("kept")
            assert engine.get("kept") == 48
        streams.close()
        wait_until(lambda: descriptors(process.pid) < 100, "they are closed")


@NEEDS_ROOT
def test_too_few_threads_are_refused_with_the_remedy() -> None:
    """Libraries would abort, one after the other, without a word of what to change."""
    with servings(1) as (one,):
        room = 4 + (os.cpu_count() or 1)  # numpy's are at most as many, and come before
        one.prefix = (*COUNTED, "prlimit", f"--nproc={room}:{room}")
        one.flags = ("--copy-threads", "256")
        one.start()
        code, text = one.ended()
        assert code == ExitCode.USAGE, text
        assert "threads are needed" in text
        assert "pids" in text
        assert "Traceback" not in text
        assert not list(one.run_dir.iterdir())


@contextmanager
def held_at_its_configuration(one: Serving, folder: Path) -> Iterator[Callable[[], None]]:
    """Start a sidecar that goes on when the given function is called, with another file there."""
    file = folder / "kvferry.toml"
    os.mkfifo(file)
    one.flags = ("--config", str(file))
    process = one.start()
    writer = wait_until(lambda: _writer(file, process), "it reads its configuration")

    def go_on() -> None:
        file.unlink()
        file.write_text("[log]\nlevel = 'debug'\n")
        os.close(writer)

    try:
        yield go_on
    finally:
        with suppress(OSError):
            os.close(writer)


def _writer(file: Path, process: subprocess.Popen[str]) -> int:
    assert process.poll() is None, process.communicate()
    try:
        return os.open(file, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # nobody reads it yet
        return 0


@NEEDS_ROOT
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_while_it_starts_it_ends_in_a_container_too(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Whoever is pid 1 of a namespace loses signals that it has no handler for."""
    with servings(1) as (one,):
        one.prefix = ("unshare", "-pf", "--mount-proc", "--kill-child")
        with held_at_its_configuration(one, tmp_path):
            outer = one.process.pid
            (inner,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
            os.kill(int(inner), number)
            assert one.ended() == (128 + number, "")
        assert not list(one.run_dir.iterdir())


def test_a_signal_while_it_starts_ends_it_without_a_traceback(tmp_path: Path) -> None:
    with servings(1) as (one,), held_at_its_configuration(one, tmp_path):
        one.process.send_signal(signal.SIGINT)
        assert one.ended() == (-signal.SIGINT, "")


def test_a_hang_up_while_it_starts_ends_nothing(tmp_path: Path) -> None:
    with servings(1) as (one,), held_at_its_configuration(one, tmp_path) as go_on:
        one.process.send_signal(signal.SIGHUP)
        go_on()
        one.wait_ready()
        stop(one)

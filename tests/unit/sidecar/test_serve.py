"""`kvferry serve` as a process: start, refusals, drain, kill and warm restart."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest
import zmq
from kvferry_connector.wire import codec
from kvferry_connector.wire.attach import Group, Memory, Placement, Ready, Registered, Welcome
from kvferry_connector.wire.hot import Outcome, OutcomeAck, SaveJob, Submit, TableSlice
from kvferry_connector.wire.names import DONE_STEP_OFFSET, FENCE_PAGE_BYTES
from kvferry_sidecar import descriptors
from kvferry_sidecar.cli.query import ask_status
from kvferry_sidecar.errors import ConfigError, ExitCode, ProtocolError
from kvferry_sidecar.limits import Limits
from support.memory import sealed_memfd
from support.node import HalfClient
from support.node_messages import LIFE, VERSION, engine_registration, rank_registration
from support.serving import Serving, servings
from support.waiting import wait_until

PAGE = 4096
BLOCKS = 8


def test_sigterm_ends_an_idle_sidecar_in_order() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with servings(1) as (one,):
            process = one.start_ready()
            process.send_signal(number)
            code, text = one.ended()
            assert code == 0, text
            assert '"draining"' in text
            assert [path.name for path in one.run_dir.iterdir()] == ["sidecar.lock"]
            assert "Traceback" not in text


def test_a_second_sidecar_on_one_run_directory_is_refused() -> None:
    with servings(1) as (one,):
        process = one.start_ready()
        second = Serving(one.run_dir, one.pool_name)
        second.start()
        code, text = second.ended()
        assert code == 4
        assert f"pid {process.pid}" in text
        assert "remedy: stop that one or set another run_dir" in text
        assert one.status()["pid"] == process.pid, "the first one goes on"


def test_two_run_directories_naming_one_pool_are_refused() -> None:
    with servings(2, pools=1) as (one, two):
        process = one.start_ready()
        two.start()
        code, text = two.ended()
        assert code == 5
        assert f"pid {process.pid}" in text
        assert "tiers.host.name" in text
        assert one.status()["pid"] == process.pid
        assert not two.path.exists()


def test_a_killed_sidecar_leaves_a_pool_and_nothing_in_the_way() -> None:
    with servings(1) as (one,):
        process = one.start_ready()
        epoch = one.status()["epoch"]
        process.kill()
        one.ended()
        assert one.path.exists()
        (stale,) = one.run_dir.glob("ctl-*.sock")
        one.start_ready()
        assert one.status()["epoch"] != epoch
        assert not stale.exists()
        assert one.process is not None
        one.process.terminate()
        code, text = one.ended()
        assert code == 0
        assert '"warm": true' in text


class Engine:
    """One engine of this process: a scheduler half and rank 0 with real memory."""

    def __init__(self, serving: Serving) -> None:
        self.fence_fd, self.memory_fd = sealed_memfd(FENCE_PAGE_BYTES), sealed_memfd(PAGE * BLOCKS)
        self.fence = mmap.mmap(self.fence_fd, FENCE_PAGE_BYTES)
        self.scheduler, self.worker = serving.half(-1), serving.half(0)
        self.scheduler.say_hello()
        pidfd = os.pidfd_open(os.getpid())
        hello = self.worker.hello(memories=[Memory(0, PAGE * BLOCKS)])
        self.worker.send(hello, [pidfd, self.fence_fd, self.memory_fd])
        os.close(pidfd)
        welcome = self.worker.receive()
        assert isinstance(welcome, Welcome)
        self.welcome = welcome
        self._register(self.scheduler, engine_registration([0]))
        group = Group(0, "full", 16, {"dtype": "float32"}, ["l0"])
        place = Placement(0, ["l0"], 0, 0, PAGE * BLOCKS, PAGE, PAGE)
        self._register(
            self.worker,
            rank_registration(0, groups=[group], placements=[place], num_blocks=BLOCKS),
        )
        assert isinstance(self.worker.receive(), Ready)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, welcome.identity)
        self.socket.connect(welcome.endpoint)

    def _register(self, half: HalfClient, message: object) -> None:
        half.send(message)
        answer = half.receive()
        assert isinstance(answer, Registered), answer

    def send(self, message: object, *raw: bytes) -> None:
        where = {"epoch": self.welcome.epoch, "generation": self.welcome.generation}
        self.socket.send_multipart(codec.pack(message, raw, protocol=1, **where))

    def save(self, job: int) -> None:
        """Submit a save of one chunk that waits for step 1."""
        body = SaveJob(job, LIFE, VERSION, "request", 1, 1, 0, 16, 0, 32, [TableSlice(0, 0, 1)])
        blocks = (1).to_bytes(4, "little")
        self.send(Submit(codec.encode_job(body)), blocks, bytes(range(32)))

    def done(self, step: int) -> None:
        """Write the fence word that saves wait for."""
        self.fence[DONE_STEP_OFFSET : DONE_STEP_OFFSET + 8] = step.to_bytes(8, "little")

    def outcome(self) -> Outcome:
        assert self.socket.poll(90_000)
        message = codec.read_from_sidecar(self.socket.recv_multipart()[1])
        assert isinstance(message, Outcome), message
        return message

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()
        self.scheduler.close()
        self.worker.close()
        self.fence.close()
        os.close(self.fence_fd)
        os.close(self.memory_fd)


def open_saves(one: Serving) -> int:
    jobs = one.status()["pipeline"]["jobs_open"]
    return int(jobs["save"])


def test_sigterm_lets_what_is_in_flight_end() -> None:
    with servings(1) as (one,):
        process = one.start_ready()
        engine = Engine(one)
        engine.save(1)
        wait_until(lambda: open_saves(one) == 1, "the job is open")
        process.terminate()
        wait_until(lambda: one.status()["pipeline"]["draining"], "the sidecar drains")
        assert open_saves(one) == 1
        engine.done(1)
        outcome = engine.outcome()
        assert (outcome.job, outcome.status) == (1, "done")
        engine.send(OutcomeAck([1]))
        code, text = one.ended()
        assert code == 0, text
        assert "given up" not in text
        engine.close()


def test_the_drain_is_bounded() -> None:
    with servings(1, flags=("--set", "limits.drain_ms_max=100")) as (one,):
        process = one.start_ready()
        engine = Engine(one)
        engine.save(1)
        wait_until(lambda: open_saves(one) == 1, "the job is open")
        process.terminate()
        outcome = engine.outcome()
        assert (outcome.job, outcome.status) == (1, "failed")
        code, text = one.ended()
        assert code == 0, text
        engine.close()


def test_a_second_signal_ends_at_once() -> None:
    with servings(1) as (one,):
        process = one.start_ready()
        engine = Engine(one)
        engine.save(1)
        wait_until(lambda: open_saves(one) == 1, "the job is open")
        process.terminate()
        wait_until(lambda: one.status()["pipeline"]["draining"], "the sidecar drains")
        process.terminate()
        code, text = one.ended()
        assert code == 128 + signal.SIGTERM
        assert "ended at once" in text
        engine.close()


def test_status_shows_the_engine_and_no_orphan_stays_after_its_end() -> None:
    with servings(1) as (one,):
        one.start_ready()
        engine = Engine(one)
        (session,) = one.status()["sessions"]
        assert session["ready"]
        assert [half["role"] for half in session["halves"]] == ["scheduler", "worker"]
        # Two halves and the question; an earlier question's end may not have been noticed yet.
        wait_until(lambda: one.status()["loop"]["connections"] == 3, "the streams are counted")
        engine.close()
        wait_until(
            lambda: not any(half["connected"] for half in one.status()["sessions"][0]["halves"]),
            "the streams' end is noticed",
        )
        assert one.status()["sessions"], "this process lives: nothing is proven"
        assert ask_status(one.run_dir)


# --- what is around it fails -------------------------------------------------------------------


def attach_often(one: Serving, times: int) -> None:
    for _ in range(times):
        half = one.half(-1)
        half.say_hello()
        half.close()


def test_a_log_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen
    with servings(1) as (one,), Path("/dev/full").open("w") as full:
        monkeypatch.setattr(
            subprocess, "Popen", lambda *args, **kw: popen(*args, **(kw | {"stderr": full}))
        )
        process = one.start_ready()
        attach_often(one, 3)
        wait_until(lambda: one.status()["loop"]["log_lines_lost"] >= 4, "the lines are lost")
        process.terminate()
        assert process.wait(90) == 0


def test_a_log_reader_that_stopped_reading_holds_nothing_up() -> None:
    with servings(1) as (one,):
        process = one.start_ready()
        assert process.stderr is not None
        fcntl.fcntl(process.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        attach_often(one, 100)  # some 200 bytes each
        assert one.status()["pid"] == process.pid
        process.terminate()
        assert process.wait(90) == 0, "nor the end"
        one.ended()


def test_a_second_hang_up_does_not_hurry_the_drain() -> None:
    with servings(1) as (one,):
        process = one.start_ready()
        engine = Engine(one)
        engine.save(1)
        wait_until(lambda: open_saves(one) == 1, "the job is open")
        process.terminate()
        wait_until(lambda: one.status()["pipeline"]["draining"], "the sidecar drains")
        process.send_signal(signal.SIGHUP)
        assert open_saves(one) == 1  # asked after the signal: it was handled
        engine.done(1)
        assert engine.outcome().status == "done"
        engine.send(OutcomeAck([1]))
        code, text = one.ended()
        assert code == 0, text
        engine.close()


@pytest.mark.parametrize("which", ["attach.sock", "ctl-*.sock"])
def test_a_sidecar_whose_socket_was_removed_ends_to_be_started_again(which: str) -> None:
    """Engines that come later would not reach it."""
    with servings(1) as (one,):
        one.start_ready()
        (path,) = one.run_dir.glob(which)
        path.unlink()
        if path == one.path:
            path.write_text("another's")
        code, text = one.ended()
        assert code == ExitCode.RUN_DIR, text
        assert text.count("a socket was removed or replaced") == 1
        assert str(path) in text
        if path == one.path:
            assert path.read_text() == "another's"


def test_too_few_descriptors_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    few = descriptors.descriptors_min - 1
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (few, few))
    with pytest.raises(ConfigError, match="RLIMIT_NOFILE") as caught:
        descriptors.raise_descriptor_limit(Limits())
    assert "ulimit" in caught.value.remedy


def seated(one: Serving) -> HalfClient | None:
    """Return a half that was welcomed, None when there was no place for it."""
    half = one.half(-1)
    if isinstance(half.say_hello(), Welcome):
        return half
    half.close()
    return None


def test_a_status_that_finds_no_place_says_so() -> None:
    with servings(1, flags=("--set", "limits.connections_max=1")) as (one,):
        one.start_ready()
        sitter = wait_until(lambda: seated(one), "the last question's place is free")
        with pytest.raises(ProtocolError, match="connections-max") as caught:
            ask_status(one.run_dir)
        assert "limits.connections_max" in caught.value.remedy
        assert "version" not in caught.value.remedy
        sitter.close()

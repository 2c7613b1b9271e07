"""Nothing keeps a half from the proof that its sidecar is dead: its open loads wait for it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry_connector import lifeline
from kvferry_connector.acks import Acks
from kvferry_connector.client import Client, Half
from kvferry_connector.config import FerryConfig
from kvferry_connector.lifeline import Lifeline, unproven_epochs_max
from kvferry_connector.log import LOGGER
from kvferry_connector.wire import attach
from kvferry_connector.wire.version import LEFT_SINCE
from msgspec.structs import replace
from support.clients import ENGINE, RANK, SCHEDULER, Attach, Serve, ready_link
from support.mini_sidecar import MiniSidecar
from support.mounts import NEEDS_ROOT
from support.other_users import COUNTED
from support.waiting import wait_until


def test_death_is_proven_while_an_attach_gets_no_answer(serve: Serve, client_for: Attach) -> None:
    sidecar = serve(1)
    client = client_for(attach_ms_max=60_000)
    ready_link(client, 1)
    sidecar.do(hang_up=1)
    wait_until(lambda: sidecar.events("hung up"), "the stream is closed")
    sidecar.stop()  # the kernel still takes connections for it
    wait_until(lambda: client.link() is None or client.counts["attaches"] > 1, "noticed")
    assert not client.is_dead(1)
    sidecar.kill()
    wait_until(lambda: client.is_dead(1), "the pidfd proves the end")


def test_who_is_registered_can_be_given_jobs(
    serve: Serve, client_for: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler half is told at once; what it orders must find the rank's hot socket."""
    sidecar, registered = serve(1), []
    connect = Lifeline._connect

    def connected(self: Lifeline, welcome: Any) -> Any:
        hot = connect(self, welcome)
        registered.append(sidecar.events("register"))
        return hot

    monkeypatch.setattr(Lifeline, "_connect", connected)
    ready_link(client_for(), 1)
    assert registered == [[]]
    assert len(sidecar.events("register")) == 1


@pytest.mark.parametrize("method", ["_pump", "_keep", "_attach", "_beat", "_handle"])
def test_a_bug_in_the_thread_does_not_end_it(
    serve: Serve, client_for: Attach, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    sidecar = serve(1)
    client = client_for()
    ready_link(client, 1)
    raised: list[str] = []
    original = getattr(Lifeline, method)

    def sometimes(self: Lifeline, *args: Any) -> Any:
        if len(raised) < 3:
            raised.append(method)
            raise KeyError(method)
        return original(self, *args)

    monkeypatch.setattr(Lifeline, method, sometimes)
    if method in ("_keep", "_attach"):
        sidecar.do(hang_up=1)
    wait_until(lambda: len(raised) == 3, f"{method} has raised")
    ready_link(client, 1)
    sidecar.kill()
    wait_until(lambda: client.is_dead(1), "the pidfd proves the end")


@pytest.mark.parametrize(("method", "first"), [("_detach", 1), ("_show", 1), ("_show", 2)])
def test_a_bug_in_a_handler_does_not_end_it(
    serve: Serve, client_for: Attach, monkeypatch: pytest.MonkeyPatch, method: str, first: int
) -> None:
    """Whether it raises once, or also where the first one is handled."""
    sidecar = serve(1)
    client = client_for()
    ready_link(client, 1)
    raised: list[str] = []
    original = getattr(Lifeline, method)

    def sometimes(self: Lifeline, *args: Any) -> Any:
        if len(raised) < first:
            raised.append(method)
            raise KeyError(method)
        return original(self, *args)

    monkeypatch.setattr(Lifeline, method, sometimes)
    sidecar.do(hang_up=1)
    wait_until(lambda: len(raised) == first, f"{method} has raised")
    wait_until(lambda: client.counts["attaches"] >= 2, "attached again")
    ready_link(client, 1)
    sidecar.kill()
    wait_until(lambda: client.is_dead(1), "the pidfd proves the end")


def test_a_log_that_raises_does_not_end_it(
    serve: Serve, client_for: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = serve(1)
    client = client_for()
    ready_link(client, 1)
    raised: list[str] = []

    def full(record: logging.LogRecord) -> None:
        raised.append(record.getMessage())
        raise OSError("the disk of the log is full")

    monkeypatch.setattr(logging.getLogger(LOGGER), "handle", full)
    sidecar.do(hang_up=1)
    wait_until(lambda: len(raised) >= 2, "raised, and again where that is logged")
    monkeypatch.undo()
    wait_until(lambda: client.counts["attaches"] >= 2, "attached again")
    sidecar.kill()
    wait_until(lambda: client.is_dead(1), "the pidfd proves the end")


def test_a_bug_while_nobody_answers_does_not_end_it(
    serve: Serve, client_for: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait before the next attach watches too: a stream ends before its process."""
    sidecar = serve(1)
    client = client_for()
    ready_link(client, 1)
    raised: list[int] = []
    original = Lifeline._pump

    def without_stream(self: Lifeline, until: float) -> None:
        if self._stream is None and not raised:
            raised.append(1)
            raise KeyError("a bug")
        original(self, until)

    monkeypatch.setattr(Lifeline, "_pump", without_stream)
    sidecar.do(hang_up=1)
    wait_until(lambda: raised, "it has raised")
    sidecar.kill()
    wait_until(lambda: client.is_dead(1), "the pidfd proves the end")


def test_a_death_is_never_forgotten(serve: Serve, client_for: Attach) -> None:
    client = client_for()
    for epoch in range(1, 2 * unproven_epochs_max):
        sidecar = serve(epoch)
        ready_link(client, epoch)
        sidecar.kill()
        wait_until(lambda e=epoch: client.is_dead(e), "the pidfd proves the end")
    assert all(client.is_dead(epoch) for epoch in range(1, 2 * unproven_epochs_max))


def test_only_so_many_sidecars_are_watched() -> None:
    """More than that cannot be without a fault: each holds the lock of the run directory."""
    lifeline = Lifeline.__new__(Lifeline)
    own = os.pidfd_open(os.getpid())
    lifeline.unproven = {}
    for epoch in range(1, unproven_epochs_max + 1):
        lifeline._watch(epoch, os.dup(own))
    lifeline._watch(1, os.dup(own))
    with pytest.raises(Exception, match="end the old ones"):
        lifeline._watch(99, own)
    assert sorted(lifeline.unproven) == list(range(1, unproven_epochs_max + 1))
    for fd in lifeline.unproven.values():
        os.close(fd)


def test_acknowledgements_that_a_hook_sends_beside_a_heartbeat_are_all_sent_once(
    tmp_path: Path,
) -> None:
    """A hook takes some and hears more while the heartbeat, which has taken its own, is sent."""
    client = Client(FerryConfig(run_dir=str(tmp_path)), SCHEDULER, ENGINE)
    acks, sent = Acks([1, 2, 3]), []

    def send(beat: attach.Heartbeat) -> None:
        sent.extend(beat.acks)
        sent.extend(acks.take(2))
        acks.extend([len(sent) + 10, len(sent) + 20])
        acks.put_back(acks.take(1))

    client.set_acks(acks)
    client._lifeline._stream = SimpleNamespace(send=send, unsent=False)
    for _ in range(3):
        client._lifeline._beat()
    assert sent == [1, 2, 3, 13, 23, 15, 25]
    assert acks == Acks([17, 27])


def test_what_is_no_pidfd_proves_nothing(serve: Serve, client_for: Attach) -> None:
    sidecar = serve(1, "--no-pidfd")
    client = client_for()
    wait_until(lambda: client.counts["attach_failures"] >= 2, "tries")
    assert client.link() is None
    assert sidecar.events("register") == []


# --- the engine sleeps -----------------------------------------------------------------------

WORKER = Half("worker", "engine", "instance", 0)
SECOND = replace(RANK, serial=2)


def serials(sidecar: MiniSidecar) -> list[int]:
    return [event["serial"] for event in sidecar.events("register")]


def test_memory_is_taken_back_and_lent_again(serve: Serve, client_for: Attach) -> None:
    sidecar = serve(1)
    client = client_for(WORKER, RANK)
    ready_link(client, 1)
    assert client.withdraw(30)
    assert (client.link(), client.state) == (None, "asleep")
    assert client.withdraw(30), "again"
    assert len(sidecar.events("bye")) == 1
    client.lend(SECOND, ())
    ready_link(client, 1)
    assert serials(sidecar) == [1, 2]


def test_who_was_never_attached_has_lent_nothing(serve: Serve, client_for: Attach) -> None:
    client = client_for(WORKER, RANK)
    assert client.withdraw(30)
    sidecar = serve(1)
    client.lend(SECOND, ())
    ready_link(client, 1)
    assert serials(sidecar) == [2]


@pytest.mark.parametrize("end", ["answer", "death"])
def test_nothing_is_lent_before_the_former_is_back(
    serve: Serve, client_for: Attach, end: str
) -> None:
    """The sidecar is slow to answer, or loses the stream, and the engine wakes up meanwhile."""
    sidecar = serve(1, "--keeps-memory")
    client = client_for(WORKER, RANK)
    ready_link(client, 1)
    assert not client.withdraw(0.05)
    client.lend(SECOND, ())
    wait_until(lambda: sidecar.events("bye"), "Bye")
    sidecar.do(hang_up=1)
    wait_until(lambda: len(sidecar.events("bye")) == 2, "it attaches again, only to say Bye")
    assert serials(sidecar) == [1, 1]
    assert client.link() is None
    if end == "answer":
        sidecar.do(let_go=1)
        ready_link(client, 1)
    else:
        sidecar.kill()
        sidecar = serve(2)
        ready_link(client, 2)
    assert serials(sidecar)[-1] == 2


def test_a_sidecar_that_answers_no_bye_is_left_alone_until_it_ends(
    serve: Serve, client_for: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made before that answer, so attaching again would tell no more."""
    monkeypatch.setattr(lifeline, "backoff_s_max", 0.02)
    rests, rest = [0], Lifeline._rest

    def counted(self: Lifeline, backoff_s: float) -> None:
        rests[0] += 1
        rest(self, backoff_s)

    sidecar = serve(1, "--keeps-memory", "--protocol", str(LEFT_SINCE - 1))
    client = client_for(WORKER, RANK)
    ready_link(client, 1)
    assert not client.withdraw(0.05)
    monkeypatch.setattr(Lifeline, "_rest", counted)
    wait_until(lambda: rests[0] > 30, "it had time to attach again")
    assert len(sidecar.events("hello")) == 1
    client.lend(SECOND, ())
    sidecar.kill()
    sidecar = serve(2)
    ready_link(client, 2)
    assert serials(sidecar) == [2]


def test_a_sleep_before_the_last_wake_was_obeyed_counts(serve: Serve, client_for: Attach) -> None:
    sidecar = serve(1)
    client = client_for(WORKER, RANK)
    ready_link(client, 1)
    for serial in range(2, 12):
        assert client.withdraw(30)
        client.lend(replace(RANK, serial=serial), ())
        if serial % 2:
            ready_link(client, 1)
    assert client.withdraw(30)
    assert client.link() is None
    assert serials(sidecar) == sorted(set(serials(sidecar)))


def test_an_engine_that_ends_waits_for_its_memory_but_not_for_ever(
    serve: Serve, client_for: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline, "leave_s_max", 0.1)
    sidecar = serve(1, "--keeps-memory")
    client = client_for(WORKER, RANK)
    ready_link(client, 1)
    client.close()
    wait_until(lambda: client.state == "stopped", "its thread has ended")
    wait_until(lambda: sidecar.events("bye"), "Bye")


@pytest.mark.parametrize(
    ("what", "prefix"),
    [("descriptors", ()), pytest.param("threads", COUNTED, marks=NEEDS_ROOT)],
)
def test_no_room_never_ends_the_engine(serve: Serve, tmp_path: Path, what: str, prefix) -> None:
    """ZeroMQ aborts the process where its threads get none; a half waits until there is room."""
    serve(1)
    command = [*prefix, sys.executable, "-m", "support.cramped_half", str(tmp_path), what, "16"]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    served = json.loads(ended.stdout)
    assert 0 not in served
    assert served, "with room for some it attaches at once"

"""The client against a real attach server and ROUTER in another process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from kvferry_connector import lifeline, stream
from kvferry_connector.client import Client, Half, Link, MemoryHandle
from kvferry_connector.config import FerryConfig
from kvferry_connector.log import LOGGER
from kvferry_connector.wire import attach, hot
from kvferry_connector.wire.names import FENCE_PAGE_BYTES, NO_VERSION
from kvferry_connector.wire.version import PROTOCOL_MAX
from support import forking_half
from support.clients import ENGINE, RANK, SCHEDULER, Attach, Serve, ready_link
from support.mini_sidecar import MiniSidecar
from support.waiting import wait_until


def received(client: Client, link: Link, count: int) -> list:
    taken: list = []
    wait_until(lambda: taken.extend(client.receive(link)) or len(taken) >= count, f"{count} frames")
    return taken


def hot_texts(sidecar: MiniSidecar) -> list[str]:
    return [event["text"] for event in sidecar.events("hot")]


def test_attach_send_receive_and_leave(serve: Serve, client_for: Attach) -> None:
    sidecar = serve(7)
    client = client_for()
    link = ready_link(client, 7)
    assert link == Link(7, 1, PROTOCOL_MAX, ("all",), ready=True)
    assert (client.state, client.refusal, client.silent()) == ("ready", None, False)
    assert client.send(link, hot.Release([4, 5]), [b"abc"])
    event = wait_until(lambda: sidecar.events("hot"), "the frame arrives")[0]
    assert (event["identity"], event["epoch"], event["generation"]) == ("half-1", 7, 1)
    assert (event["text"], event["raw"]) == (str(hot.Release([4, 5])), ["YWJj"])
    sidecar.do(hint=9, epoch=7, generation=1, to="half-1")
    assert received(client, link, 1) == [(hot.Hint(9, 64, 4), [b"raw"])]
    client.close()
    wait_until(lambda: sidecar.events("bye"), "Bye")
    wait_until(lambda: client.state == "stopped", "its thread has ended")
    assert client.link() is None
    assert client.silent()


def test_hello_carries_pidfd_fence_and_memories(serve: Serve, client_for: Attach) -> None:
    sidecar = serve(1)
    fds = [os.memfd_create(name) for name in ("fence", "kv0", "kv1")]
    sizes = [FENCE_PAGE_BYTES, 1 << 20, 2 << 20]
    for fd, size in zip(fds, sizes, strict=True):
        os.truncate(fd, size)
    memories = [MemoryHandle(attach.Memory(i, sizes[1 + i]), fds[1 + i]) for i in (0, 1)]
    client = client_for(Half("worker", "engine", "instance", 3, fds[0]), RANK, memories)
    ready_link(client, 1)
    hello = sidecar.events("hello")[0]
    assert (hello["role"], hello["rank"], hello["pid"]) == ("worker", 3, os.getpid())
    assert "pidfd" in hello["kinds"][0]
    assert [kind.split()[0] for kind in hello["kinds"][1:]] == [
        "/memfd:fence", "/memfd:kv0", "/memfd:kv1",
    ]  # fmt: skip
    assert hello["sizes"][1:] == sizes
    assert os.fstat(fds[0]).st_size == FENCE_PAGE_BYTES, "borrowed descriptors stay open"
    client.close()
    for fd in fds:
        os.close(fd)


def test_a_new_epoch_is_attached_while_the_engine_is_idle(serve: Serve, client_for: Attach) -> None:
    first = serve(1)
    client = client_for()
    old = ready_link(client, 1)
    assert not client.is_dead(1)
    first.kill()
    wait_until(lambda: client.is_dead(1), "the pidfd proves the end")
    assert client.link() is None
    assert client.silent()
    second = serve(2)
    # No call of the hook thread: the lifeline does it alone.
    wait_until(lambda: second.events("register"), "registered by itself")
    wait_until(lambda: client.state == "ready", "ready by itself")
    assert not client.send(old, hot.Release([1])), "the old link takes nothing any more"
    new = ready_link(client, 2)
    assert client.send(new, hot.Release([2]))
    wait_until(lambda: hot_texts(second), "the new link works")
    assert hot_texts(second) == [str(hot.Release([2]))]
    assert client.is_dead(1)
    assert not client.is_dead(2)


def test_what_waits_for_a_dead_sidecar_never_reaches_the_next(
    serve: Serve, client_for: Attach, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/same-for-both.sock"  # worse than real: epochs have their own
    first = serve(1, "--endpoint", endpoint)
    client = client_for()
    old = ready_link(client, 1)
    first.stop()
    filled = 0
    while client.send(old, hot.Release([filled]), [bytes(1 << 10)]):
        filled += 1
        assert filled < 100_000, "a stopped sidecar's queue is bounded"
    assert filled > 1
    assert client.counts["frames_refused"] == 1
    first.kill()
    # Another routing id: the old socket, which may connect after the new one, would take it over.
    second = serve(2, "--endpoint", endpoint, "--first-generation", "2")
    new = ready_link(client, 2)
    assert client.send(new, hot.Release([-1]))
    wait_until(lambda: hot_texts(second), "the new frame arrives")
    assert hot_texts(second) == [str(hot.Release([-1]))]


def test_stale_and_foreign_frames_are_dropped(serve: Serve, client_for: Attach) -> None:
    sidecar = serve(5)
    client = client_for()
    link = ready_link(client, 5)
    sidecar.do(hint=1, epoch=4, generation=1, to="half-1")
    sidecar.do(hint=2, epoch=5, generation=2, to="half-1")
    sidecar.do(garbage="nonsense", to="half-1")
    sidecar.do(hint=3, epoch=5, generation=1, to="half-1")
    assert [message.admission for message, _ in received(client, link, 1)] == [3]
    assert client.counts["stale_dropped"] == 2
    assert client.counts["garbage_dropped"] == 1
    told: Counter[str] = Counter()
    for _ in range(2):  # nothing is told again
        client.tell(lambda name, number: told.update({name: number}))
    assert (told["stale_dropped"], told["garbage_dropped"]) == (2, 1)
    assert told["attaches"] == 1, "the other thread's"


@pytest.mark.parametrize(
    ("flag", "code"), [("--refuse-hello", "busy"), ("--refuse-registration", "geometry")]
)
def test_a_refusal_is_kept_logged_once_and_retried(
    flag: str, code: str, serve: Serve, client_for: Attach, ferry_log: pytest.LogCaptureFixture
) -> None:
    ferry_log.set_level(logging.INFO, LOGGER)
    sidecar = serve(1, flag)
    client = client_for()
    wait_until(lambda: client.counts["refusals"] >= 2, "refused twice")
    assert client.link() is None
    assert client.refusal is not None
    assert (client.refusal.code, client.state) == (code, "refused")
    refused = [r.getMessage() for r in ferry_log.records if "refused" in r.getMessage()]
    assert len(refused) == 1
    if code == "geometry":
        assert "kind: engine mla, sidecar full (serve another model)" in refused[0]
    sidecar.kill()
    serve(2)
    ready_link(client, 2)
    assert client.refusal is None


def make_foreign(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(folder, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)


def make_link(folder: Path, _: pytest.MonkeyPatch) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (make_foreign, "the run directory belongs to uid"),
        (make_link, "run is no directory"),
        (lambda folder, _: folder.chmod(0o720), "has mode 0720, so that others could"),
        (lambda folder, _: folder.chmod(0o1702), "has mode 1702, so that others could"),
    ],
)
def test_nothing_is_handed_over_in_a_folder_of_others(
    spoil: Callable[[Path, pytest.MonkeyPatch], None], text: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    sidecar = MiniSidecar(folder, 1)
    wait_until(lambda: sidecar.events("listening"), "the mini sidecar listens")
    spoil(folder, monkeypatch)
    client = Client(FerryConfig(run_dir=str(folder)), SCHEDULER, ENGINE, ())
    client.start()
    wait_until(lambda: client.counts["refusals"] >= 2, "refused twice")
    assert client.refusal is not None
    assert (client.refusal.code, client.state) == ("untrusted", "refused")
    assert text in client.refusal.message
    client.close()
    assert sidecar.events("hello") == sidecar.events("hung up") == []
    sidecar.kill()


@pytest.mark.parametrize("uid", [4711, 65534])
def test_nothing_is_handed_over_to_another_user(
    uid: int, serve: Serve, client_for: Attach, monkeypatch: pytest.MonkeyPatch,
    ferry_log: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    flags = ["--listen-uid", str(uid)]
    if os.geteuid() != 0:  # then nobody else can listen: the kernel's word is made up
        flags = []
        monkeypatch.setattr(stream, "peer_uid", lambda _: uid)
    sidecar = serve(1, *flags)
    client = client_for()
    wait_until(lambda: client.counts["refusals"] >= 2, "refused twice")
    assert client.refusal is not None
    assert (client.refusal.code, client.state) == ("untrusted", "refused")
    assert f"attach.sock is served by uid {uid}, the engine is uid" in client.refusal.message
    assert f"; run the sidecar as uid {os.geteuid()}, or set run_dir" in client.refusal.message
    assert ("another user namespace" in client.refusal.message) == (uid == 65534)
    said = [r.getMessage() for r in ferry_log.records if "refused to attach" in r.getMessage()]
    assert len(said) == 1
    wait_until(lambda: len(sidecar.events("hung up")) >= 2, "each stream is closed")
    assert sidecar.events("hello") == []
    sidecar.kill()
    monkeypatch.undo()
    serve(2)
    ready_link(client, 2)
    assert client.refusal is None


def test_a_stopped_sidecar_is_silent_but_not_dead(serve: Serve, client_for: Attach) -> None:
    sidecar = serve(1)
    client = client_for(silent_ms_max=200)
    link = ready_link(client, 1)
    wait_until(lambda: not client.silent(), "heard")
    sidecar.stop()
    wait_until(client.silent, "silent")
    assert client.link() == link, "it keeps what it was given"
    assert not client.is_dead(1)
    sidecar.go_on()
    wait_until(lambda: not client.silent(), "heard again")
    assert client.counts["attaches"] == 1


def test_a_closed_stream_is_no_death(serve: Serve, client_for: Attach) -> None:
    sidecar = serve(1)
    client = client_for()
    link = ready_link(client, 1)
    sidecar.do(hang_up=1)
    wait_until(lambda: client.counts["attaches"] == 2, "attached again")
    again = ready_link(client, 1)
    assert again.key == link.key
    assert not client.is_dead(1)
    assert client.send(again, hot.Release([8])), "the hot socket outlives the stream"
    wait_until(lambda: hot_texts(sidecar), "delivered")


def test_a_stream_that_outlives_its_sidecar_holds_nobody_up(
    serve: Serve, client_for: Attach
) -> None:
    first = serve(1)
    client = client_for()
    ready_link(client, 1)
    first.do(hold=1)
    wait_until(lambda: first.events("held"), "a child has the stream too")
    child = first.events("held")[0]["pid"]
    try:
        first.kill()
        serve(2)
        ready_link(client, 2)
    finally:
        os.kill(child, signal.SIGKILL)


def test_heartbeats_carry_the_leases(serve: Serve, client_for: Attach) -> None:
    sidecar = serve(1)
    client = client_for()
    ready_link(client, 1)
    live = [3, 4]
    client.set_live(17, live)
    live.clear()  # the caller's list is its own
    wait_until(
        lambda: any((b["as_of"], b["live"]) == (17, [3, 4]) for b in sidecar.events("beat")),
        "a heartbeat with the leases",
    )
    seqs = [beat["seq"] for beat in sidecar.events("beat")]
    assert seqs == list(range(1, len(seqs) + 1))


def test_a_version_is_rotated_now_and_at_every_attach(serve: Serve, client_for: Attach) -> None:
    first = serve(1)
    client = client_for()
    ready_link(client, 1)
    assert first.events("register")[0]["version"] == NO_VERSION.hex()
    version = bytes([7] * 16)
    client.rotate(version)
    wait_until(lambda: first.events("rotate"), "Rotate")
    assert first.events("rotate")[0]["version"] == version.hex()
    first.kill()
    second = serve(2)
    ready_link(client, 2)
    assert second.events("register")[0]["version"] == version.hex()


def test_receive_waits_no_longer_than_asked(serve: Serve, client_for: Attach) -> None:
    sidecar = serve(1)
    client = client_for()
    link = ready_link(client, 1)

    def waited_s() -> float:
        start = time.perf_counter()
        assert client.receive(link, wait_us=300) == []
        return time.perf_counter() - start

    # One of them: other work delays some. A poll in whole milliseconds would take longer each time.
    wait_until(lambda: 300e-6 <= waited_s() < 1e-3, "a wait as short as asked")
    for admission in range(200):  # an edge that is missed would end in a wait of a full second
        sidecar.do(hint=admission, epoch=1, generation=1, to="half-1")
        start = time.perf_counter()
        ((message, _),) = client.receive(link, wait_us=300_000_000)
        assert message == hot.Hint(admission, 64, 4)
        assert time.perf_counter() - start < 200


def test_without_a_sidecar_nothing_blocks_and_no_thread_is_tried(
    client_for: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(lifeline, "start_threads", tried.append)
    client = client_for()
    wait_until(lambda: client.counts["attach_failures"] >= 3, "tries")
    assert (client.link(), client.state, client.silent()) == (None, "away", True)
    assert tried == []
    gone = Link(1, 1, 1, ())
    start = time.perf_counter()
    assert not client.send(gone, hot.Release([1]))
    assert client.receive(gone, wait_us=300_000_000) == []
    assert time.perf_counter() - start < 200


def test_a_forked_child_starts_anew(serve: Serve, tmp_path: Path) -> None:
    sidecar = serve(1)
    script = Path(forking_half.__file__)
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        check=False,
        timeout=120,
        env={"PYTHONPATH": str(script.parent.parent)},
    )
    assert done.returncode == 0
    pids = [event["pid"] for event in sidecar.events("hello")]
    assert len(pids) == len(set(pids)) == 2, "the child introduced itself by its own pid"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, kvferry_connector, kvferry_connector.client, kvferry_connector.wire.attach\n"
        "heavy = {'vllm', 'torch', 'cupy', 'kvferry_sidecar', 'kvferry_native'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")

"""HTTP without a loop that answers: while the pool is made, when it hangs, and its addresses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import re
import select
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from kvferry_sidecar.errors import ExitCode, HttpError, RunDirError
from kvferry_sidecar.loop import READ, Loop
from kvferry_sidecar.observe.http import protocol, ui
from kvferry_sidecar.observe.http.guard import read_token
from kvferry_sidecar.observe.http.server import HttpServer, bind_tcp, bind_unix
from kvferry_sidecar.observe.http.window import Window
from kvferry_sidecar.observe.mailbox import BusyError, Mailbox, questions_max
from kvferry_sidecar.observe.progress import WorkStatus
from starlette.applications import Starlette
from starlette.testclient import TestClient
from support.http import Http
from support.pipeline_bed import Bed
from support.readings import reading
from support.serving import servings
from support.waiting import wait_until


@contextlib.contextmanager
def served(tmp_path, stall_s_max=0.5):
    """An HTTP thread whose control loop never turns."""
    mailbox = Mailbox()
    began_s = time.monotonic()
    window = Window(mailbox, lambda: began_s, stall_s_max)
    server = HttpServer(window, lambda: "", structlog.get_logger())
    server.add(bind_unix(tmp_path / "s"), "local")
    server.start()
    try:
        yield Http(tmp_path / "s"), window
    finally:
        server.close()
        mailbox.close()
        assert not any(thread.name == "http" for thread in threading.enumerate())


def test_while_the_pool_is_made_it_lives_and_has_not_started(tmp_path):
    with served(tmp_path, stall_s_max=0.0) as (http, window):
        assert http.get("/livez").status == 200
        window.progress = lambda: [WorkStatus("pool", "bytes", 3 << 30, 8 << 30, 4.0, 6.7)]
        startup = http.get("/startupz")
        assert startup.status == 503
        assert "is being made, 3221225472 of 8589934592 bytes" in startup.text
        assert "its pool is being made" in http.get("/readyz").text
        assert http.get("/metrics").status == 503
        assert http.get("/api/v1/status").json()["error"] == "unavailable"
        assert http.get("/api/v1/events").json() == []


def test_a_loop_that_hangs_is_neither_alive_nor_ready(tmp_path):
    with served(tmp_path) as (http, window):
        window.desk = SimpleNamespace(events=list, settings=list)
        wait_until(lambda: http.get("/livez").status == 503, "the bound is over")
        assert "no turn for" in http.get("/livez").text
        assert "did not answer in 0.8 s" in http.once("/readyz").text
        assert http.get("/startupz").status == 200
        assert http.once("/metrics").status == 503, "nothing was ever read"
        window.last = reading(Bed(now_s=time.monotonic() - 30.0))
        lag = re.search(
            r"^kvferry_loop_lag_seconds (\S+)$", http.once("/metrics").text, re.MULTILINE
        )
        assert float(lag[1]) >= 30.0
        bundle = http.get("/debug/bundle")
        assert bundle.status == 200, "what there is without the loop"


class Leaping(asyncio.SelectorEventLoop):
    """An event loop whose process can stand still for as long as a test says."""

    stood_s = 0.0

    def time(self):
        return super().time() + self.stood_s


def test_a_process_that_stood_still_has_not_waited_for_an_answer():
    mailbox = Mailbox()
    window = Window(mailbox, time.monotonic, 1.0)
    window.desk = SimpleNamespace(word="late")

    async def ask():
        task = asyncio.create_task(window.ask(lambda desk, _now_s: desk.word, 200.0))
        await asyncio.sleep(0)
        asyncio.get_running_loop().stood_s = 300.0
        await asyncio.sleep(0.01)
        mailbox.on_wake(0, 0.0)
        return await task

    with contextlib.closing(mailbox), asyncio.Runner(loop_factory=Leaping) as runner:
        assert runner.run(ask()) == "late"


def test_who_sends_no_whole_request_in_time_is_closed(tmp_path, monkeypatch):
    with served(tmp_path) as (http, _), http.connected() as kept:
        kept.request("GET", "/livez")
        kept.getresponse().read()
        monkeypatch.setattr(protocol, "peer_s_max", 0.1)
        whole = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
        action = whole.replace(b"GET /livez", b"POST /api/v1/actions/drain")
        for head in (b"", whole, action + b"Content-Length: 9\r\n\r\n{"):
            with socket.socket(socket.AF_UNIX) as late, contextlib.suppress(ConnectionError):
                late.settimeout(60)
                late.connect(str(tmp_path / "s"))
                late.sendall(head)
                assert late.recv(1) == b"", "closed without a word"


def unread(where, pages=40):
    """A connection that asks for more than fits between two processes, and reads nothing."""
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(60)
    one.connect(str(where))
    one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * pages)
    wait_until(lambda: select.select([one], [], [], 0)[0], "it is being answered")
    return one


def test_who_does_not_read_what_it_asked_for_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "peer_s_max", 0.5)
    with served(tmp_path) as (http, window):
        window.last = reading(Bed())
        whole_bytes = 40 * len(http.once("/metrics").body)
        with unread(tmp_path / "s") as one:
            wait_until(lambda: not established(tmp_path / "s"), "it is closed")
            got = b"".join(iter(functools.partial(one.recv, 1 << 16), b""))
        assert 0 < len(got) < whole_bytes


def established(path):
    """Connections to a Unix socket that its server has open."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if line.endswith(str(path)) and line.split()[5] == "03"]


def test_who_does_not_read_what_it_asked_for_keeps_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "connections_max", 4)
    monkeypatch.setattr(protocol, "peer_s_max", 600.0)

    def lives():
        with contextlib.suppress(ConnectionError, http.client.RemoteDisconnected):
            return server.get("/livez").status == 200

    with served(tmp_path) as (server, window), contextlib.ExitStack() as stack:
        window.last = reading(Bed())
        for _ in range(protocol.connections_max):
            stack.enter_context(unread(tmp_path / "s"))
        wait_until(lives, "a probe is answered")


def test_questions_are_bounded_and_errors_belong_to_whoever_asks():
    mailbox, loop = Mailbox(), Loop(lambda error, what: pytest.fail(what))
    loop.watch(mailbox.fd, READ, mailbox.on_wake)
    fails = mailbox.ask(lambda _now_s: 1 // 0)
    given_up = mailbox.ask(lambda _now_s: pytest.fail("nobody waits for it"))
    given_up.cancel()
    rest = [mailbox.ask(lambda now_s: now_s) for _ in range(questions_max - 2)]
    with pytest.raises(BusyError):
        mailbox.ask(lambda _now_s: None)
    loop.turn(0.0)
    with pytest.raises(ZeroDivisionError):
        fails.result(0)
    assert all(future.result(0) > 0 for future in rest)
    waits = mailbox.ask(lambda _now_s: None)
    loop.unwatch(mailbox.fd)
    mailbox.close()
    loop.close()
    assert waits.cancelled()
    with pytest.raises(BusyError):
        mailbox.ask(lambda _now_s: None)


def test_a_chosen_address_that_is_taken_ends_the_start_and_the_default_one_does_not():
    with servings(1) as (one,), socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        one.http = ("--http-listen", address)
        one.start()
        code, text = one.ended()
        assert code == 2
        assert f"http.listen = '{address}' cannot be bound" in text


def test_an_address_that_nobody_chose_may_be_taken():
    with servings(1) as (one,), socket.create_server(("127.0.0.1", 0)) as taken:
        default = f"127.0.0.1:{taken.getsockname()[1]}"  # the real one may come free any time
        patch = f"from kvferry_sidecar import config; config.HTTP_LISTEN = '{default}'"
        one.command = f"{patch}; {one.command}"
        one.http = ()
        one.start_ready()
        local = Http(one.run_dir / "http.sock")
        assert 'kvferry_degraded{what="http"} 1.0' in local.get("/metrics").text
        assert local.get("/readyz").status == 200


def test_an_address_that_is_none():
    with pytest.raises(HttpError) as caught:
        bind_tcp("http.listen", "no.such.host.invalid:1")
    assert "http.listen" in caught.value.message


@pytest.mark.parametrize(("text", "words"), [("short", "shorter than 16"), ("é" * 20, "not ASCII")])
def test_a_token_that_is_no_secret_is_refused(tmp_path, text, words):
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(HttpError, match=words):
        read_token(str(file))
    with pytest.raises(HttpError, match="cannot be read"):
        read_token(str(tmp_path / "absent"))
    assert read_token("") == ""


def test_without_a_built_page_it_says_how_to_build_it(tmp_path):
    client = TestClient(Starlette(routes=ui.routes(tmp_path)), follow_redirects=False)
    answer = client.get("/ui/")
    assert (answer.status_code, "make ui" in answer.text) == (501, True)
    assert client.get("/").headers["location"] == "ui/"
    (tmp_path / "index.html").write_text("built")
    assert TestClient(Starlette(routes=ui.routes(tmp_path))).get("/ui/").text == "built"


def test_a_socket_that_cannot_be_made_blames_the_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="cannot be bound") as refused:
        bind_unix(tmp_path / "missing" / "http.sock")
    assert refused.value.exit_code is ExitCode.RUN_DIR

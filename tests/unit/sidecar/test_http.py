"""HTTP of a real sidecar: probes, the API, actions and who may ask for them."""

from __future__ import annotations

import io
import json
import re
import socket
import zipfile
from contextlib import ExitStack

import pytest
from kvferry_sidecar.cli import main
from kvferry_sidecar.observe.http.api import streams_max
from kvferry_sidecar.observe.http.protocol import connections_max
from support.books import descriptors
from support.hot_engine import raw_engine
from support.http import Http
from support.raw_half import RawHalf, engine_registration
from support.sidecar import running_sidecar
from support.waiting import wait_until

LIFE = b"H" * 16
TOKEN = "a-token-of-these-tests-0123"


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN + "\n")
    return file


@pytest.fixture(scope="module")
def sidecar(token_file):
    flags = [
        *("--http-listen", "127.0.0.1:0", "--set", "http.probes_listen=127.0.0.1:0"),
        *("--set", f"http.token_file={token_file}", "--log-format", "json"),
    ]
    with running_sidecar(pool_bytes=8 << 20, flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def local(sidecar):
    return Http(sidecar.run_dir / "http.sock")


def address(local, setting):
    told = [e for e in local.get("/api/v1/events").json() if e.get("setting") == setting]
    host, _, port = told[-1]["address"].rpartition(":")
    return Http((host, int(port)))


@pytest.fixture(scope="module")
def tcp(local):
    return address(local, "http.listen")


@pytest.fixture(scope="module")
def probes(local):
    return address(local, "http.probes_listen")


@pytest.fixture
def engine(sidecar):
    with raw_engine(sidecar.run_dir, LIFE) as one:
        yield one


def test_probes_of_an_idle_sidecar(tcp, probes, local):
    for http in (tcp, probes, local):
        for path in ("/livez", "/readyz", "/startupz"):
            # A probe has 0.8 s, which a busy machine may need for something else.
            wait_until(lambda h=http, p=path: h.get(p).text == "ok\n", f"{path} is ok")
    assert "[+] pool: " in probes.get("/readyz?verbose").text


def test_readyz_names_the_rank_that_is_missing(sidecar, probes):
    half = RawHalf(sidecar.run_dir, engine_id="lonely")
    half.attach()
    half.register(engine_registration([0, 1], b"l" * 16))
    answer = probes.get("/readyz")
    assert answer.status == 503
    assert "[-] engine lonely/one: ranks [0, 1] are not registered" in answer.text
    assert probes.get("/livez").status == 200
    half.leave()
    wait_until(lambda: probes.get("/readyz").status == 200, "the half is gone")


def test_the_probes_port_serves_nothing_else(probes):
    assert probes.get("/metrics").status == 200
    for path in ("/api/v1/status", "/debug/bundle", "/ui/", "/api/v1/actions/drain"):
        assert probes.get(path).status == 404
    assert probes.post("/api/v1/actions/drain", authorization=f"Bearer {TOKEN}").status == 404


def test_a_request_is_explained_and_counted(sidecar, local, engine, capsys):
    engine.put("told", [1, 2, 3])
    assert engine.get("told", [4, 5, 6]) == 48
    assert engine.get("never seen", [4, 5, 6]) == 0
    (told,) = wait_until(
        lambda: [r for r in local.get("/api/v1/requests/told").json() if r["ended"]],
        "the release was handled",
    )
    assert told["verdict"] == "Hit 48 tokens (48 from host). Loaded 48 tokens."
    assert told["timeline"][-1]["what"] == "released"
    listed = local.get("/api/v1/requests?hit=0&limit=1").json()
    assert [one["request"] for one in listed] == ["never seen"]
    assert main(["explain", "never", "--run-dir", str(sidecar.run_dir)]) == 0
    text = capsys.readouterr().out
    assert "request never seen of raw/one" in text
    assert "No hit: the next chunk of the prefix is in no tier" in text
    assert main(["explain", "unknown", "--run-dir", str(sidecar.run_dir)]) == 1
    assert "no request 'unknown' is remembered" in capsys.readouterr().err
    samples = local.get("/metrics").text
    assert re.search(r'kvferry_message_seconds_count\{message="Copied"\} [1-9]', samples)
    assert 'kvferry_lookup_hit_tokens_total{tier="host"} 48.0' in samples
    assert re.search(
        r'kvferry_job_parts_total\{kind="load",reason="",status="done"\} 1\.0', samples
    )
    assert [one["hit_tokens"] for one in local.get("/api/v1/prefixes").json()] == [48]


def test_after_a_restart_it_is_said_that_requests_from_before_are_forgotten(capsys):
    with running_sidecar(pool_bytes=8 << 20) as restarted:
        explain = ["explain", "before", "--run-dir", str(restarted.run_dir)]
        with raw_engine(restarted.run_dir, LIFE) as one:
            one.put("before", [1])
            assert one.get("before", [2]) == 16
        assert main(explain) == 0
        restarted.restart()
        capsys.readouterr()
        assert main(explain) == 1
        said = capsys.readouterr().err
        assert re.search(r"this sidecar started at \d{4}-.*nothing of requests before", said)
        with raw_engine(restarted.run_dir, LIFE) as one:  # what was stored is a hit all the same
            assert one.get("before", [3]) == 16


def test_slow_jobs_and_the_geometry_of_an_engine(local, engine):
    engine.put("slow", [1, 2])
    engine.get("slow", [3, 4])
    jobs = local.get("/api/v1/slow").json()
    assert [one["seconds"] for one in jobs] == sorted((j["seconds"] for j in jobs), reverse=True)
    assert "slow" in {one["request"] for one in jobs if one["kind"] == "load"}
    (group,) = local.get("/api/v1/groups?engine=raw/one&tokens=64").json()
    assert (group["kind"], group["chunks"], group["first"]) == ("full", 4, 0)
    assert local.get("/api/v1/groups?engine=none").status == 400


@pytest.mark.usefixtures("engine")
def test_the_doctor_looks_at_the_machine_and_at_the_engines(local):
    found = {one["check"]: one for one in local.get("/api/v1/doctor").json()}
    assert found["kernel"]["verdict"] in {"ok", "note", "warn"}
    assert found["engine raw/one"]["text"].startswith("ready; vLLM ")


def test_what_is_open_has_an_age_and_an_owner(local, engine):
    engine.put("open", [1, 2])
    admission, _ = engine.lease("open", 2)
    (lease,) = local.get("/api/v1/leases").json()
    assert (lease["engine"], lease["request"], lease["objects"]) == ("raw/one", "open", 2)
    job = engine.submit(engine.load_job(admission, [3, 4], step=7))
    (found,) = wait_until(lambda: local.get("/api/v1/jobs").json(), "the job is open")
    assert (found["kind"], found["job"], found["end_tokens"]) == ("load", job, 32)
    assert [rank["state"] for rank in found["ranks"]] == ["fence"]
    engine.memory.bound(7)
    assert engine.ended(job).status == "done"
    wait_until(lambda: local.get("/api/v1/leases").json() == [], "its lease ends with it")


def test_a_name_with_the_signs_of_an_address_is_one_name(sidecar, engine, capsys):
    engine.get("a", [4])
    engine.get("a?limit=1&x#/b%2F", [4])
    assert main(["explain", "a?limit=1&x#/b%2F", "--run-dir", str(sidecar.run_dir)]) == 0
    assert "request a?limit=1&x#/b%2F of raw/one" in capsys.readouterr().out


def test_a_get_never_acts(tcp, local):
    for http in (tcp, local):
        answer = http.get("/api/v1/actions/drain")
        assert answer.status == 405
        assert answer.headers["allow"] == "POST"
        assert http.request("DELETE", "/api/v1/status", None, {}).status == 405


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong-token-0123456789", f"Basic {TOKEN}"]
)
def test_an_action_over_tcp_needs_the_token(tcp, header):
    headers = {"authorization": header} if header else {}
    answer = tcp.post("/api/v1/actions/clear-pool", {"dry_run": True}, **headers)
    assert (answer.status, answer.json()["error"]) == (401, "token")


def test_with_the_token_or_on_the_socket_it_is_carried_out(tcp, local, engine):
    engine.put("cleared", [1, 2, 3])
    allowed = {"authorization": f"Bearer {TOKEN}"}
    dry = tcp.post("/api/v1/actions/clear-pool", {"dry_run": True}, **allowed).json()
    assert dry["objects"] >= 3
    assert engine.get("cleared", [4, 5, 6]) == 48
    assert tcp.post("/api/v1/actions/clear-pool", **allowed).json()["objects"] == dry["objects"]
    assert engine.get("cleared", [4, 5, 6]) == 0
    events = local.get("/api/v1/events").json()
    assert [e["action"] for e in events if e["event"] == "action"] == ["clear-pool"]


def test_stale_leases_are_released_but_no_job_loses_its_own(local, engine):
    engine.put("stale", [1, 2])
    engine.lease("stale", 2)
    wait_until(lambda: local.get("/api/v1/leases").json(), "the lease is there")
    path = "/api/v1/actions/release-stale"
    assert local.post(path, {"idle_s": 3600}).json()["leases"] == 0
    assert local.post(path, {"idle_s": 0, "dry_run": True}).json()["leases"] == 1
    assert local.post(path, {"idle_s": 0}).json()["leases"] == 1
    assert local.get("/api/v1/leases").json() == []


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("nothing", {}, "there is no action 'nothing'"),
        ("log-level", {}, "level"),
        ("log-level", {"level": "loud"}, "loud"),
        ("release-stale", {"idle_s": -1}, "idle_s"),
        ("drain", {"dry-run": True}, "dry-run"),
        ("drain", ["x"], "drain"),
    ],
)
def test_an_action_in_the_wrong_form_is_refused(local, path, body, words):
    answer = local.post(f"/api/v1/actions/{path}", body)
    assert answer.status == 400
    assert words in answer.json()["message"]
    assert answer.json()["remedy"]


def test_the_log_level_changes_at_once(sidecar, local, capsys):
    command = ["act", "log-level", "level=error", "--run-dir", str(sidecar.run_dir)]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["level"] == "error"
    before = local.get("/api/v1/events").json()
    assert local.post("/api/v1/actions/clear-pool").status == 200
    assert local.get("/api/v1/events").json() == before, "info is not logged any more"
    local.post("/api/v1/actions/log-level", {"level": "info"})


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["evict", "to_percent=60"], 0),
        (["release-stale", "idle_s=2.5"], 0),
        (["release-stale", f"idle_s={'9' * 5000}"], 1),
    ],
)
def test_numbers_on_the_command_line_are_numbers(sidecar, capsys, words, code):
    assert main(["act", *words, "--dry-run", "--run-dir", str(sidecar.run_dir)]) == code
    assert ("remedy" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize(
    ("headers", "status", "error"),
    [
        ({"host": "evil.example"}, 421, "host"),
        ({"host": "127.0.0.1.evil.example:9480"}, 421, "host"),
        ({"host": ""}, 421, "host"),
        ({"origin": "http://evil.example"}, 403, "origin"),
        ({"origin": "null"}, 403, "origin"),
    ],
)
def test_pages_of_other_sites_are_refused(tcp, headers, status, error):
    answer = tcp.get("/api/v1/status", **headers)
    assert (answer.status, answer.json()["error"]) == (status, error)


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:9480", "10.1.2.3:80"])
def test_addresses_of_this_machine_are_allowed(tcp, host):
    answer = tcp.get("/api/v1", host=host)
    assert answer.status == 200
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "path",
    ["requests?limit=0", "requests?limit=x", "prefixes?limit=101", f"requests?limit={'1' * 5000}",
     "requests?hit=2", "requests?reasons=absent"],
)  # fmt: skip
def test_a_question_in_the_wrong_form_is_refused(local, path):
    assert local.get(f"/api/v1/{path}").status == 400


def test_what_is_not_there_is_said_in_the_form_of_every_fault(local):
    answer = local.get("/api/v1/nothing")
    assert (answer.status, answer.json()["error"]) == (404, "path")
    assert "/api/v1/nothing is not served" in answer.json()["message"]


def test_the_body_of_an_action_is_bounded(local):
    answer = local.post("/api/v1/actions/drain", {"x": "y" * 70_000})
    assert "over 65536 bytes" in answer.json()["message"]
    wrong = local.post("/api/v1/actions/drain", content_type="text/plain")
    assert wrong.status == 400


def test_the_stream_tells_the_status_and_what_happens(local):
    with local.connected() as connection:
        connection.request("GET", "/api/v1/stream")
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.readline() == b"event: status\n"
        assert (
            json.loads(answer.readline().removeprefix(b"data: "))["pool"]["total_bytes"] == 8 << 20
        )
        local.post("/api/v1/actions/clear-pool")

        def told():  # what else is logged comes before or after it
            if answer.readline() != b"event: log\n":
                return False
            line = json.loads(answer.readline().removeprefix(b"data: "))
            return line.get("action") == "clear-pool"

        wait_until(told, "the action is told")


def test_the_bundle_holds_everything_but_the_token(local):
    answer = local.get("/debug/bundle")
    assert answer.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.body)) as packed:
        files = {name.removeprefix("kvferry/"): packed.read(name) for name in packed.namelist()}
    assert {"status.json", "metrics.txt", "events.json", "config.json", "requests.json"} <= set(
        files
    )
    assert b"thread MainThread" in files["stacks.txt"]
    assert not any(TOKEN.encode() in body for body in files.values())


def test_settings_come_with_their_origin(local):
    rows = {row["key"]: row for row in local.get("/api/v1/config").json()}
    assert rows["http.listen"] == {
        "key": "http.listen", "value": "127.0.0.1:0", "origin": "flag --http-listen"
    }  # fmt: skip
    assert rows["copy.threads"]["origin"] == "default"


# --- connections that ask for nothing ----------------------------------------------------------


def silent(http, head):
    one = socket.create_connection(http.where, 60)
    one.sendall(head)
    return one


def test_connections_that_send_no_request_keep_nobody_out(sidecar, tcp):
    """Each holds half a head. The oldest go, and the descriptors stay bounded."""
    with ExitStack() as stack:
        oldest = stack.enter_context(silent(tcp, b"GET /livez"))
        for _ in range(connections_max + 40):
            stack.enter_context(silent(tcp, b"GET /livez"))
        assert tcp.get("/livez").status == 200
        assert gone(oldest)
        wait_until(
            lambda: descriptors(sidecar.process.pid) < connections_max + 100, "they are closed"
        )


def gone(one):
    try:
        return not one.recv(1)
    except ConnectionResetError:
        return True


def test_streams_are_bounded_and_leave_room_for_probes(tcp):
    stream = b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(streams_max):
            assert stack.enter_context(silent(tcp, stream)).recv(12) == b"HTTP/1.1 200"
        assert tcp.get("/api/v1/stream").status == 503
        assert tcp.get("/livez").status == 200
    with ExitStack() as stack:
        wait_until(
            lambda: stack.enter_context(silent(tcp, stream)).recv(12) == b"HTTP/1.1 200",
            "there is room again",
        )

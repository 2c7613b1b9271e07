"""`kvferry ui` over two real sidecars: each node's API, one guard, nothing else."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import ExitStack

import httpx
import pytest
from kvferry_demo.processes import kvferry_command
from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.observe.http.fleet import Fleet, targets_of
from kvferry_sidecar.observe.http.several import application, new_client
from support.http import Http
from support.sidecar import running_sidecar
from support.waiting import wait_until

NOBODY = "127.0.0.1:9"  # the discard port: nothing listens there
UNKNOWN = "dns+http://no..name:9480"  # refused before any server of DNS is asked
TOKEN = "token-of-several-nodes-0123456789"


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN)
    return file


@pytest.fixture(scope="module")
def sidecars(token_file):
    flags = ("--http-listen", "127.0.0.1:0", "--set", f"http.token_file={token_file}")
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_sidecar(pool_bytes=8 << 20, flags=flags)) for _ in range(2)
        ]


def listens(sidecar):
    events = Http(sidecar.run_dir / "http.sock").get("/api/v1/events").json()
    return next(e["address"] for e in events if e.get("setting") == "http.listen")


@pytest.fixture(scope="module")
def several(sidecars, token_file):
    targets = ",".join([*map(listens, sidecars), NOBODY, UNKNOWN])
    command = [
        *(*kvferry_command(), "ui", "--target", targets),
        *("--listen", "127.0.0.1:0", "--token-file", str(token_file)),
        *("--allow-host", "Cache.example"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        told = process.stdout.readline()
        host, _, port = told.partition("http://")[2].partition("/")[0].partition(":")
        yield Http((host, int(port)))
        process.terminate()


@pytest.fixture(scope="module")
def places(sidecars):
    """Where each sidecar's API lies on the page's server."""
    return [f"/nodes/{listens(one)}" for one in sidecars]


def test_each_node_answers_under_its_name(sidecars, several, places):
    nodes = several.get("/api/v1/nodes").json()
    assert [node["name"] for node in nodes[:2]] == [listens(one) for one in sidecars]
    for node, sidecar in zip(nodes, sidecars, strict=False):
        there = node["base"].removeprefix("..")
        assert several.get(f"{there}api/v1/status").json()["epoch"] == sidecar.status()["epoch"]
        bundle = several.get(f"{there}debug/bundle")
        assert bundle.headers["content-disposition"].startswith("attachment")
    found = several.get(f"{places[1]}/api/v1/requests?limit=0")
    assert (found.status, found.json()["error"]) == (400, "request")  # the query came through


def test_a_name_of_two_sidecars_leads_to_both(sidecars):
    """What DNS would say comes from the test; a real Service has one port on two addresses."""

    async def behind_the_name(_host, _port):
        return [listens(one) for one in sidecars]

    async def epochs():
        fleet = Fleet(["dns+http://nodes:9480"], behind_the_name)
        async with new_client() as client:
            page = httpx.ASGITransport(application(fleet, client, ""))
            async with httpx.AsyncClient(transport=page, base_url="http://localhost") as reader:
                nodes = (await reader.get("/api/v1/nodes")).json()
                paths = [f"{node['base'].removeprefix('..')}api/v1/status" for node in nodes]
                return [(await reader.get(path)).json()["epoch"] for path in paths]

    assert asyncio.run(epochs()) == [one.status()["epoch"] for one in sidecars]


def test_the_stream_comes_through_as_it_is_made(several, places):
    with several.connected() as connection:
        connection.request("GET", f"{places[0]}/api/v1/stream")
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for _ in range(2):
            while answer.readline() != b"event: status\n":
                pass


def test_actions_need_the_token_and_a_post(sidecars, several, places):
    path = f"{places[1]}/api/v1/actions/log-level"
    wanted = {"level": "debug"}
    assert several.post(path, wanted).status == 401
    assert several.get(path).status == 405
    answer = several.post(path, wanted, authorization=f"Bearer {TOKEN}")
    assert (answer.status, answer.json()["level"]) == (200, "debug")
    told = [
        e["event"] for e in Http(sidecars[1].run_dir / "http.sock").get("/api/v1/events").json()
    ]
    assert "action" in told


def test_nothing_else_is_handed_on(several, places):
    one = places[0]
    other = "/nodes/127.0.0.1:10/api/v1/status"
    for path in (f"{one}/metrics", f"{one}/ui/", other, "/api/v1/status"):
        assert several.get(path).status == 404, path
    for path in (f"{one}/api/v1/../../metrics", f"{one}/api/v1/%2e%2e/%2e%2e/metrics"):
        assert several.get(path).status == 404, path
    refused = several.post(f"{one}/api/v1/status", authorization=f"Bearer {TOKEN}")
    assert refused.status == 404
    assert several.get("/api/v1/nodes", host="elsewhere.example").status == 421
    assert several.get("/api/v1/nodes", host="cache.example.evil").status == 421
    for host in ("cache.example", "CACHE.example:443"):
        assert several.get("/api/v1/nodes", host=host).status == 200
    assert several.get("/api/v1/nodes", origin="http://elsewhere.example").status == 403


def test_a_node_that_is_away_is_told(sidecars, several):
    answer = several.get(f"/nodes/{NOBODY}/api/v1/status")
    assert (answer.status, answer.json()["error"]) == (502, "unavailable")
    assert "does not answer" in answer.json()["message"]


def test_a_name_that_dns_does_not_know_is_told(several):
    name = UNKNOWN.partition("://")[2]
    assert several.get("/api/v1/nodes").json()[-1]["name"] == name
    answer = several.get(f"/nodes/{name}/api/v1/status")
    assert (answer.status, answer.json()["error"]) == (502, "unavailable")
    assert "does not resolve" in answer.json()["message"]


def test_a_node_that_goes_ends_its_stream(sidecars, several, places):
    with several.connected() as connection:
        connection.request("GET", f"{places[0]}/api/v1/stream")
        answer = connection.getresponse()
        assert answer.readline() == b"event: status\n"
        sidecars[0].kill()
        while answer.readline():
            pass
    wait_until(lambda: several.get(f"{places[0]}/api/v1/status").status == 502, "it is told")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "ftp://a:1",
        "http://a:1/path",
        "http://",
        "a:1?b=c",
        "x" * 5 + ":99999",
        "dns+http://a",
        "dns+https://a:1",
        "a:1,a:1",
        "http://a:1,https://a:1",
    ],
)
def test_what_is_no_target_is_refused(text):
    with pytest.raises(ConfigError):
        targets_of(text)


def test_targets_are_addresses_or_urls():
    assert targets_of("a:9480, https://b ,[::1]:9480,dns+http://c:9480") == [
        "http://a:9480", "https://b", "http://[::1]:9480", "dns+http://c:9480",
    ]  # fmt: skip

"""The nodes behind a name of DNS: asked again when the answer is old, kept while DNS fails."""

from __future__ import annotations

import asyncio
import socket

import pytest
from kvferry_sidecar.observe.http import fleet as module
from kvferry_sidecar.observe.http.fleet import Fleet, Node, nodes_max, resolved

NAME = "dns+http://nodes:9480"


class Dns:
    """Answers as it is told, and counts."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    async def __call__(self, host, port):
        self.asked.append((host, port))
        if isinstance(self.answer, Exception):
            raise self.answer
        if isinstance(self.answer, asyncio.Event):
            await self.answer.wait()
            return ["late:1"]
        return self.answer


@pytest.fixture
def always_old(monkeypatch):
    monkeypatch.setattr(module, "fresh_s", 0.0)


def names(nodes):
    return [node.name for node in nodes]


def test_every_address_of_a_name_is_a_node(always_old):
    dns = Dns(["10.0.0.1:9480", "[fd00::2]:9480"])

    async def run():
        fleet = Fleet(["http://a:9480", NAME], dns)
        assert await fleet.nodes() == [
            Node("a:9480", "http://a:9480"),
            Node("10.0.0.1:9480", "http://10.0.0.1:9480"),
            Node("[fd00::2]:9480", "http://[fd00::2]:9480"),
        ]
        assert dns.asked == [("nodes", 9480)]
        dns.answer = ["10.0.0.3:9480"]  # pods went and came
        assert names(await fleet.nodes()) == ["a:9480", "10.0.0.3:9480"]
        assert await fleet.node("10.0.0.1:9480") is None

    asyncio.run(run())


def test_an_answer_is_believed_for_a_while(monkeypatch):
    monkeypatch.setattr(module, "fresh_s", 1e9)
    dns = Dns(["10.0.0.1:9480"])

    async def run():
        fleet = Fleet([NAME], dns)
        for _ in range(3):
            await fleet.nodes()
            await fleet.node("10.0.0.1:9480")
            await fleet.node("unknown:1")

    asyncio.run(run())
    assert len(dns.asked) == 1


def test_while_dns_fails_the_last_answer_stays(always_old):
    dns = Dns(socket.gaierror(-3, "try again"))

    async def run():
        fleet = Fleet([NAME], dns)
        (node,) = await fleet.nodes()
        assert (node.name, node.url) == ("nodes:9480", "")
        assert node.trouble == "nodes:9480 does not resolve: [Errno -3] try again"
        dns.answer = ["10.0.0.1:9480"]
        assert names(await fleet.nodes()) == ["10.0.0.1:9480"]
        dns.answer = OSError("away")
        assert names(await fleet.nodes()) == ["10.0.0.1:9480"]
        dns.answer = []
        (node,) = await fleet.nodes()
        assert node.trouble == "nodes:9480 has no address"

    asyncio.run(run())


def test_a_resolver_that_hangs_is_asked_once_and_waited_for_shortly(always_old, monkeypatch):
    monkeypatch.setattr(module, "lookup_s_max", 0.01)

    async def run():
        hung = asyncio.Event()
        dns = Dns(hung)
        fleet = Fleet(["http://a:1", NAME], dns)
        for _ in range(5):
            assert names(await fleet.nodes()) == ["a:1", "nodes:9480"]
        assert len(dns.asked) == 1
        hung.set()
        monkeypatch.setattr(module, "lookup_s_max", 30.0)
        assert names(await fleet.nodes()) == ["a:1", "late:1"]

    asyncio.run(run())


def test_more_addresses_than_are_shown_are_told():
    dns = Dns([f"10.0.{number // 250}.{number % 250}:1" for number in range(nodes_max + 44)])

    async def run():
        nodes = await Fleet(["http://a:1", NAME], dns).nodes()
        assert len(nodes) == nodes_max + 1
        assert nodes[-1].trouble == "nodes:9480 has 300 addresses, 255 of them are shown"

    asyncio.run(run())


def test_the_system_s_resolver_is_asked():
    assert "127.0.0.1:9480" in asyncio.run(resolved("localhost", 9480))
    assert asyncio.run(resolved("::1", 9480)) == ["[::1]:9480"]

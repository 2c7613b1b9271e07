"""The page of the chart: a container that reads the sidecar over loopback, and its Service."""

from __future__ import annotations

import tomllib

import helm_python
import pytest
from kvferry_sidecar.cli.pages import ui
from kvferry_sidecar.observe.http.fleet import targets_of
from support.chart import MINIMAL, container, release, render

SHOWN = ("everything", "nodes-watched")
FLEET = {"ui": {"enabled": True, "fleet": True}, "http": {"listen": "0.0.0.0:9480"}}


def flags(made):
    """Return what `kvferry ui` makes of the container's arguments."""
    command, *given = container(made.sidecar_pod(), "ui")["args"]
    assert command == "ui"
    return ui.make_context("ui", list(given)).params


@pytest.mark.parametrize("name", SHOWN)
def test_it_reads_its_own_sidecar_first_and_may_not_act(name):
    made = release(name)
    read = flags(made)
    own = tomllib.loads(made.toml())["http"]["listen"]
    assert targets_of(read["targets"])[0] == f"http://{own}"
    assert read["token_file"] == ""
    assert "volumeMounts" not in container(made.sidecar_pod(), "ui")


def test_other_nodes_and_names_arrive():
    nodes = targets_of(flags(release("nodes-watched"))["targets"])
    assert nodes[1:] == ["http://10.0.0.7:9480", "https://b:9480"]
    assert flags(release("nodes-watched"))["listen"] == "[::]:9482"
    assert flags(release("everything"))["names"] == ("cache.example",)


@pytest.mark.parametrize(
    ("listen", "target"),
    [
        ("0.0.0.0:9480", "http://127.0.0.1:9480"),
        ("[::]:9480", "http://[::1]:9480"),
        ("10.0.0.0:9480", "http://10.0.0.0:9480"),
    ],
)
def test_an_address_for_everybody_is_read_over_loopback(listen, target):
    made = render({**MINIMAL, "ui": {"enabled": True}, "http": {"listen": listen}})
    assert targets_of(flags(made)["targets"]) == [target]


@pytest.mark.parametrize("name", SHOWN)
def test_its_service_finds_it(name):
    made = release(name)
    (service,) = [one for one in made.of("Service") if one["metadata"]["name"].endswith("-ui")]
    (port,) = container(made.sidecar_pod(), "ui")["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert flags(made)["listen"].endswith(f":{port['containerPort']}")


@pytest.mark.parametrize("name", ["nodes-fleet", "sidecars-fleet"])
def test_a_fleet_is_found_by_the_name_of_a_headless_service(name):
    made = release(name) if name == "nodes-fleet" else render({**MINIMAL, **FLEET})
    target, *others = targets_of(flags(made)["targets"])
    (service,) = [one for one in made.of("Service") if one["spec"].get("clusterIP") == "None"]
    where = service["metadata"]["name"]
    _, _, port = tomllib.loads(made.toml())["http"]["listen"].rpartition(":")
    assert target == f"dns+http://{where}.llm.svc:{port}"
    assert others == (["dns+http://other-nodes.a.svc:9480"] if name == "nodes-fleet" else [])
    assert service["spec"]["publishNotReadyAddresses"]
    owners = made.of("Deployment") + made.of("DaemonSet")
    (owner,) = [one for one in owners if container(one["spec"]["template"]["spec"], "ui")]
    selector = service["spec"]["selector"]
    assert selector.items() <= owner["spec"]["template"]["metadata"]["labels"].items()
    # Pages reach the sidecars of other pods, and nobody else does.
    rules = [rule for one in made.of("NetworkPolicy") for rule in one["spec"]["ingress"]]
    (rule,) = [rule for rule in rules if {"port": "api"} in rule.get("ports", [])]
    ports = container(made.sidecar_pod(), "kvferry")["ports"]
    assert {"name": "api", "containerPort": int(port)} in ports
    assert rule["from"] == [{"podSelector": {"matchLabels": selector}}]


@pytest.mark.parametrize("listen", ["127.0.0.1:9480", "localhost:9480", "[::1]:9480"])
def test_a_fleet_needs_sidecars_that_can_be_reached(listen):
    with pytest.raises(helm_python.HelmError, match=r"ui\.fleet needs http\.listen"):
        render({**MINIMAL, **FLEET, "http": {"listen": listen}})


def test_nobody_opens_it_who_is_not_listed():
    def rules(made):
        found = [one["spec"]["ingress"] for one in made.of("NetworkPolicy")]
        return [
            rule for rules in found for rule in rules if {"port": "ui"} in rule.get("ports", [])
        ]

    assert rules(release("nodes-watched")) == []
    (rule,) = rules(release("everything"))
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "ingress"}}}]


def test_it_is_off_unless_asked_for():
    made = release("minimal")
    assert container(made.sidecar_pod(), "ui") is None
    assert not [one for one in made.of("Service") if one["metadata"]["name"].endswith("-ui")]

"""What the kubelet and the network make of a render: order of start and stop, who may connect."""

from __future__ import annotations

import pytest
from support.chart import MINIMAL, RECIPES, VARIANTS, container, release, render, values_of

NAMES = [*RECIPES, *VARIANTS]
every = pytest.mark.parametrize("name", NAMES)
every_sidecar = pytest.mark.parametrize(
    "name", [name for name in NAMES if values_of(name).get("mode", "sidecar") == "sidecar"]
)


@every_sidecar
def test_the_engine_waits_for_a_sidecar_that_goes_on(name):
    pod = release(name).engine_pod()
    first = [one["name"] for one in pod["initContainers"]]
    assert first.index("kvferry") == len(first) - 1, "only what ends may come before it"
    assert pod["containers"][0]["name"] == "vllm"
    sidecar = container(pod, "kvferry")
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["failureThreshold"] >= 60
    others = [one for one in pod["initContainers"] if one is not sidecar]
    assert not [one for one in others if "restartPolicy" in one]


@every
def test_each_probe_asks_what_it_is_for(name):
    """Started is the pool, never ranks: they come from the engine, which waits for it."""
    sidecar = container(release(name).sidecar_pod(), "kvferry")
    asked = {kind: sidecar[kind]["httpGet"]["path"] for kind in sidecar if kind.endswith("Probe")}
    ready = "/startupz" if name == "everything" else "/readyz"
    assert asked == {
        "startupProbe": "/startupz", "readinessProbe": ready, "livenessProbe": "/livez",
    }  # fmt: skip
    live = sidecar["livenessProbe"]
    assert live["periodSeconds"] * live["failureThreshold"] >= 60, "a slow node is not a hung loop"


@every
def test_a_stop_is_held_up_by_the_engine_alone(name):
    """The sidecar drains on SIGTERM, which comes last: a hook of its own would take its time."""
    made = release(name)
    assert "lifecycle" not in container(made.sidecar_pod(), "kvferry")
    for engine in filter(None, [made.engine_pod() and container(made.engine_pod(), "vllm")]):
        assert set(engine["lifecycle"]) == {"preStop"}


@every
def test_replicas_spread_and_one_at_a_time_is_drained(name):
    made = release(name)
    engines = [
        one for one in made.of("Deployment") if container(one["spec"]["template"]["spec"], "vllm")
    ]
    for one in engines:
        labels = one["spec"]["template"]["metadata"]["labels"]
        for constraint in one["spec"]["template"]["spec"]["topologySpreadConstraints"]:
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
        assert one["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
        budgets = made.of("PodDisruptionBudget")
        assert len(budgets) == (1 if one["spec"]["replicas"] > 1 else 0)


def rules(made, port):
    """Return who may reach a port of any pod; None: everybody."""
    found = [rule for one in made.of("NetworkPolicy") for rule in one["spec"]["ingress"]]
    return [rule.get("from") for rule in found if {"port": port} in rule.get("ports", [])]


def test_the_network_reaches_what_is_listed_and_no_more():
    test_pod = {"app.kubernetes.io/component": "test"}
    router = {"podSelector": {"matchLabels": {"app": "router"}}}
    monitoring = {"kubernetes.io/metadata.name": "monitoring"}
    made = release("everything")
    for port, listed in (
        ("http", router), ("probes", {"namespaceSelector": {"matchLabels": monitoring}}),
    ):  # fmt: skip
        (peers,) = rules(made, port)
        assert listed in peers
        (own,) = [one for one in peers if one != listed]
        assert test_pod.items() <= own["podSelector"]["matchLabels"].items()
    assert rules(release("minimal"), "http") == [None], "an engine is there to be asked"


@every
def test_no_policy_leaves_a_port_open_by_accident(name):
    """Whatever a rule opens is named, or open to the release's own pods alone."""
    for one in release(name).of("NetworkPolicy"):
        assert one["spec"]["policyTypes"] == ["Ingress"]
        for rule in one["spec"]["ingress"]:
            own = [list(peer) == ["podSelector"] for peer in rule.get("from", [])]
            assert rule.get("ports") or (own and all(own))


def test_without_policies_there_are_none():
    assert render({**MINIMAL, "networkPolicy": {"enabled": False}}).of("NetworkPolicy") == []

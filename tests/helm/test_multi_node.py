"""An engine over several nodes: a LeaderWorkerSet whose pods use the sidecars of their nodes."""

from __future__ import annotations

import json

import helm_python
import jsonschema
import pytest
from support.chart import container, mounts, release, render, values_of, volumes

# leaderworkerset.x-k8s.io/v1, as far as it is used; pod templates: test_render.py.
COUNT = {"type": "integer", "minimum": 0}
LWS = {
    "type": "object",
    "required": ["replicas", "rolloutStrategy", "leaderWorkerTemplate"],
    "additionalProperties": False,
    "properties": {
        "replicas": COUNT,
        "rolloutStrategy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "type": {"enum": ["RollingUpdate"]},
                "rollingUpdateConfiguration": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"partition": COUNT, "maxUnavailable": COUNT, "maxSurge": COUNT},
                },
            },
        },
        "leaderWorkerTemplate": {
            "type": "object",
            "required": ["workerTemplate"],
            "additionalProperties": False,
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                "leaderTemplate": {"type": "object"},
                "workerTemplate": {"type": "object"},
            },
        },
    },
}
MADE = release("multi-node")
(SET,) = MADE.of("LeaderWorkerSet")
GROUP = SET["spec"]["leaderWorkerTemplate"]
LEADER, WORKER = (GROUP[f"{part}Template"]["spec"] for part in ("leader", "worker"))


def changed(**values):
    base = dict(values_of("multi-node"))
    return {**base, **{key: {**base.get(key, {}), **value} for key, value in values.items()}}


def test_the_controller_knows_every_field():
    jsonschema.Draft7Validator(LWS).validate(SET["spec"])
    assert MADE.of("Deployment") == []


def test_pods_start_ranks_of_one_engine():
    """What vLLM documents for it; the controller puts the variables into each container."""
    leader, worker = (container(pod, "vllm") for pod in (LEADER, WORKER))
    assert [one for one in worker["args"] if one != "--headless"] == leader["args"]
    assert "--headless" in worker["args"]
    for flag in ("--nnodes=2", "--node-rank=$(LWS_WORKER_INDEX)", "--tensor-parallel-size=8"):
        assert flag in leader["args"]
    assert "--master-addr=$(LWS_LEADER_ADDRESS)" in leader["args"]
    assert GROUP["size"] == 2
    assert leader["resources"] == worker["resources"]
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == 8, "of 16 ranks"


def test_each_pod_finds_the_sidecar_of_its_node():
    for pod in (LEADER, WORKER):
        engine = container(pod, "vllm")
        config = json.loads(engine["args"][engine["args"].index("--kv-transfer-config") + 1])
        run_dir = config["kv_connector_extra_config"]["run_dir"]
        mount = run_dir.rpartition("/")[0]
        path = volumes(pod)[mounts(engine)[mount]]["hostPath"]["path"]
        sidecar = MADE.sidecar_pod()
        assert volumes(sidecar)["run"]["hostPath"]["path"] == path
        assert mounts(container(sidecar, "kvferry"))[mount] == "run"
        assert pod["securityContext"]["runAsUser"] == sidecar["securityContext"]["runAsUser"]
    assert "redis://cache.store.svc:6379/0" in MADE.toml()


def test_the_service_asks_leaders_and_ranks_reach_each_other():
    """A worker answers nobody else: it has no port and no probe."""
    worker = container(WORKER, "vllm")
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & set(worker)
    labels = [GROUP[f"{part}Template"]["metadata"]["labels"] for part in ("leader", "worker")]
    (service,) = MADE.of("Service")
    matches = [service["spec"]["selector"].items() <= one.items() for one in labels]
    assert matches == [True, False]
    for own in labels:
        (policy,) = [
            one["spec"]
            for one in MADE.of("NetworkPolicy")
            if one["spec"]["podSelector"]["matchLabels"].items() <= own.items()
        ]
        (peers,) = [rule["from"] for rule in policy["ingress"] if "ports" not in rule]
        for other in labels:
            found = [peer["podSelector"]["matchLabels"].items() <= other.items() for peer in peers]
            assert any(found)


def test_ranks_of_workers_outlive_the_leader_s_requests():
    leader, worker = (
        container(pod, "vllm")["lifecycle"]["preStop"]["sleep"]["seconds"]
        for pod in (LEADER, WORKER)
    )
    assert (leader, worker) == (15, 15 + 60)
    assert WORKER["terminationGracePeriodSeconds"] >= worker + 5


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({**values_of("multi-node"), "mode": "sidecar"}, "needs mode daemonset"),
        (changed(remote={"url": ""}), "needs a store that the nodes share"),
        (changed(remote={"policy": "none"}), "needs a store that the nodes share"),
        (changed(engine={"nodes": 3}), "does not divide the engine's 16 ranks"),
    ],
)
def test_what_could_not_be_served_is_refused_by_name(values, text):
    with pytest.raises(helm_python.HelmError, match=text):
        render(values)

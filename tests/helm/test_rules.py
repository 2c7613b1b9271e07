"""What must hold in every render: sizes, paths, ports, secrets, and what an API server refuses.

The rules of the API server and the kubelet are written down here, since no cluster runs in a test:
they are verdicts of a real kube-apiserver 1.36.
"""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from support.chart import (
    RECIPES,
    VARIANTS,
    container,
    containers,
    mounts,
    release,
    values_of,
    volumes,
)
from support.quantities import QUANTITY, mebibytes

NAMES = [*RECIPES, *VARIANTS]
ENGINES = [name for name in NAMES if release(name).engine_pod()]
every = pytest.mark.parametrize("name", NAMES)
every_engine = pytest.mark.parametrize("name", ENGINES)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|_KEY$", re.I)
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def access(name):
    return values_of(name).get("gpu", {}).get("access", "none")


# --- sizes -----------------------------------------------------------------------------------


@every
def test_limit_covers_request_covers_pool(name):
    pod = release(name).sidecar_pod()
    resources = container(pod, "kvferry")["resources"]
    pool = tomllib.loads(release(name).toml())["tiers"]["host"]["bytes"]
    volume = volumes(pod)["pool"]["emptyDir"]
    pool_mi = int(pool.removesuffix("MiB"))
    request_mi = mebibytes(resources["requests"]["memory"])
    if page := values_of(name).get("pool", {}).get("hugepages"):
        asked, limit = (resources[kind][f"hugepages-{page}"] for kind in ("requests", "limits"))
        assert asked == limit
        shm_mi, pages_mi = 0.0, mebibytes(limit)
        assert volume == {"medium": f"HugePages-{page}"}
        assert pages_mi % mebibytes(page) == 0, "pages come whole"
    else:
        shm_mi = pages_mi = mebibytes(volume["sizeLimit"])
        assert volume["medium"] == "Memory"
    # The index takes a 256th by default; tests/e2e/test_pod.py serves from such mounts.
    assert pages_mi >= pool_mi * 257 / 256 + 8
    store = tomllib.loads(release(name).toml())["tiers"].get("remote", {})
    segment_mi = int(store.get("segment_bytes", "0MiB").removesuffix("MiB"))
    assert mebibytes(resources["limits"]["memory"]) >= request_mi >= shm_mi + segment_mi + 256


@every_engine
def test_the_engine_s_limit_covers_its_own_shared_memory(name):
    pod = release(name).engine_pod()
    engine = container(pod, "vllm")
    shm = volumes(pod)[mounts(engine)["/dev/shm"]]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert mebibytes(engine["resources"]["limits"]["memory"]) > mebibytes(shm["sizeLimit"])


@every
def test_the_grace_period_covers_every_step_of_the_stop(name):
    sidecar = release(name).sidecar_pod()
    drain_s = tomllib.loads(release(name).toml())["limits"]["drain_ms_max"] / 1000
    spent_s = drain_s
    for pod in filter(None, [release(name).engine_pod()]):
        engine = container(pod, "vllm")
        sleep_s = engine["lifecycle"]["preStop"]["sleep"]["seconds"]
        (flag,) = [one for one in engine["args"] if one.startswith("--shutdown-timeout=")]
        engine_s = sleep_s + int(flag.partition("=")[2])
        assert pod["terminationGracePeriodSeconds"] >= engine_s + 5
        spent_s += engine_s if pod is sidecar else 0
    assert sidecar["terminationGracePeriodSeconds"] >= spent_s + 5


# --- what both sides share -------------------------------------------------------------------


def transfer_config(engine):
    return json.loads(engine["args"][engine["args"].index("--kv-transfer-config") + 1])


@every
def test_both_sides_name_one_run_directory(name):
    made = release(name)
    sidecar_pod, engine_pod = made.sidecar_pod(), made.engine_pod()
    run_dir = tomllib.loads(made.toml())["run_dir"]
    mount, _, leaf = run_dir.rpartition("/")
    assert leaf, "the mount point itself is never private to our uid"
    sidecar = volumes(sidecar_pod)[mounts(container(sidecar_pod, "kvferry"))[mount]]
    if engine_pod is not None:
        engine = container(engine_pod, "vllm")
        assert transfer_config(engine)["kv_connector_extra_config"]["run_dir"] == run_dir
        own = volumes(engine_pod)[mounts(engine)[mount]]
        paths = [one.get("hostPath", {}).get("path") for one in (own, sidecar)]
        assert own is sidecar or (paths[0] and paths[0] == paths[1])
        users = [pod["securityContext"]["runAsUser"] for pod in (sidecar_pod, engine_pod)]
        assert users[0] == users[1], "each trusts its own uid and root alone"


@every
def test_the_pool_is_the_sidecar_s_alone(name):
    for _, pod in release(name).pods():
        holders = [one["name"] for one in containers(pod) if "pool" in mounts(one).values()]
        assert holders in ([], ["kvferry"])


@every_engine
def test_the_engine_recomputes_what_cannot_be_loaded(name):
    pod = release(name).engine_pod()
    config = transfer_config(container(pod, "vllm"))
    assert config["kv_role"] == "kv_both"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_module_path"] == "kvferry_connector"


@every_engine
def test_the_connector_is_where_python_looks(name):
    pod = release(name).engine_pod()
    from_image = values_of(name).get("connector", {}).get("source") == "image"
    assert (container(pod, "connector") is None) == from_image
    if from_image:
        return
    target = container(pod, "connector")["command"][-1].rstrip("/")
    engine = container(pod, "vllm")
    assert {"name": "PYTHONPATH", "value": target} in engine["env"]
    assert mounts(container(pod, "connector"))[target] == mounts(engine)[target]


@every
def test_both_see_the_gpus_and_the_sidecar_owns_none(name):
    made, way = release(name), access(name)
    pod, engine_pod = made.sidecar_pod(), made.engine_pod()
    sidecar = container(pod, "kvferry")
    resource = "nvidia.com/gpu"
    assert resource not in {**sidecar["resources"]["limits"], **sidecar["resources"]["requests"]}
    environment = {one["name"]: one.get("value") for one in sidecar["env"]}
    assert (environment.get("NVIDIA_VISIBLE_DEVICES") == "all") == (way == "env")
    assert sidecar["securityContext"].get("privileged", False) == (way == "privileged")
    claimed = sidecar["resources"].get("claims") == [{"name": "gpu"}]
    assert claimed == (way in ("dra", "draAdmin"))
    if engine_pod is not None:
        resources = container(engine_pod, "vllm")["resources"]
        assert (resource in resources["limits"]) == (way not in ("none", "dra"))
        assert ("claims" in resources) == (way == "dra")


def test_gpus_are_served_where_that_is_asked_for():
    assert tomllib.loads(release("privileged").toml())["copy"]["gpu"] is True
    assert "gpu" not in tomllib.loads(release("single-node").toml())["copy"]
    assert "gpu.serve is false" in release("single-node").notes


def test_ranks_have_a_gpu_each():
    (claim,) = release("tp8").of("ResourceClaimTemplate")
    assert claim["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] == 8
    engine = container(release("privileged").engine_pod(), "vllm")
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 2  # gpu.count wins


# --- objects that name each other ------------------------------------------------------------


@every
def test_selectors_match_one_set_of_pods(name):
    made = release(name)
    labels = {name: template["metadata"]["labels"] for name, template in made.templates()}
    for kind in ("Deployment", "DaemonSet"):
        for one in made.of(kind):
            selector = one["spec"]["selector"]["matchLabels"]
            assert selector.items() <= labels[one["metadata"]["name"]].items()
    selectors = [one["spec"]["selector"] for one in made.of("Service")]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in made.of("PodDisruptionBudget")]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in made.of("NetworkPolicy")]
    for selector in selectors:
        assert len([pod for pod in labels.values() if selector.items() <= pod.items()]) == 1
    test_pods = [one["metadata"]["labels"] for one in made.of("Pod")]
    assert not any(selector.items() <= pod.items() for selector in selectors for pod in test_pods)


def port_names(pod):
    return [port["name"] for one in containers(pod) for port in one.get("ports", [])]


@every
def test_ports_that_are_named_exist(name):
    made = release(name)
    pods = dict(made.pods())
    for pod in pods.values():
        for one in containers(pod):
            own = [port["name"] for port in one.get("ports", [])]
            for probe in PROBES:
                if "httpGet" in one.get(probe, {}):
                    assert one[probe]["httpGet"]["port"] in own
        names = port_names(pod)
        assert len(names) == len(set(names))
        assert all(len(port) <= 15 for port in names)
    known = {port for pod in pods.values() for port in port_names(pod)}
    for service in made.of("Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= known
    for policy in made.of("NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            # A rule without ports is about a peer that chooses its own.
            assert {port["port"] for port in rule.get("ports", [])} <= known


@every
def test_every_mount_has_a_volume_and_every_volume_a_mount(name):
    for _, pod in release(name).pods():
        used = set()
        for one in containers(pod):
            paths = [mount["mountPath"] for mount in one.get("volumeMounts", [])]
            assert len(paths) == len(set(paths))
            used |= {mount["name"] for mount in one.get("volumeMounts", [])}
        named = [volume["name"] for volume in pod.get("volumes", [])]
        assert len(named) == len(set(named))
        assert used == set(named)


@every
def test_no_secret_is_in_plain_sight(name):
    made = release(name)
    assert made.of("Secret") == []
    for line in made.toml().splitlines():
        setting = line.partition(" = ")[0]
        assert setting.endswith("_file") or not SECRET.search(setting), line
    for _, pod in made.pods():
        for one in containers(pod):
            for variable in one.get("env", []):
                assert not (SECRET.search(variable["name"]) and "value" in variable), variable


# --- verdicts of the API server --------------------------------------------------------------


@every
def test_only_a_sidecar_among_init_containers_has_probes(name):
    for _, pod in release(name).pods():
        for one in pod.get("initContainers", []):
            assert one.get("restartPolicy", "Always") == "Always"
            if "restartPolicy" not in one:
                assert not {*PROBES, "lifecycle"} & set(one)


@every
def test_process_namespaces_are_shared_one_way(name):
    for _, pod in release(name).pods():
        assert not (pod.get("shareProcessNamespace") and pod.get("hostPID"))
        assert not pod.get("hostIPC"), "nothing here needs it"
    if values_of(name).get("mode", "sidecar") == "sidecar":
        assert release(name).sidecar_pod()["shareProcessNamespace"] is True


@every
def test_privileged_says_nothing_of_escalation(name):
    """allowPrivilegeEscalation: false beside privileged: true is refused."""
    for _, pod in release(name).pods():
        for one in containers(pod):
            security = one["securityContext"]
            if security.get("privileged"):
                assert "allowPrivilegeEscalation" not in security
            else:
                assert security["allowPrivilegeEscalation"] is False
                assert security["capabilities"]["drop"] == ["ALL"]


@every
def test_quantities_are_quantities(name):
    for _, pod in release(name).pods():
        amounts = [volume.get("emptyDir", {}).get("sizeLimit") for volume in pod.get("volumes", [])]
        for one in containers(pod):
            assert one["resources"]["requests"], "a container without a request is evicted first"
            assert "memory" in one["resources"]["limits"], (
                "or a Memory volume is as large as the node"
            )
            for part in ("requests", "limits"):
                amounts += one["resources"][part].values()
        for amount in filter(None, amounts):
            assert QUANTITY.fullmatch(str(amount)), amount


@every
def test_names_fit(name):
    for one in release(name).objects:
        assert DNS_LABEL.fullmatch(one["metadata"]["name"])
    for _, pod in release(name).pods():
        assert all(DNS_LABEL.fullmatch(one["name"]) for one in containers(pod))


def restricted_violations(pod):
    """Return what the Pod Security level restricted refuses, as far as this chart could do it."""
    found = {key for key in ("hostPID", "hostIPC", "hostNetwork") if pod.get(key)}
    found |= {"hostPath" for volume in pod.get("volumes", []) if "hostPath" in volume}
    common = pod["securityContext"]
    if common["seccompProfile"]["type"] != "RuntimeDefault":
        found.add("seccomp")
    for one in containers(pod):
        security = {**common, **one["securityContext"]}
        if security.get("privileged"):
            found.add("privileged")
        if not security["runAsNonRoot"] or security["runAsUser"] == 0:
            found.add("root")
        if security.get("allowPrivilegeEscalation") is not False:
            found.add("escalation")
        capabilities = security.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
            found.add("capabilities")
    return found


EXPECTED_VIOLATIONS = {
    "root": {"root"},
    "dfkv": {"hostPath"},  # of the recipe, which says so
    "privileged": {"privileged", "escalation", "capabilities"},
}
DAEMONSET_VIOLATIONS = {"hostPath", "hostPID", "root", "capabilities"}


@every
def test_pods_pass_the_restricted_level_where_they_can(name):
    made = release(name)
    found = set()
    for _, pod in made.pods():
        found |= restricted_violations(pod)
    if values_of(name).get("mode") == "daemonset":
        network = values_of(name).get("daemonset", {}).get("hostNetwork")
        assert found == DAEMONSET_VIOLATIONS | ({"hostNetwork"} if network else set())
        assert "pod-security.kubernetes.io/enforce=privileged" in made.notes
    else:
        assert found == EXPECTED_VIOLATIONS.get(name, set())


@every
def test_no_pod_talks_to_the_api_server_or_takes_what_is_newest(name):
    for _, pod in release(name).pods():
        assert pod["automountServiceAccountToken"] is False
        for one in containers(pod):
            image = one["image"].rpartition("/")[2]
            assert re.search(r":.+|@sha256:[0-9a-f]{64}", image)
            assert not image.endswith(":latest")


@every
def test_a_drain_is_not_held_up(name):
    for one in release(name).of("PodDisruptionBudget"):
        assert one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert ("minAvailable" in one["spec"]) != ("maxUnavailable" in one["spec"])


def test_members_of_a_store_may_reach_each_other_and_their_master():
    """RDMA passes no policy; over TCP a member listens at ports of its choice."""
    for name in ("mooncake-rdma", "nodes-rdma"):
        made = release(name)
        pods = [*made.of("DaemonSet"), *made.of("Deployment")]
        own = pods[0]["spec"]["selector"]["matchLabels"]
        (mine,) = [one for one in policies_of(name) if one["podSelector"]["matchLabels"] == own]
        assert {"from": [{"podSelector": {"matchLabels": own}}]} in mine["ingress"]
    master = next(one for one in policies_of("mooncake-rdma") if "mooncake" in str(one))
    assert master["ingress"][0]["ports"] == [{"port": "rpc"}]


def policies_of(name):
    return [one["spec"] for one in release(name).of("NetworkPolicy")]


def test_a_master_is_found_where_the_sidecars_look():
    made = release("mooncake-rdma")
    url = tomllib.loads(made.toml())["tiers"]["remote"]["url"]
    host, _, port = url.removeprefix("mooncake://").partition(":")
    (service,) = [one for one in made.of("Service") if one["metadata"]["name"] == host]
    assert [one["port"] for one in service["spec"]["ports"]] == [int(port)]
    limits = container(made.sidecar_pod(), "kvferry")["resources"]["limits"]
    assert limits["rdma/hca_shared_devices_a"] == 1


def test_notes_name_what_the_cluster_needs():
    assert "admin-access=true" in release("nodes-dra").notes
    assert "RuntimeClass nvidia must exist" in release("single-node").notes
    assert "RuntimeClass" not in release("no-runtime-class").notes
    assert "8384Mi" in release("minimal").notes

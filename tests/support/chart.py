"""The chart, rendered by Helm's own engine, as objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import helm_python
import yaml
from support.sources import ROOT

CHART = ROOT / "helm" / "kvferry"
RECIPES = sorted(path.stem for path in (CHART / "recipes").glob("*.yaml"))
GOLDEN = ROOT / "tests" / "helm" / "golden"
Values = Mapping[str, Any]
MINIMAL: Values = {"model": "Qwen/Qwen3-0.6B"}

# What no recipe shows. Each is installed by somebody.
VARIANTS: Mapping[str, Values] = {
    "minimal": MINIMAL,
    "root": {**MINIMAL, "user": 0},
    "cdi": {**MINIMAL, "gpu": {"access": "cdiAnnotation"}},
    "no-runtime-class": {**MINIMAL, "gpu": {"access": "env", "runtimeClassName": ""}},
    "privileged": {**MINIMAL, "gpu": {"access": "privileged", "count": 2, "serve": True}},
    "huge": {**MINIMAL, "pool": {"size": "1000Mi", "hugepages": "2Mi"}},
    "nodes-huge": {
        "mode": "daemonset",
        "engine": {"enabled": False},
        "pool": {"size": "64Gi", "hugepages": "1Gi"},
    },
    "nodes-only": {"mode": "daemonset", "engine": {"enabled": False}},
    "nodes-dra": {"mode": "daemonset", "model": "m", "gpu": {"access": "draAdmin"}},
    "nodes-watched": {
        "mode": "daemonset",
        "model": "m",
        "monitoring": {"serviceMonitor": {"enabled": True}},
        "http": {"probesAddress": "[::]", "probesPort": 9999},
        "ui": {"enabled": True, "targets": ["10.0.0.7:9480", "https://b:9480"]},
    },
    "nodes-fleet": {
        "mode": "daemonset",
        "engine": {"enabled": False},
        "http": {"listen": "0.0.0.0:9480", "token": {"existingSecret": "admin"}},
        "ui": {"enabled": True, "fleet": True, "targets": ["dns+http://other-nodes.a.svc:9480"]},
    },
    "nodes-rdma": {
        "mode": "daemonset",
        "remote": {"url": "mooncake://master.store.svc:50051"},
        "engine": {"enabled": False},
        "daemonset": {"hostNetwork": True, "updateStrategy": {"type": "OnDelete"}},
        "rdma": {"resources": {"rdma/hca_shared_devices_a": 1}, "ipcLock": True},
    },
    "everything": {
        **MINIMAL,
        "fullnameOverride": "cache",
        "commonLabels": {"team": "serving"},
        "podLabels": {"cost": "llm"},
        "podAnnotations": {"note": "a: b"},
        "imagePullSecrets": [{"name": "pull"}],
        "image": {"repository": "x/kvferry", "registry": "", "digest": "sha256:" + "0" * 64},
        "pool": {"size": "1Gi", "keysMax": 1000000},
        "sidecar": {
            "memory": "4Gi",
            "config": {
                "limits": {"sessions_max": 8, "jobs_max": 5000},
                "tiers": {"host": {"numa": "0"}},
            },
            "extraEnv": [{"name": "TZ", "value": "UTC"}],
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        },
        "connector": {"source": "image", "config": {"probe_ms_max": 200, "saves": False}},
        "engine": {
            "replicas": 3,
            "extraArgs": ["--max-model-len=8192"],
            "extraEnv": [{"name": "TZ", "value": "UTC"}],
            "extraVolumes": [{"name": "lora", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "lora", "mountPath": "/lora"}],
            "apiKey": {"existingSecret": "key"},
            "hfToken": {"existingSecret": "hf"},
            "priorityClassName": "serving",
            "readOnlyRootFilesystem": True,
        },
        "disk": {"size": "10Gi", "policy": "reused"},
        "remote": {
            "url": "redis://cache:6379/0",
            "password": {"existingSecret": "store"},
            "policy": "none",
            "ttlSeconds": 3600,
        },
        "http": {"token": {"existingSecret": "admin"}, "readiness": "started"},
        "monitoring": {
            "podMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "dashboard": {"enabled": True, "folder": "LLM"},
            "labels": {"release": "prometheus"},
        },
        "ui": {"enabled": True, "port": 9000, "allowHosts": ["cache.example"]},
        "networkPolicy": {
            "engineFrom": [{"podSelector": {"matchLabels": {"app": "router"}}}],
            "uiFrom": [{"podSelector": {"matchLabels": {"app": "ingress"}}}],
        },
        "nodeSelector": {"pool": "llm"},
        "affinity": {"nodeAffinity": {}},
        "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more"}}],
    },
}


@dataclass(frozen=True, slots=True)
class Release:
    """What one install would create."""

    objects: tuple[dict[str, Any], ...]
    notes: str

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.objects if one["kind"] == kind]

    def templates(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, pod template) of everything that goes on making pods."""
        for one in self.objects:
            name = one["metadata"]["name"]
            if one["kind"] in ("Deployment", "DaemonSet"):
                yield name, one["spec"]["template"]
            elif one["kind"] == "LeaderWorkerSet":
                group = one["spec"]["leaderWorkerTemplate"]
                yield from ((name, group["leaderTemplate"]), (f"{name}-1", group["workerTemplate"]))

    def pods(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, pod spec) of everything that makes pods."""
        for one in self.of("Pod"):
            yield one["metadata"]["name"], one["spec"]
        for name, template in self.templates():
            yield name, template["spec"]

    def sidecar_pod(self) -> dict[str, Any]:
        """Return the spec of the pod that holds the sidecar."""
        return next(pod for _, pod in self.pods() if container(pod, "kvferry"))

    def engine_pod(self) -> dict[str, Any] | None:
        return next((pod for _, pod in self.pods() if container(pod, "vllm")), None)

    def toml(self) -> str:
        """Return the sidecar's configuration file."""
        maps = [one for one in self.of("ConfigMap") if "kvferry.toml" in one.get("data", {})]
        assert len(maps) == 1
        return str(maps[0]["data"]["kvferry.toml"])


def containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def container(pod: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((one for one in containers(pod) if one["name"] == name), None)


def mounts(one: Mapping[str, Any]) -> dict[str, str]:
    """Return the volume of each path."""
    return {mount["mountPath"]: mount["name"] for mount in one.get("volumeMounts", [])}


def volumes(pod: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {volume["name"]: volume for volume in pod["volumes"]}


@cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def render_text(values: Values) -> dict[str, str]:
    """Return the text of each template that made one. Raises HelmError."""
    made = chart().render(dict(values), name="demo", namespace="llm")
    return {name: text.strip() + "\n" for name, text in made.items() if text.strip()}


def render(values: Values) -> Release:
    texts = render_text(values)
    notes = texts.pop("kvferry/templates/NOTES.txt")
    found = (one for text in texts.values() for one in yaml.safe_load_all(text))
    return Release(tuple(one for one in found if one is not None), notes)


@cache
def values_of(name: str) -> Values:
    """Return the values of a recipe or a variant."""
    if name in VARIANTS:
        return VARIANTS[name]
    return helm_python.values_from_yaml((CHART / "recipes" / f"{name}.yaml").read_text())


@cache
def release(name: str) -> Release:
    return render(values_of(name))


def golden_text(name: str) -> str:
    """Return all of a release as one text, in the order of the templates' names."""
    return "".join(
        f"--- {path}\n{text}" for path, text in sorted(render_text(values_of(name)).items())
    )

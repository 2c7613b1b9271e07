"""What the chart refuses, by name; and that the schema, the values and their comments agree."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import helm_python
import pytest
import yaml
from support.chart import CHART, MINIMAL, chart, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def with_value(path, value, base=MINIMAL):
    values = copy.deepcopy(dict(base))
    *tables, last = path.split(".")
    inner = values
    for name in tables:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return values


REFUSED = [
    ("pool.size", "80Gb"),
    ("pool.size", "1.5Gi"),
    ("pool.size", 8),
    ("pool.sise", "8Gi"),
    ("pool.hugepages", "2MB"),
    ("pool.hugepages", True),
    ("modus", "sidecar"),
    ("mode", "deployment"),
    ("user", -1),
    ("image.digest", "sha256:12"),
    ("image.pullPolicy", "Sometimes"),
    ("sidecar.copyThreads", 0),
    ("sidecar.logLevel", "verbose"),
    ("sidecar.cpu", "two"),
    ("sidecar.config.run_dir", "/elsewhere"),
    ("sidecar.config.limits.drain_ms_max", 1),
    ("sidecar.config.tiers.host.bytes", "1GiB"),
    ("sidecar.config.tiers.host.hugepages_dir", "/dev/hugepages"),
    ("sidecar.config.namespaces.bound", "red=uid:1"),
    ("sidecar.config.traces.sample_percent", 0.5),
    ("tenants.bound", "red"),
    ("tenants.bound", "red=uid:1 blue=uid:2"),
    ("connector.source", "git"),
    ("connector.config.run_dir", "/elsewhere"),
    ("engine.enabled", False),
    ("engine.port", 70000),
    ("engine.tensorParallelSize", 0),
    ("engine.preStopSleepSeconds", "15s"),
    ("engine.resources.limits.memory", "16Gb"),
    ("engine.models.size", "100"),
    ("gpu.access", "hostPath"),
    ("gpu.access", "draAdmin"),
    ("gpu.resourceName", "gpu"),
    ("rdma.resources.hca", 1),
    ("daemonset.hostPath", "run/kvferry"),
    ("networkPolicy.enabled", "yes"),
    ("disk.size", "10GB"),
    ("disk.policy", "some"),
    ("remote.url", "redis://:secret@cache"),
    ("remote.url", "cache:6379"),
    ("remote.mooncake.segmentSize", "64GB"),
    ("remote.protocol", "ib"),
    ("remote.dfkv.library", "libdfkv.so"),
    ("http.listen", "everywhere"),
    ("http.readiness", "strict"),
    ("ui.port", 0),
    ("ui.targets", ["10.0.0.7"]),
    ("ui.allowHosts", ["https://cache.example"]),
    ("monitoring.interval", "15"),
]


@pytest.mark.parametrize(("path", "value"), REFUSED, ids=str)
def test_a_bad_value_is_refused_by_its_name(path, value):
    with pytest.raises(helm_python.HelmError) as refusal:
        render(with_value(path, value))
    assert path.rpartition(".")[2] in str(refusal.value)


def test_rdma_needs_a_device():
    store = {"url": "mooncake://master:50051", "protocol": "rdma"}
    with pytest.raises(helm_python.HelmError, match=r"remote\.mooncake\.device"):
        render({**MINIMAL, "remote": store})


def test_serving_gpus_needs_sight_of_them():
    with pytest.raises(helm_python.HelmError, match=r"gpu\.serve needs"):
        render(with_value("gpu.serve", True))


def test_dfkv_needs_its_library():
    with pytest.raises(helm_python.HelmError, match=r"remote\.dfkv\.library"):
        render({**MINIMAL, "remote": {"url": "dfkv://n1=10.0.0.1:12001"}})


def test_a_page_needs_an_api_to_read():
    with pytest.raises(helm_python.HelmError, match=r"ui\.enabled needs http\.listen"):
        render({**MINIMAL, "ui": {"enabled": True}, "http": {"listen": ""}})


@pytest.mark.parametrize("change", [{"mode": "sidecar", "engine": {}}, {"user": 1}, {"engine": {}}])
def test_tenants_need_a_sidecar_of_root_for_other_charts_engines(change):
    whole = {"mode": "daemonset", "user": 0, "engine": {"enabled": False}, "model": "m"}
    bound = {"tenants": {"bound": "red=uid:20001"}}
    render({**whole, **bound})
    with pytest.raises(helm_python.HelmError, match=r"tenants\.bound needs mode daemonset"):
        render({**whole, **bound, **change})


def test_two_stores_are_refused():
    master = {"url": "redis://cache", "mooncake": {"master": {"enabled": True}}}
    with pytest.raises(helm_python.HelmError, match="leave one out"):
        render({**MINIMAL, "remote": master})


def test_a_store_without_memory_is_refused():
    with pytest.raises(helm_python.HelmError, match="segmentSize is empty"):
        render(with_value("remote.mooncake.master.enabled", True))


def test_a_claim_of_a_pod_cannot_serve_a_daemonset():
    with pytest.raises(helm_python.HelmError, match="access"):
        render(with_value("gpu.access", "dra", {**MINIMAL, "mode": "daemonset"}))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model", "", "--set model="),
        ("sidecar.memory", "8Gi", "raise sidecar.memory to at least 8896Mi"),
        ("engine.resources.limits.memory", "6Gi", "engine.resources.limits.memory is 6144Mi"),
        ("engine.resources.requests.memory", "32Gi", "requests.memory is above"),
        ("engine.shmSize", "14Gi", "may take 18432Mi"),
        ("engine.shmSize", "64Mi", "raise it to at least 256Mi"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_sum(path, value, words):
    with pytest.raises(helm_python.HelmError) as refusal:
        render(with_value(path, value))
    assert words in str(refusal.value)


def test_defaults_lack_nothing_but_the_model():
    render(MINIMAL)
    with pytest.raises(helm_python.HelmError, match="model: name the model"):
        render({})


def leaves(values, schema, path=""):
    """Yield (path, schema or None) of every key of the values."""
    for key, value in values.items():
        inner = schema.get("properties", {}).get(key)
        if inner and "$ref" in inner:
            inner = SCHEMA["definitions"][inner["$ref"].rpartition("/")[2]]
        yield f"{path}{key}", inner
        if isinstance(value, dict) and inner and "properties" in inner:
            closed = inner.get("additionalProperties") is False
            yield from leaves(value, inner, f"{path}{key}.") if closed else ()


def test_schema_and_values_have_the_same_keys():
    values = chart().values
    assert [path for path, schema in leaves(values, SCHEMA) if schema is None] == []
    missing = [key for key in SCHEMA["properties"] if key not in values and key != "global"]
    assert missing == []
    for key, section in values.items():
        known = SCHEMA["properties"][key].get("properties", {})
        assert set(known) - set(section if isinstance(section, dict) else ()) == set(), key


def test_every_value_is_explained_where_it_stands():
    """A comment above it, on its line, or above the line before it that begins the sentence."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    bare = []
    for number, line in enumerate(lines):
        text = line.strip()
        if not text or text.startswith(("#", "-")) or "#" in text:
            continue
        before = lines[number - 1].strip() if number else ""
        if before.startswith("#") or text.endswith(":"):
            continue
        bare.append(f"{number + 1}: {text}")
    # Their names say it, beside neighbours that are explained.
    assert {line.split(": ")[1] for line in bare} <= SELF_EVIDENT, bare


SELF_EVIDENT = {
    "registry", "repository", "tag", "digest", "pullPolicy", "podAnnotations", "extraVolumes",
    "extraVolumeMounts", "pipelineParallelSize", "port", "requests", "limits", "mountPath",
    "priorityClassName", "type", "rollingUpdate", "tolerations", "affinity", "topologyKey",
    "whenUnsatisfiable", "matchLabels",
}  # fmt: skip


def test_the_schema_is_a_schema():
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--check-metaschema", "values.schema.json"],
        cwd=CHART,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_names_of_releases_of_any_length_fit():
    long = "r" * 53
    made = chart().render(dict(MINIMAL), name=long, namespace="llm")
    for text in made.values():
        for one in yaml.safe_load_all(text) if "kind:" in text else ():
            if one:
                assert len(one["metadata"]["name"]) <= 63

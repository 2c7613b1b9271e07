"""Every recipe and variant: rendered by Helm, valid for three Kubernetes versions, as expected."""

from __future__ import annotations

import functools
import tomllib

import helm_python
import kubernetes_validate.utils
import pytest
import yamllint.config
import yamllint.linter
from kvferry_sidecar import cli
from support.chart import (
    CHART,
    GOLDEN,
    RECIPES,
    VARIANTS,
    golden_text,
    release,
    render_text,
    values_of,
)
from support.sources import ROOT

NAMES = [*RECIPES, *VARIANTS]
KUBERNETES = ("1.30", "1.34", "1.37")
# The chart says 1.30; claims for devices came with this one.
CLAIMS_SINCE = "1.34"
# Their schemas come with who serves them: test_crds.py, test_multi_node.py.
FOREIGN = ("monitoring.coreos.com/", "leaderworkerset.x-k8s.io/")


@pytest.fixture(autouse=True, scope="module")
def read_schemas_once():
    """Each call of the library reads megabytes of definitions."""
    whole = kubernetes_validate.utils.schema_contents
    kubernetes_validate.utils.schema_contents = functools.cache(whole)
    yield
    kubernetes_validate.utils.schema_contents = whole


def claimant(name):
    """Return the object whose pods claim devices."""
    found = (one for kind in ("Deployment", "DaemonSet") for one in release(name).of(kind))
    return next(one for one in found if one["spec"]["template"]["spec"].get("resourceClaims"))


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", NAMES)
def test_the_api_server_would_know_every_field(name, version):
    checked = 0
    for one in release(name).objects:
        if one["apiVersion"].startswith(FOREIGN):
            continue
        if version < CLAIMS_SINCE and release(name).of("ResourceClaimTemplate"):
            with pytest.raises(kubernetes_validate.utils.ValidationError, match="resourceClaim"):
                kubernetes_validate.utils.validate(claimant(name), version, strict=True)
            return
        kubernetes_validate.utils.validate(one, version, strict=True)
        checked += 1
    for pod_name, template in release(name).templates():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {**template["metadata"], "name": pod_name}
        kubernetes_validate.utils.validate(pod, version, strict=True)
    assert checked >= 2


@pytest.mark.parametrize("name", RECIPES)
def test_it_renders_what_was_reviewed(name):
    wanted = (GOLDEN / f"{name}.txt").read_text()
    assert golden_text(name) == wanted, "run tests/helm/write_golden.py and read the diff"


def test_every_recipe_is_in_the_table():
    text = (CHART / "README.md").read_text()
    assert [name for name in RECIPES if f"[{name}](recipes/{name}.yaml)" not in text] == []


def test_there_is_no_stale_golden_file():
    assert {path.stem for path in GOLDEN.iterdir()} == set(RECIPES)


@pytest.mark.parametrize("name", NAMES)
def test_helm_lint_finds_nothing(name):
    report = helm_python.lint(str(CHART), dict(values_of(name)), strict=True)
    assert report["errors"] == []
    found = [one["error"] for one in report["messages"]]
    # An icon is a picture for catalogues.
    assert [error for error in found if "icon is recommended" not in error] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_sidecar_accepts_its_configuration(name, tmp_path, capsys):
    file = tmp_path / "kvferry.toml"
    file.write_text(release(name).toml())
    assert cli.main(["config", "check", str(file)]) == 0, capsys.readouterr().err


def test_settings_of_the_values_arrive_with_their_types():
    settings = tomllib.loads(release("everything").toml())
    assert settings["limits"] == {
        "drain_ms_max": 30000,
        "sessions_max": 8,
        "jobs_max": 5000,
    }
    assert settings["tiers"]["host"] == {
        "bytes": "1024MiB",
        "name": "cache",
        "keys_max": 1000000,
        "numa": "0",
    }


def test_tenants_arrive_with_their_quotas():
    settings = tomllib.loads(release("tenants").toml())
    assert settings["namespaces"]["bound"] == "red=uid:20001; blue=uid:20002"
    assert settings["namespaces"]["rules"].startswith("tenant=red bytes=60%")
    assert settings["traces"]["sample_percent"] == 5
    assert "supplementalGroups\n[10002]" in release("tenants").notes


def test_a_packaged_chart_renders_the_same(tmp_path):
    """Rules, board and recipes are files of the chart: .helmignore must leave them in."""
    archive = helm_python.package(str(CHART), destination=str(tmp_path))
    with helm_python.Chart.load(archive) as packaged:
        made = packaged.render(dict(values_of("everything")), name="demo", namespace="llm")
        names = {one["name"] for one in packaged.files}
    texts = {name: text.strip() + "\n" for name, text in made.items() if text.strip()}
    assert texts == render_text(values_of("everything"))
    assert {f"recipes/{name}.yaml" for name in RECIPES} | {"README.md"} <= names


def test_versions_are_the_package_s():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with helm_python.Chart.load(CHART) as chart:
        assert chart.metadata["version"] == package
        assert chart.metadata["appVersion"] == package


# A template is YAML only after rendering.
PLAIN = [CHART / "Chart.yaml", CHART / "values.yaml", *sorted((CHART / "recipes").iterdir())]


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_yaml_is_tidy(path):
    rules = yamllint.config.YamlLintConfig(
        "extends: default\nrules:\n  line-length: {max: 100}\n  document-start: disable\n"
        "  braces: {max-spaces-inside: 0}\n  comments: {min-spaces-from-content: 1}\n"
    )
    assert [str(one) for one in yamllint.linter.run(path.read_text(), rules)] == []

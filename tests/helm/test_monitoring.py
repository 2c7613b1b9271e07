"""Monitors and alerts: what is scraped exists, and every rule fires when it should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import helm_python
import pytest
import yaml
from support.chart import CHART, MINIMAL, Values, render
from support.sources import ROOT

RULES = CHART / "rules" / "kvferry.yaml"
HERE = Path(__file__).parent


def monitored(kind: str, **more: object) -> Values:
    return {**MINIMAL, "monitoring": {kind: {"enabled": True}, **more}}


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool (Debian package prometheus) is not installed")
    return found


def test_rules_are_rules(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_and_stay_silent(promtool: str, tmp_path: Path) -> None:
    for file in (RULES, HERE / "rules_test.yaml"):
        shutil.copy(file, tmp_path)
    command = [promtool, "test", "rules", "rules_test.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_name_metrics_that_exist() -> None:
    documented = set(
        re.findall(r"^\| `(kvferry_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.M)
    )
    used = set(re.findall(r"\bkvferry_\w+", "".join(expressions())))
    assert used
    assert used <= documented


def expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def test_every_alert_is_tried() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    tried = set(re.findall(r"alertname: (\w+)", (HERE / "rules_test.yaml").read_text()))
    assert tried == alerts


def test_rules_reach_the_cluster_untouched() -> None:
    """Their own templates ({{ $labels }}) are Prometheus', not Helm's."""
    (made,) = render(monitored("prometheusRule", labels={"release": "prom"})).of("PrometheusRule")
    assert made["spec"] == yaml.safe_load(RULES.read_text())
    assert made["metadata"]["labels"]["release"] == "prom"


def test_a_pod_monitor_reads_sidecar_and_engine() -> None:
    (monitor,) = render(monitored("podMonitor")).of("PodMonitor")
    ports = [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]]
    assert ports == ["probes", "http"]
    nodes = {**monitored("podMonitor"), "mode": "daemonset"}
    (monitor,) = render(nodes).of("PodMonitor")
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == ["probes"]


def test_a_service_monitor_selects_its_service_alone() -> None:
    made = render(monitored("serviceMonitor"))
    (monitor,) = made.of("ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = [one for one in made.of("Service") if wanted <= one["metadata"]["labels"].items()]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    endpoints = [one["port"] for one in monitor["spec"]["endpoints"]]
    assert endpoints == [port["name"] for port in service["spec"]["ports"]]


def test_two_monitors_are_refused() -> None:
    both = {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}
    with pytest.raises(helm_python.HelmError, match="enable one"):
        render({**MINIMAL, "monitoring": both})

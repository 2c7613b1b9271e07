"""Monitors, alerts and the board: what they ask for exists, and every rule fires when it should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from support.chart import CHART, MINIMAL, Values, render
from support.sources import ROOT

RULES = CHART / "rules" / "kvferry.yaml"
BOARD = CHART / "dashboards" / "kvferry.json"
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


def documented() -> dict[str, set[str]]:
    """Return the labels of every metric that the sidecar serves, by name."""
    rows = re.findall(
        r"^\| `(kvferry_\w+)` \| (\w+) \| ([^|]*) \|", (ROOT / "docs/metrics.md").read_text(), re.M
    )
    found: dict[str, set[str]] = {}
    for name, kind, labels in rows:
        own = set(re.findall(r"\w+", labels)) | {"namespace", "pod"}  # a scrape adds these two
        found[name] = own
        if kind == "histogram":
            found |= {f"{name}_bucket": own | {"le"}, f"{name}_sum": own, f"{name}_count": own}
    return found


def expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("where", ["rules", "board"])
def test_what_is_asked_for_exists(where: str) -> None:
    """A metric or a label that was renamed leaves an alert silent and a panel empty."""
    known = documented()
    for expression in expressions() if where == "rules" else queries():
        names = set(re.findall(r"\bkvferry_\w+", expression))
        recorded = "kvferry:hit_ratio:5m" in expression  # by a rule of the same file
        assert names or recorded, expression
        assert names <= set(known), expression
        labels = {label for name in names for label in known[name]}
        used = re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", expression)
        for by in re.findall(r"\bby \(([^)]*)\)", expression):
            used += re.findall(r"\w+", by)
        assert set(used) <= labels, expression


def test_queries_of_the_board_are_queries(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"board:{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(queries())
    ]
    file = tmp_path / "board.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    done = subprocess.run(
        [promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    return found


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def test_panels_lie_beside_each_other_and_say_what_they_show() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not own & taken, panel["title"]
        taken |= own
        if panel["type"] != "row":
            assert panel["description"].endswith((".", "limits")), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"]


def test_the_board_belongs_to_no_data_source_of_ours() -> None:
    text = BOARD.read_text()
    assert set(re.findall(r'"uid": "([^"]+)"', text)) == {"${datasource}", "kvferry"}


def test_the_board_reaches_grafana_untouched() -> None:
    made = render(monitored("dashboard"))
    (one,) = [one for one in made.of("ConfigMap") if "kvferry.json" in one["data"]]
    assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(one["data"]["kvferry.json"]) == json.loads(BOARD.read_text())
    assert len(one["data"]["kvferry.json"]) < 1 << 20


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

"""Objects of the Prometheus operator: every field is one of its API, with a value it takes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import pytest
from support.chart import MINIMAL, RECIPES, VARIANTS, release, render

SCHEMA = json.loads((Path(__file__).parent / "monitoring_crds.json").read_text())
CHECK = jsonschema.Draft7Validator(SCHEMA)
KINDS = ("PodMonitor", "ServiceMonitor", "PrometheusRule")


def all_on(monitor):
    on = {monitor: {"enabled": True}, "prometheusRule": {"enabled": True}}
    return render({**MINIMAL, "monitoring": on})


def of_the_operator(made):
    return [one for one in made.objects if one["apiVersion"].startswith("monitoring.coreos.com/")]


def test_the_schema_is_a_schema():
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def test_what_the_operator_gets_is_what_it_knows():
    seen = set()
    renders = [release(name) for name in (*RECIPES, *VARIANTS)]
    for made in (*renders, all_on("podMonitor"), all_on("serviceMonitor")):
        for one in of_the_operator(made):
            CHECK.validate(one)
            seen.add(one["kind"])
    assert seen == set(KINDS)


def first(kind):
    made = all_on("serviceMonitor" if kind == "ServiceMonitor" else "podMonitor")
    return copy.deepcopy(made.of(kind)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_it_does_not_know_is_found(kind):
    one = first(kind)
    one["spec"]["endpoint"] = []
    assert not CHECK.is_valid(one)
    del one["spec"]["endpoint"]
    assert CHECK.is_valid(one)


def test_a_duration_of_another_kind_is_found():
    one = first("PrometheusRule")
    alert = next(r for g in one["spec"]["groups"] for r in g["rules"] if "for" in r)
    alert["for"] = "1.5m"
    assert not CHECK.is_valid(one)
    monitor = first("PodMonitor")
    monitor["spec"]["podMetricsEndpoints"][0]["interval"] = "15"
    assert not CHECK.is_valid(monitor)


def test_a_label_that_is_no_text_is_found():
    one = first("PrometheusRule")
    one["spec"]["groups"][0]["rules"][0]["labels"] = {"severity": 1}
    assert not CHECK.is_valid(one)

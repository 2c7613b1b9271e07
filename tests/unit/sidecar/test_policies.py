"""Rules per namespace: how they are written, and which one counts."""

from __future__ import annotations

import pytest
from kvferry_sidecar import config, policies
from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.settings import Setting

RED = bytes.fromhex("ab" * 16)


def test_the_first_rule_that_fits_counts() -> None:
    rules = policies.parse(
        "tenant=red bytes=20% ttl_s=60; namespace=AB bytes=1.5MiB; model=org/m ttl_s=5; "
        "any bytes=4096"
    )
    of = {
        ("red", "other"): policies.Bounds(200, 60),
        ("blue", "org/m"): policies.Bounds(1536 << 10, 0),
    }
    for (tenant, model), bounds in of.items():
        facts = {"tenant": tenant, "model": model}
        assert policies.bounds_of(rules, RED, facts, 1000) == bounds
    assert policies.bounds_of(rules, bytes(16), {"model": "org/m"}, 1000).ttl_s == 5
    assert policies.bounds_of(rules, bytes(16), {}, 1000).quota_bytes == 4096
    assert policies.bounds_of((), RED, {}, 1000) == policies.UNBOUNDED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("somebody bytes=1MiB", "nobody that a rule can be for"),
        ("tenant bytes=1MiB", "nobody that a rule can be for"),
        ("any=x bytes=1MiB", "nobody that a rule can be for"),
        ("namespace=xyz bytes=1MiB", "no hexadecimal number"),
        ("any", "gives nothing"),
        ("any bytes=0%", "out of range"),
        ("any bytes=101%", "out of range"),
        ("any bytes=5% bytes=1MiB", "bytes twice"),
        ("any bytes=lots", "not a size"),
        ("any ttl_s=soon", "out of range"),
        ("any size=5", "nothing that a rule gives"),
    ],
)
def test_a_rule_in_the_wrong_form_is_refused_at_the_start(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load(flags={"namespaces.rules": Setting(text, "flag --set")}, environment={})
    assert words in refused.value.message
    assert "flag --set" in refused.value.message
    assert refused.value.remedy

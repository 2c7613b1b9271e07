"""The pool's volume on huge pages; on shared memory test_rules.py has it."""

from __future__ import annotations

import tomllib

import pytest
from support.chart import container, containers, mounts, release, values_of
from support.quantities import mebibytes


@pytest.mark.parametrize("name", ["huge", "nodes-huge"])
def test_a_pool_on_huge_pages_is_where_the_sidecar_looks(name):
    """And nobody else asks for such pages: they are never overcommitted."""
    pod = release(name).sidecar_pod()
    sidecar = container(pod, "kvferry")
    assert mounts(sidecar)["/dev/hugepages"] == "pool"
    assert "/dev/shm" not in mounts(sidecar)
    assert tomllib.loads(release(name).toml())["tiers"]["host"]["hugepages_dir"] == "/dev/hugepages"
    pool_mi = mebibytes(values_of(name)["pool"]["size"])
    assert mebibytes(sidecar["resources"]["limits"]["memory"]) < 512 + pool_mi / 64 + 128
    for _, one in release(name).pods():
        for other in containers(one):
            asks = [key for key in other["resources"]["limits"] if key.startswith("hugepages-")]
            assert len(asks) == (other["name"] == "kvferry")

"""Bytes per network card, RDMA port and NUMA node: read, bounded, and why there are none."""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from kvferry_sidecar.observe import metrics, paths
from kvferry_sidecar.observe.paths import Nic, PathsReading
from msgspec.structs import asdict
from support.http import Http
from support.readings import reading
from support.sidecar import running_sidecar


def card(root: Path, name: str, received: str, sent: str, *, real: bool) -> None:
    folder = root / "net" / name / "statistics"
    folder.mkdir(parents=True)
    (folder / "rx_bytes").write_text(received)
    (folder / "tx_bytes").write_text(sent)
    if real:
        (root / "net" / name / "device").mkdir()


def port(root: Path, device: str, number: int, **counters: str) -> None:
    folder = root / "infiniband" / device / "ports" / str(number) / "counters"
    folder.mkdir(parents=True)
    for name, text in counters.items():
        (folder / name).write_text(text)


def test_ports_count_words_and_virtual_cards_stand_in_for_real_ones(tmp_path: Path) -> None:
    card(tmp_path, "lo", "1", "1", real=False)
    card(tmp_path, "veth1", "7\n", "8\n", real=False)
    assert paths.nics(tmp_path) == [Nic("veth1", "network", 7, 8)], "a pod's own"
    card(tmp_path, "eth0", "70\n", "80\n", real=True)
    card(tmp_path, "gone", "", "", real=True)
    port(tmp_path, "mlx5_0", 1, port_rcv_data="10\n", port_xmit_data="20\n")
    port(tmp_path, "rxe0", 1)
    assert paths.nics(tmp_path) == [
        Nic("mlx5_0/1", "RDMA", 40, 80),
        Nic("eth0", "network", 70, 80),
    ]


def test_cards_are_bounded_and_none_is_said(tmp_path: Path) -> None:
    found = paths.read(0, 0, tmp_path)
    assert (found.nics, found.nics_left_out) == ([], 0)
    assert "no network card" in found.nics_missing
    assert found.pool_nodes_missing == "the pool is not there yet"
    for number in range(paths.nics_max + 2):
        card(tmp_path, f"eth{number}", "1", "1", real=True)
    found = paths.read(0, 0, tmp_path)
    assert (len(found.nics), found.nics_left_out, found.nics_missing) == (paths.nics_max, 2, "")


def test_pages_that_are_there_count_for_their_node() -> None:
    total = 8 << 20
    with mmap.mmap(-1, total) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert paths.pool_nodes(address, total)[1] == (
            "none of the pages that were asked about is mapped"
        )
        for at in range(0, total // 2, 4096):
            ctypes.memset(address + at, 1, 1)
        nodes, missing = paths.pool_nodes(address, total)
    assert (sum(nodes.values()), missing) == (total // 2, "")
    assert set(nodes) <= {
        node.name.removeprefix("node") for node in Path("/sys/devices/system/node").glob("node*")
    }


def test_a_kernel_that_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> NoReturn:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(paths, "page_nodes", refuse)
    assert paths.pool_nodes(4096, 1 << 20) == (
        {},
        "the kernel refuses to say where pages lie (move_pages): Operation not permitted",
    )


def test_metrics_have_them_where_somebody_asked() -> None:
    told = PathsReading([Nic("mlx5_0/1", "RDMA", 40, 80)], pool_nodes={"0": 5, "1": 6})
    taken = reading()
    assert b"kvferry_nic_bytes_total{" not in metrics.exposition(taken)[0]
    lines = metrics.exposition(replace(taken, paths=told))[0].decode().splitlines()
    for line in (
        'kvferry_nic_bytes_total{direction="received",nic="mlx5_0/1"} 40.0',
        'kvferry_nic_bytes_total{direction="sent",nic="mlx5_0/1"} 80.0',
        'kvferry_pool_node_bytes{node="1"} 6.0',
    ):
        assert line in lines


def test_a_sidecar_tells_of_its_pool() -> None:
    with running_sidecar(pool_bytes=8 << 20) as sidecar:
        http = Http(sidecar.run_dir / "http.sock")
        told = http.get("/api/v1/paths").json()
        assert set(told) == set(asdict(PathsReading()))
        if told["pool_nodes_missing"]:
            pytest.skip(told["pool_nodes_missing"])
        assert sum(told["pool_nodes"].values()) == sidecar.status()["pool"]["total_bytes"]
        body = http.get("/metrics").text
        for node, count in told["pool_nodes"].items():
            line = re.search(rf'^kvferry_pool_node_bytes{{node="{node}"}} (\S+)$', body, re.M)
            assert line is not None
            assert float(line[1]) == count
        for nic in told["nics"]:
            assert f'direction="sent",nic="{nic["name"]}"' in body

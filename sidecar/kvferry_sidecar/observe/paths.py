"""Where the bytes go: counters of network cards and RDMA ports, and the pool's NUMA nodes.

Read when somebody asks, in the thread of whoever asks; the control loop has no part in it. What a
machine or container does not tell is said in words.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import msgspec
from kvferry_native import page_nodes

nics_max = 16
pages_max = 1024  # of the pool, that stand for all
page_bytes = 4096
# Bytes of a unit, received, sent: ports count words of four bytes (InfiniBand's PortCounters).
_RDMA = (4, "port_rcv_data", "port_xmit_data")
_NETWORK = (1, "rx_bytes", "tx_bytes")


class Nic(msgspec.Struct, frozen=True):
    """One network card or RDMA port; bytes since the kernel began to count, of everybody."""

    name: str
    kind: str  # "network", "RDMA"
    received_bytes: int
    sent_bytes: int


class PathsReading(msgspec.Struct, frozen=True):
    """``pool_nodes``: bytes by NUMA node. ``*_missing``: why there is nothing, "" if there is."""

    nics: list[Nic] = []
    nics_left_out: int = 0  # over nics_max
    nics_missing: str = ""
    pool_nodes: dict[str, int] = {}
    pool_nodes_missing: str = ""


def read(pool_address: int, pool_bytes: int, root: Path = Path("/sys/class")) -> PathsReading:
    """Return what the kernel says now."""
    found = nics(root)
    nodes, missing = pool_nodes(pool_address, pool_bytes)
    return PathsReading(
        nics=found[:nics_max],
        nics_left_out=max(0, len(found) - nics_max),
        nics_missing="" if found else f"{root} shows no network card and no RDMA port here",
        pool_nodes=nodes,
        pool_nodes_missing=missing,
    )


def nics(root: Path) -> list[Nic]:
    """Return RDMA ports that count bytes, then network cards; virtual ones where there is no other.

    A pod has its own, which are virtual; a host has many virtual ones that repeat the real ones.
    """
    found = [
        _nic(f"{port.parent.parent.name}/{port.name}", "RDMA", port / "counters", _RDMA)
        for port in sorted(root.glob("infiniband/*/ports/*"))
    ]
    cards = [card for card in sorted(root.glob("net/*")) if card.name != "lo"]
    real = [card for card in cards if (card / "device").exists()]
    found += [_nic(card.name, "network", card / "statistics", _NETWORK) for card in real or cards]
    return [nic for nic in found if nic is not None]


def pool_nodes(address: int, total_bytes: int) -> tuple[dict[str, int], str]:
    """Return the pool's bytes by NUMA node, from pages spread evenly, or why that is not told.

    Pages that this process has not mapped count for no node.
    """
    count = min(pages_max, total_bytes // page_bytes)
    if not count:
        return {}, "the pool is not there yet"
    stride = total_bytes // count // page_bytes * page_bytes
    try:
        nodes = Counter(node for node in page_nodes(address, stride, count) if node >= 0)
    except OSError as error:
        return {}, f"the kernel refuses to say where pages lie (move_pages): {error.strerror}"
    if not nodes:
        return {}, "none of the pages that were asked about is mapped"
    return {str(node): nodes[node] * total_bytes // count for node in sorted(nodes)}, ""


def _nic(name: str, kind: str, folder: Path, counters: tuple[int, str, str]) -> Nic | None:
    unit_bytes, received, sent = counters
    with contextlib.suppress(OSError, ValueError):  # a driver that does not count; a card that went
        return Nic(
            name,
            kind,
            int((folder / received).read_text()) * unit_bytes,
            int((folder / sent).read_text()) * unit_bytes,
        )
    return None

"""`kvferry geometry show`: the geometry that a running sidecar's engines registered."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvferry_sidecar.errors import ExitCode, KvferryError
from kvferry_sidecar.observe.shapes import GeometryStatus, GroupStatus
from kvferry_sidecar.observe.status import Document, SessionStatus
from kvferry_sidecar.settings import size_text


class NamespaceError(KvferryError):
    """No engine is attached under this namespace."""

    exit_code = ExitCode.FAILED


class Shown(msgspec.Struct, frozen=True):
    """One namespace. ``question``: its rules, as `kvferry geometry eval` takes them."""

    namespace: str
    sessions: list[str]
    ranks: list[int]
    geometry: GeometryStatus
    question: dict[str, object]


def select(document: Document, namespace: str) -> list[Shown]:
    """Return the namespaces that begin with ``namespace``. Raises NamespaceError without one."""
    sessions = [one for one in document.sessions if one.namespace and one.geometry is not None]
    by_namespace: dict[str, list[SessionStatus]] = {}
    for one in sessions:
        by_namespace.setdefault(one.namespace, []).append(one)
    found = [
        _shown(name, members)
        for name, members in by_namespace.items()
        if name.startswith(namespace.lower())
    ]
    if not found:
        known = ", ".join(name[:12] for name in by_namespace) or "none"
        raise NamespaceError(
            f"no attached engine's namespace begins with {namespace!r}; there are: {known}",
            "name one of those (kvferry status lists them), or start the engine",
        )
    return found


def table(shown: Sequence[Shown]) -> RenderableType:
    """Return the namespaces as tables."""
    parts: list[RenderableType] = []
    for one in shown:
        geometry = one.geometry
        parts.append(Text(f"namespace {one.namespace}: {', '.join(one.sessions)}"))
        parts.append(
            Text(
                f"ranks {', '.join(map(str, one.ranks))}; hashes cover "
                f"{geometry.hash_block_tokens} tokens, hits are multiples of "
                f"{geometry.alignment_tokens}"
            )
        )
        parts.append(Text(f"sliding windows and states are kept {_retention(geometry)}"))
        parts.append(_groups(geometry.groups))
    return Group(*parts)


def _groups(groups: Sequence[GroupStatus]) -> Table:
    names = ("group", "kind", "tokens", "reach", "layers", "replicas", "shards", "stored", "held")
    found = Table(*names, "saved", box=None, header_style="bold")
    for column in found.columns[2:9]:
        column.justify = "right"
    for one in groups:
        reach = one.window_tokens or one.chunk_tokens
        found.add_row(
            str(one.group),
            f"{one.kind}{' (EAGLE)' if one.eagle else ''}",
            str(one.block_tokens),
            str(reach) if reach else "-",
            str(one.layers),
            str(one.tp_replicas),
            str(one.shards),
            size_text(one.stored_bytes),
            size_text(one.held_bytes),
            one.save_rule,
        )
    stored, held = (sum(values) for values in zip(*map(_per_token, groups), strict=True))
    found.add_row(
        "", "per token", "", "", "", "", "", f"{stored:,.0f} B", f"{held:,.0f} B", "",
        style="bold",
    )  # fmt: skip
    return found


def _per_token(group: GroupStatus) -> tuple[float, float]:
    """Return stored and held bytes per token, were every chunk kept."""
    return group.stored_bytes / group.block_tokens, group.held_bytes / group.block_tokens


def _retention(geometry: GeometryStatus) -> str:
    if geometry.retention_tokens is None:
        return "at every one of them"
    every = f"every {geometry.retention_tokens} tokens and " if geometry.retention_tokens else ""
    return f"{every}where prompts end or part"


def _shown(namespace: str, members: Sequence[SessionStatus]) -> Shown:
    geometry = members[0].geometry
    assert geometry is not None, "select() looked"
    names = [f"{one.engine_id}/{one.instance_id}" for one in members]
    return Shown(namespace, names, members[0].ranks, geometry, _question(geometry))


def _question(geometry: GeometryStatus) -> dict[str, object]:
    groups: list[dict[str, object]] = []
    for one in geometry.groups:
        group: dict[str, object] = {"kind": one.kind, "block": one.block_tokens}
        numbers = (
            ("window", one.window_tokens),
            ("window_extra", one.window_extra_tokens),
            ("chunk", one.chunk_tokens),
            ("eagle", one.eagle),
        )
        group |= {name: value for name, value in numbers if value}
        groups.append(group if one.save_rule != "none" else group | {"cacheable": False})
    return {
        "groups": groups,
        "hash_block": geometry.hash_block_tokens,
        "scheduler_block": geometry.scheduler_block_tokens,
        "alignment": geometry.alignment_tokens,
        "partial": geometry.alignment_tokens < geometry.scheduler_block_tokens,
        "retention": geometry.retention_tokens,
        "use_eagle": geometry.use_eagle,
    }

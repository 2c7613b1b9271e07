"""Our connector against the interface of each vLLM version that is supported."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
NEW_IN_033 = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


snapshot = load("snapshot")


def recorded(version: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((HERE / f"connector-{version}.json").read_text())
    return document


def test_the_installed_vllm_is_the_recorded_one() -> None:
    import vllm

    assert snapshot.vllm_interface() == recorded(vllm.__version__)


def test_033_is_032_and_three_methods() -> None:
    old, new = recorded("0.32.0"), recorded("0.33.0")
    base = new["KVConnectorBase_V1"]
    assert {name for name in base if name not in old["KVConnectorBase_V1"]} == NEW_IN_033
    assert {name: base[name] for name in base if name not in NEW_IN_033} == old[
        "KVConnectorBase_V1"
    ]
    assert new["SupportsHMA"] == old["SupportsHMA"]


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_our_connector_fits(version: str) -> None:
    from kvferry_connector import FerryConnector

    ours = snapshot.interface_of(FerryConnector)
    for interface in recorded(version).values():
        assert snapshot.misfits(interface, ours) == []


class Base:
    def plain(self, a: int, b: int = 1) -> None: ...

    @classmethod
    def made(cls, a: int) -> None: ...

    @property
    def fact(self) -> int:
        return 1

    def open(self, a: int, **kwargs: Any) -> None: ...


class Fits(Base):
    def plain(self, a: int, b: int = 2, c: int = 3) -> None: ...


class Renamed(Base):
    def plain(self, x: int, b: int = 1) -> None: ...


class Shorter(Base):
    def plain(self, a: int) -> None: ...


class Demanding(Base):
    def plain(self, a: int, b: int, *, c: int) -> None: ...


class Changed(Base):
    def made(self, a: int) -> None: ...

    def fact(self) -> int:
        return 1

    def open(self, a: int) -> None: ...


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (Fits, []),
        (Renamed, ["plain: x stands where vLLM has a"]),
        (Shorter, ["plain: takes no b"]),
        (Demanding, ["plain: b has no default", "plain: demands c, which vLLM does not pass"]),
        (
            Changed,
            [
                "fact is a method, vLLM has a property",
                "made is no classmethod",
                "open: takes no VAR_KEYWORD",
            ],
        ),
    ],
)
def test_the_comparison_can_fail(cls: type, found: list[str]) -> None:
    assert snapshot.misfits(snapshot.interface_of(Base), snapshot.interface_of(cls)) == found

"""kvferry's connector for vLLM: the small half that lives in the engine.

vLLM finds ``FerryConnector`` here (``kv_connector_module_path: "kvferry_connector"``). It is
imported on first use only: the sidecar imports ``kvferry_connector.wire`` and must not load vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry_connector.entry import FerryConnector

__all__ = ["FerryConnector"]


def __getattr__(name: str) -> object:
    if name == "FerryConnector":
        from kvferry_connector.entry import FerryConnector  # noqa: PLC0415 - the point of it

        return FerryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The public interface of vLLM's connector base, as a document that can be compared.

Run as a script in an environment with the vLLM to record::

    python tests/contract/snapshot.py > tests/contract/connector-<version>.json
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

Interface = dict[str, dict[str, Any]]


def interface_of(cls: type) -> Interface:
    """Return each public member of ``cls`` and its own constructor: kind, parameters, abstract."""
    names = [name for name in dir(cls) if not name.startswith("_")]
    if cls.__init__ is not object.__init__:
        names.insert(0, "__init__")
    return {name: _member(cls, name) for name in names}


def _member(cls: type, name: str) -> dict[str, Any]:
    raw = inspect.getattr_static(cls, name)
    if isinstance(raw, property):
        return {"kind": "property", "abstract": _abstract(raw)}
    if not callable(getattr(cls, name)):
        return {"kind": "attribute", "abstract": False}
    kind = {classmethod: "classmethod", staticmethod: "staticmethod"}.get(type(raw), "method")
    function = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
    parameters = [_parameter(p) for p in inspect.signature(function).parameters.values()]
    return {"kind": kind, "parameters": parameters, "abstract": _abstract(raw)}


def _abstract(member: object) -> bool:
    return bool(getattr(member, "__isabstractmethod__", False))


def _parameter(parameter: inspect.Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "kind": parameter.kind.name,
        "optional": parameter.default is not inspect.Parameter.empty,
    }


def vllm_interface() -> dict[str, Interface]:
    """Return the interface of the installed vLLM's base class and of SupportsHMA."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    classes = (base.KVConnectorBase_V1, base.SupportsHMA)
    return {cls.__name__: interface_of(cls) for cls in classes}


def misfits(base: Interface, ours: Interface) -> list[str]:
    """Return why objects with interface ``ours`` cannot be called as ``base`` says."""
    found: list[str] = []
    for name, theirs in base.items():
        mine = ours.get(name)
        if mine is None:
            found.append(f"{name} is missing")
        elif mine["abstract"]:
            found.append(f"{name} is still abstract")
        elif (mine["kind"], theirs["kind"]).count("property") == 1:
            found.append(f"{name} is a {mine['kind']}, vLLM has a {theirs['kind']}")
        elif theirs["kind"] == "classmethod" != mine["kind"]:
            found.append(f"{name} is no classmethod")
        elif "parameters" in theirs:
            found += [f"{name}: {why}" for why in _mismatches(theirs, mine)]
    return found


def _mismatches(theirs: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    """A caller passes vLLM's parameters, by position or by name: each must be taken."""
    kinds = {p["kind"] for p in mine["parameters"]}
    # A wrapper's (*args, **kwargs) hands everything on; its __wrapped__ has been looked at.
    takes_all = {"VAR_POSITIONAL", "VAR_KEYWORD"} <= kinds
    if takes_all:
        return []
    fixed = [p for p in mine["parameters"] if not p["kind"].startswith("VAR_")]
    wanted = [p for p in theirs["parameters"] if not p["kind"].startswith("VAR_")]
    found: list[str] = []
    for position, parameter in enumerate(wanted):
        if position >= len(fixed):
            found.append(f"takes no {parameter['name']}")
        elif fixed[position]["name"] != parameter["name"]:
            found.append(f"{fixed[position]['name']} stands where vLLM has {parameter['name']}")
        elif parameter["optional"] and not fixed[position]["optional"]:
            found.append(f"{parameter['name']} has no default")
    extra = [p["name"] for p in fixed[len(wanted) :] if not p["optional"]]
    found += [f"demands {name}, which vLLM does not pass" for name in extra]
    kinds_wanted = {p["kind"] for p in theirs["parameters"] if p["kind"].startswith("VAR_")}
    return found + [f"takes no {kind}" for kind in sorted(kinds_wanted - kinds)]


if __name__ == "__main__":
    json.dump(vllm_interface(), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")

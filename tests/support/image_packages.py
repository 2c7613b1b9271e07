"""What images/constraints.txt lists, and what packages say of themselves."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass

from support.sources import ROOT

CONSTRAINTS = ROOT / "images" / "constraints.txt"
MOONCAKE = "# With the extra mooncake also"
_CLASSIFIERS = {"MIT License": "MIT", "Apache Software License": "Apache-2.0"}
_SPELLINGS = {"Apache 2.0": "Apache-2.0", "3-Clause BSD License": "BSD-3-Clause"}


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of the list."""

    name: str
    version: str
    license: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}  # {self.license}"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def listed(*, mooncake: bool) -> Mapping[str, Listed]:
    """Return the packages of the image, or of its variant with Mooncake, by canonical name."""
    text = CONSTRAINTS.read_text()
    own, found, further = text.partition(MOONCAKE)
    assert found
    lines = (own + further if mooncake else own).splitlines()
    rows = [re.fullmatch(r"([\w.-]+)==(\S+)  # (.+)", line) for line in lines if "==" in line]
    assert None not in rows
    made = [Listed(*row.groups()) for row in rows if row is not None]
    return {canonical(one.name): one for one in made}


def license_of(package: importlib.metadata.Distribution) -> str:
    """Return the SPDX expression that a package states, in one of three places."""
    facts = package.metadata
    stated = str(facts.get("License-Expression") or facts.get("License") or "")
    if stated and "\n" not in stated:
        return _SPELLINGS.get(stated, stated)
    named = [one.rpartition(" :: ")[2] for one in facts.get_all("Classifier") or []]
    (found,) = [_CLASSIFIERS[one] for one in named if one in _CLASSIFIERS]
    return found

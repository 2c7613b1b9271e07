"""Kubernetes quantities, as the API server reads them."""

from __future__ import annotations

import re

QUANTITY = re.compile(r"([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{letter}i": 1 << 10 * power for power, letter in enumerate("KMGT", 1)
}


def mebibytes(text: str) -> float:
    """Return a whole quantity of bytes in MiB. Raises AssertionError for what is none."""
    found = re.fullmatch(r"([0-9]+)([A-Za-z]*)", text)
    assert found, text
    assert found[2] in _FACTORS, text
    return int(found[1]) * _FACTORS[found[2]] / (1 << 20)

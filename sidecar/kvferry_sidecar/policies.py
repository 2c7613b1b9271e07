"""Rules per namespace: how much of the pool it may have, and how long its objects live.

``namespaces.rules`` is text, so that one setting carries any number of them: ``tenant=red
bytes=20% ttl_s=3600; any bytes=8GiB``. The first rule that fits a namespace counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry_sidecar import settings
from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.settings import Setting

KEY = "namespaces.rules"
_SUBJECTS = ("any", "tenant", "model", "namespace")
_REMEDY = (
    "write WHO and what it gets, rules separated by ';': any, tenant=NAME, model=NAME or "
    "namespace=HEX, then bytes=SIZE or bytes=PERCENT% and ttl_s=SECONDS"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. 0 of a bound: none. At most one of ``quota_bytes`` and ``percent`` is given."""

    subject: str
    value: str = ""
    quota_bytes: int = 0
    percent: int = 0
    ttl_s: int = 0

    def fits(self, namespace: bytes, facts: Mapping[str, str]) -> bool:
        """Whether it is for this namespace, whose engines have said these facts."""
        if self.subject == "any":
            return True
        if self.subject == "namespace":
            return namespace.hex().startswith(self.value)
        return facts.get(self.subject) == self.value


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one namespace gets; 0: no bound."""

    quota_bytes: int = 0
    ttl_s: int = 0


UNBOUNDED = Bounds()


def parse(text: str, origin: str = "namespaces.rules") -> tuple[Rule, ...]:
    """Return the rules in their order. Raises ConfigError."""
    return tuple(_rule(one.strip(), origin) for one in text.split(";") if one.strip())


def bounds_of(
    rules: tuple[Rule, ...], namespace: bytes, facts: Mapping[str, str], pool_bytes: int
) -> Bounds:
    """Return what the first rule that fits gives a namespace."""
    for rule in rules:
        if rule.fits(namespace, facts):
            share = pool_bytes * rule.percent // 100
            return Bounds(rule.quota_bytes or share, rule.ttl_s)
    return UNBOUNDED


def _rule(text: str, origin: str) -> Rule:
    who, *gets = text.split()
    subject, _, value = who.partition("=")
    if subject not in _SUBJECTS or bool(value) == (subject == "any"):
        raise _wrong(text, origin, f"{who!r} is nobody that a rule can be for")
    if subject == "namespace" and set(value.lower()) - set("0123456789abcdef"):
        raise _wrong(text, origin, f"{value!r} is no hexadecimal number")
    found = {"quota_bytes": 0, "percent": 0, "ttl_s": 0}
    for one in gets:
        name, _, amount = one.partition("=")
        if name == "bytes" and amount.endswith("%"):
            name, least, most = "percent", 1, 100
            number = int(amount[:-1]) if amount[:-1].isdecimal() else 0
        elif name == "bytes":
            name, least, most = "quota_bytes", 4096, 1 << 62
            number = int(str(settings.parse("namespaces.bytes", int, Setting(amount, origin))))
        elif name == "ttl_s":
            least, most = 1, 1 << 31
            number = int(amount) if amount.isdecimal() else 0
        else:
            raise _wrong(text, origin, f"{one!r} is nothing that a rule gives")
        if not least <= number <= most:
            raise _wrong(text, origin, f"{one!r} is out of range")
        found[name] = number
    if not any(found.values()) or (found["quota_bytes"] and found["percent"]):
        raise _wrong(text, origin, "it gives nothing, or bytes twice")
    return Rule(subject, value.lower() if subject == "namespace" else value, **found)


def _wrong(text: str, origin: str, why: str) -> ConfigError:
    return ConfigError(f"{KEY} ({origin}): {text!r}: {why}", _REMEDY)

"""The fault kit of a real sidecar, from a test: rules in force, and what they have done."""

from __future__ import annotations

from pathlib import Path

import msgspec
from kvferry_sidecar.cli.api import Api
from kvferry_sidecar.faults.rules import RuleView
from support.waiting import wait_until

ENABLED = ("--set", "faults.enabled=true")


class Kit:
    """``kvferry faults`` of one sidecar."""

    def __init__(self, run_dir: Path) -> None:
        self._api = Api(run_dir)

    def rules(self, *rules: str) -> None:
        """Put these rules in force instead of those before; what those held goes on."""
        self._api.act("faults", rules="; ".join(rules))

    def view(self, rule: str = "") -> RuleView:
        """Return the (first) rule in force that begins so."""
        found = msgspec.convert(self._api.act("faults")["rules"], list[RuleView])
        return next(one for one in found if one.rule.startswith(rule))

    def wait_fired(self, rule: str = "", times: int = 1) -> None:
        """Wait until the rule has acted so often."""
        wait_until(lambda: self.view(rule).fired >= times, f"{rule or 'the rule'} has fired")

    def wait_met(self, rule: str = "", times: int = 1) -> None:
        """Wait until the rule's target went by so often, whether it acted or not."""
        wait_until(lambda: self.view(rule).met >= times, f"{rule or 'the rule'} was met")

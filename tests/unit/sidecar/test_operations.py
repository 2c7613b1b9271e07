"""docs/operations.md names everything an operator can meet: reasons, exit codes, status fields."""

from __future__ import annotations

import dataclasses

import pytest
from kvferry_sidecar.errors import ExitCode
from kvferry_sidecar.observe.reading import LoopView
from kvferry_sidecar.observe.status import Document, HalfStatus, PoolStatus, SessionStatus
from kvferry_sidecar.outcomes.ledger import Totals
from kvferry_sidecar.outcomes.reasons import EXPLANATIONS, Reason
from kvferry_sidecar.stages.snapshot import PipelineSnapshot
from support.sources import ROOT

TEXT = (ROOT / "docs" / "operations.md").read_text()
STRUCTS = (Document, SessionStatus, HalfStatus, PoolStatus, PipelineSnapshot, Totals)
FIELDS = {name for struct in STRUCTS for name in struct.__struct_fields__}
FIELDS |= {field.name for field in dataclasses.fields(LoopView)}


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason])
def test_every_reason_stands_there_as_the_code_explains_it(reason):
    meaning, remedy = EXPLANATIONS[reason]
    assert f"| `{reason}` | {meaning} | {remedy} |" in TEXT


def test_no_reason_is_made_up():
    table = TEXT.partition("## Reasons")[2].partition("\n## ")[0]
    named = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert named == [str(reason) for reason in Reason if reason]


def test_every_status_field_is_explained():
    table = TEXT.partition("## kvferry status")[2].partition("\n## ")[0]
    missing = {name for name in FIELDS if f"`{name}`" not in table and f"`{name}[]`" not in table}
    assert not missing


def test_every_exit_code_is_listed():
    table = TEXT.partition("## Exit codes")[2].partition("\n## ")[0]
    codes = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert codes[1:] == [str(int(code)) for code in ExitCode]

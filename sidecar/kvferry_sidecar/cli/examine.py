"""`kvferry doctor`: the report for people, or as JSON."""

from __future__ import annotations

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvferry_sidecar.cli import query, render
from kvferry_sidecar.config import Config
from kvferry_sidecar.doctor import report
from kvferry_sidecar.doctor.engines import check_engines
from kvferry_sidecar.doctor.finding import Finding, Verdict, warn
from kvferry_sidecar.errors import NoSidecarError, ProtocolError
from kvferry_sidecar.observe import status

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "cyan", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


def run(config: Config, as_json: bool) -> int:
    """Examine, print, and return the exit code."""
    findings = [*report.examine(config), *_engines(config)]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        render.console().print(_table(findings))
    return report.exit_code(findings)


def _engines(config: Config) -> list[Finding]:
    """Ask the sidecar that runs here, if one does."""
    try:
        return check_engines(status.read(query.ask_status(config.run_dir)))
    except NoSidecarError:
        return []
    except (ProtocolError, msgspec.DecodeError) as error:
        return [warn("engines", str(error), "use the kvferry command of the sidecar's version")]


def _table(findings: list[Finding]) -> RenderableType:
    table = Table("", "check", "what was found", box=None, header_style="bold", pad_edge=False)
    for one in findings:
        verdict = Text(str(one.verdict), style=_STYLES[one.verdict])
        text = f"{one.text}\nremedy: {one.remedy}" if one.remedy else one.text
        table.add_row(verdict, one.check, text)
    return table

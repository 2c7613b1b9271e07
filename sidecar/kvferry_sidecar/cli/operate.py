"""The commands that ask or change a running sidecar: explain, act."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from kvferry_sidecar.cli import options
from kvferry_sidecar.cli.api import Api
from kvferry_sidecar.errors import ExitCode
from kvferry_sidecar.faults.rules import RuleView
from kvferry_sidecar.observe.verdicts import RecordView
from kvferry_sidecar.settings import size_text

_DIGITS_MAX = 18  # of a number that is one in JSON, whoever reads it


class _Seconds(click.FloatRange):
    """A range that NaN is not in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is no number", param, ctx)
        return found


@click.command()
@options.config_file
@options.setting_flags("run_dir")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
@click.argument("request")
def explain(
    file: Path | None, assignments: tuple[str, ...], as_json: bool, request: str, **values: object
) -> int:
    """Say why REQUEST hit what it hit: a request id of vLLM, or the beginning of one."""
    api = Api(options.load(file, values, assignments).config.run_dir)
    found: list[RecordView] = api.get(f"requests/{request}", list[RecordView])
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print("\n\n".join(_story(one) for one in found))
    return ExitCode.OK


@click.command()
@options.config_file
@options.setting_flags("run_dir")
@click.option(
    "--interval",
    default=1.0,
    type=_Seconds(0.1, 60.0),
    show_default=True,
    help="Seconds between two looks.",
)
def top(file: Path | None, assignments: tuple[str, ...], interval: float, **values: object) -> int:
    """Show the sidecar at a glance, again and again; q quits."""
    from kvferry_sidecar.cli import top as screens  # noqa: PLC0415 - rich, for this command only

    return screens.run(options.load(file, values, assignments).config.run_dir, interval)


@click.command()
@options.config_file
@options.setting_flags("run_dir")
@click.option("--dry-run", is_flag=True, help="Only say what it would do.")
@click.argument("action")
@click.argument("parameters", nargs=-1, metavar="[NAME=VALUE]...")
def act(
    file: Path | None,
    assignments: tuple[str, ...],
    dry_run: bool,
    action: str,
    parameters: tuple[str, ...],
    **values: object,
) -> int:
    """Have the sidecar carry out ACTION.

    drain; clear-pool; release-stale [idle_s=5]; log-level level=debug; reload; pause-saves;
    resume-saves; flush; evict to_percent=60.
    """
    api = Api(options.load(file, values, assignments).config.run_dir)
    given = dict(options.pair(text, "NAME=VALUE") for text in parameters)
    did = api.act(action, dry_run=dry_run, **{name: _plain(text) for name, text in given.items()})
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(did), indent=2).decode() + "\n")
    return ExitCode.FAILED if "error" in did else ExitCode.OK


def _plain(text: str) -> int | float | str:
    """Return a parameter as the number that it is, or as it stands."""
    if text.isdecimal() and len(text) <= _DIGITS_MAX:
        return int(text)
    return float(text) if text.replace(".", "", 1).isdecimal() else text


@click.command(hidden=True)
@options.config_file
@options.setting_flags("run_dir")
@click.option("--clear", is_flag=True, help="Remove all rules; what they hold goes on.")
@click.argument("rules", nargs=-1, metavar="[RULE]...")
def faults(
    file: Path | None,
    assignments: tuple[str, ...],
    clear: bool,
    rules: tuple[str, ...],
    **values: object,
) -> int:
    """Put RULEs in force instead of those before, and list what is in force (docs/faults.md).

    A rule is "ACTION TARGET [times=N] [skip=N] [chance=P] [ms=N]"; only a sidecar that was started
    with faults.enabled takes them.
    """
    api = Api(options.load(file, values, assignments).config.run_dir)
    given = {"rules": "; ".join(rules)} if rules or clear else {}
    for one in msgspec.convert(api.act("faults", **given)["rules"], list[RuleView]):
        held = f", {one.held} held" if one.held else ""
        print(f"{one.rule}: met {one.met}, fired {one.fired}{held}")
    return ExitCode.OK


def _story(one: RecordView) -> str:
    """Return one admission for people."""
    lines = [
        f"request {one.request} of {one.engine}, admission {one.admission}, {_age(one.age_s)} ago",
        f"  {one.verdict}",
    ]
    if one.remedy and one.remedy != "nothing to do":
        lines.append(f"  remedy: {one.remedy}")
    lines.append(f"  prompt {one.prompt_tokens:,} tokens")
    for event in one.timeline:
        facts = [f"{event.tokens:,} tokens"] if event.tokens else []
        facts += [size_text(event.moved_bytes)] if event.moved_bytes else []
        facts += [f"{event.seconds * 1e3:.2f} ms"] if event.seconds else []
        facts += [event.detail] if event.detail else []
        lines.append(f"  {event.after_s * 1e3:10.2f} ms  {event.what:<12} {', '.join(facts)}")
    if one.jobs_lost:
        lines.append(f"  and {one.jobs_lost} more jobs")
    return "\n".join(lines).rstrip()


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

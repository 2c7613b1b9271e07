"""Commands, files, make targets and settings that a document names are there under that name.

Examples of a configuration are read as one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
import yaml
from kvferry_connector.config import FerryConfig
from kvferry_sidecar import cli, config
from kvferry_sidecar.cli.commands import kvferry
from support.sources import DOCUMENTS, ROOT

FENCED = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
TOML = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?<![\w./-])kvferry +([a-z].*)")
TARGET = re.compile(r"^make ([a-z-]+)")
FILE = re.compile(r"[\w./*-]+\.(?:py|pyi|cpp|h|inc|c|md|svg|toml|yaml|tpl)")
SETTING = re.compile(r"([a-z]\w*(?:\.\w+)+)(?:[ =:].*)?")
FOLDERS = ("connector", "sidecar", "native", "demo", "bench", "tests", "docs", "helm", "images")


def phrases(text: str) -> Iterator[str]:
    """Yield the code of a document: each line of its blocks, each span of its prose."""
    for block in FENCED.findall(text):
        yield from block.splitlines()
    for span in SPAN.findall(FENCED.sub("", text)):
        yield " ".join(span.split())


def wrong_command(words: list[str]) -> str:
    """Return what of ``kvferry WORDS`` the command line does not have, or nothing."""
    at: click.Command = kvferry
    while isinstance(at, click.Group):
        if not words:
            return ""
        word, *words = words
        if word not in at.commands:
            return word
        at = at.commands[word]
    known = {name for one in at.params for name in (*one.opts, *one.secondary_opts)}
    flags = (word.partition("=")[0] for word in words if word.startswith("--"))
    return next((flag for flag in flags if flag not in known), "")


@cache
def files() -> tuple[str, ...]:
    """Return the paths of ours that a document may name, each behind a slash."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return tuple(f"/{path.relative_to(ROOT)}" for path in (*ROOT.iterdir(), *found))


def wrong_file(name: str) -> bool:
    """Whether no file of ours ends in this name, in which ``*`` stands for any word."""
    pattern = re.compile(".*/" + re.escape(name).replace(r"\*", "[^/]*"))
    return not any(pattern.fullmatch(path) for path in files())


def _nested(values: object, before: str = "") -> Iterator[str]:
    for key, value in values.items() if isinstance(values, dict) else ():
        yield before + key
        yield from _nested(value, f"{before}{key}.")


@cache
def settings() -> frozenset[str]:
    """Return every key of the sidecar and of the chart, and what stands before a dot in one."""
    chart = set(_nested(yaml.safe_load((ROOT / "helm/kvferry/values.yaml").read_text())))
    chart |= {f"connector.config.{name}" for name in FerryConfig.__struct_fields__}
    keys = {*config.KNOWN, *(f"sidecar.config.{key}" for key in config.KNOWN)}
    for key in tuple(keys):
        parts = key.split(".")
        keys |= {".".join(parts[:count]) for count in range(1, len(parts))}
    return frozenset(chart | keys)


def wrong_setting(name: str) -> bool:
    return name.partition(".")[0] in settings() and name not in settings()


def misnamed(text: str) -> list[str]:
    """Return the phrases of a document that name what is not there."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = []
    for phrase in phrases(text):
        command, target = COMMAND.search(phrase), TARGET.match(phrase.strip())
        file, setting = FILE.fullmatch(phrase.partition(":")[0]), SETTING.fullmatch(phrase)
        if (
            (command and wrong_command(shlex.split(command[1], comments=True)))
            or (target and target[1] not in targets)
            or (file and wrong_file(file[0]))
            or (setting and not file and wrong_setting(setting[1]))
        ):
            found.append(phrase)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_it_names_is_there(document: Path) -> None:
    assert misnamed(document.read_text()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "kvferry explian REQUEST",
        "kvferry objects evict --percent 60",
        "kvferry config look",
        "make tests",
        "stages/load.py",
        "test_cudas*.py: a case",
        "tiers.host.byte",
        "limits.lease_max = 7",
        "engine.node",
        "sidecar.config.limits.leases",
        "connector.config.tenants",
    ],
)
def test_the_rules_can_fail(wrong: str) -> None:
    assert misnamed(f"see `{wrong}`, and `kvferry warm FILE`") == [wrong]
    assert misnamed(f"```\n{wrong}\n```") == [wrong]


def test_examples_of_a_configuration_have_no_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = [block for one in DOCUMENTS for block in TOML.findall(one.read_text())]
    assert len(examples) > 5
    file = tmp_path / "kvferry.toml"
    for example in examples:
        file.write_text(example)
        assert cli.main(["config", "check", str(file)]) == 0, example + capsys.readouterr().err
    file.write_text(examples[0].replace("bytes", "byte"))
    assert cli.main(["config", "check", str(file)]) == 2

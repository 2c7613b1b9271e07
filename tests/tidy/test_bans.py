"""Calls and words that have no place here, and the rule that every exception has a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from support.sources import ROOT, Source, python_files, text_files

# dotted name or module: where it is allowed (prefixes of paths)
BANNED: dict[str, tuple[str, ...]] = {
    # Unpickling runs code: nothing on a socket or a disk may be read that way.
    "pickle": (),
    "cPickle": (),
    "marshal": (),
    "eval": (),
    "exec": (),
    "__import__": (),
    # One reader of the environment, so that every setting can be listed and checked.
    "os.environ": ("sidecar/kvferry_sidecar/config.py", "tests/"),
    "os.getenv": ("sidecar/kvferry_sidecar/config.py", "tests/"),
    # A forked child keeps locks, sockets and pidfds alive: never fork without exec.
    "os.fork": ("tests/",),
    "print": (
        "sidecar/kvferry_sidecar/cli/",
        "demo/",
        "bench/",
        "tests/",
    ),
}
# A stream that waits for another process hangs with it: the host polls its word, with a deadline.
GPU_WAITS = re.compile(
    r"""["'](cu(?:da)?(?:StreamWait|StreamBatchMemOp|LaunchHostFunc|Ipc\w*Event)\w*)"""
)
# Tests wait on conditions; only the helper that does so may sleep.
SLEEPERS = ("tests/support/waiting.py",)
REASON = re.compile(r"#\s*(?:noqa|type:\s*ignore|pragma: no cover)[^#]*?(?:\s+-\s+|\s+#\s+)\S")
IGNORE = re.compile(r"#\s*(?:noqa|type:\s*ignore)")
# Absolute paths of one machine, and words of how a text came about instead of what it says.
FOREIGN = re.compile(r"/root/|/home/\w|\bTODO\b|\bFIXME\b|\bXXX\b", re.I)
THIS_FILE = "tests/tidy/test_bans.py"


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` of a name or attribute chain, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of imports, calls and attribute chains."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.lineno, node.func.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)


def banned_uses(source: Source) -> list[str]:
    found = []
    for line, name in uses(source.tree()):
        for banned, allowed in BANNED.items():
            if (name == banned or name.startswith(f"{banned}.")) and not source.path.startswith(
                allowed
            ):
                found.append(f"{source.path}:{line} {name}")
        in_tests = source.path.startswith("tests/")
        if name == "time.sleep" and in_tests and source.path not in SLEEPERS:
            found.append(f"{source.path}:{line} {name}: wait on a condition instead")
    return found


def bare_excepts(source: Source) -> list[str]:
    return [
        f"{source.path}:{node.lineno}"
        for node in ast.walk(source.tree())
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def silent_ignores(source: Source) -> list[str]:
    return [
        f"{source.path}:{number}"
        for number, line in enumerate(source.lines, 1)
        if IGNORE.search(line) and not REASON.search(line)
    ]


def test_banned_calls() -> None:
    found = [place for source in python_files() for place in banned_uses(source)]
    assert not found, found


def test_no_bare_except() -> None:
    found = [place for source in python_files() for place in bare_excepts(source)]
    assert not found, found


def test_every_ignore_has_a_reason() -> None:
    found = [
        place
        for source in python_files()
        if source.path != THIS_FILE
        for place in silent_ignores(source)
    ]
    assert not found, f"write '# noqa: CODE - why' or '# type: ignore[code] # why': {found}"


def test_no_foreign_words() -> None:
    found = [
        f"{source.path}:{number} {match.group()}"
        for source in text_files()
        if source.path != THIS_FILE
        for number, line in enumerate(source.lines, 1)
        if (match := FOREIGN.search(line))
    ]
    assert not found, found


def gpu_waits(source: Source) -> list[str]:
    in_product = source.path.startswith(("connector/", "sidecar/", "native/"))
    return [
        f"{source.path}:{number} {match.group(1)}"
        for number, line in enumerate(source.lines if in_product else (), 1)
        if (match := GPU_WAITS.search(line))
    ]


def test_no_stream_waits_for_another_process() -> None:
    found = [place for source in text_files() for place in gpu_waits(source)]
    assert not found, found


@pytest.mark.parametrize(("call", "complaints"), [("cuStreamWaitValue64_v2", 1), ("cuMemAlloc", 0)])
def test_the_rule_of_streams_can_fail(call: str, complaints: int) -> None:
    line = f'driver("{call}", stream)'
    assert len(gpu_waits(Source("sidecar/made_up.py", line))) == complaints


def test_allowed_places_exist() -> None:
    """An allowance for a file that is gone would quietly allow a new one of that name."""
    places = [place for allowed in BANNED.values() for place in allowed if place.endswith(".py")]
    assert [place for place in places if not (ROOT / place).exists()] == []


@pytest.mark.parametrize(
    ("code", "complaints"),
    [
        ("import pickle", 1),
        ("from pickle import loads", 2),
        ("import os\nos.environ['A']", 1),
        ("from os import environ", 1),
        ("eval('1')", 1),
        ("self.evaluate()", 0),
        ("print('x')", 1),
    ],
)
def test_the_ban_can_fail(code: str, complaints: int) -> None:
    assert len(banned_uses(Source("connector/made_up.py", code))) == complaints


@pytest.mark.parametrize(
    ("line", "complaints"),
    [
        ("x = 1  # noqa: E501", 1),
        ("x = 1  # noqa: E501 - a table", 0),
        ("x = 1  # type: ignore[misc]", 1),
        ("x = 1  # type: ignore[misc] # untyped base", 0),
        ("x = 1  # type: ignore[misc] - untyped base", 0),
    ],
)
def test_the_reason_rule_can_fail(line: str, complaints: int) -> None:
    assert len(silent_ignores(Source("made_up.py", line))) == complaints

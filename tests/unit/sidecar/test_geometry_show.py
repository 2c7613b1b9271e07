"""`kvferry geometry show`: what two attached ranks registered, through the real command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvferry_connector.wire.attach import Group, Placement, Ready
from kvferry_sidecar.cli import main
from kvferry_sidecar.cli.questions import answer
from support.raw_half import KvMemory, RawHalf, engine_registration
from support.sidecar import running_sidecar

PAGE, BLOCKS, RANKS = 1024, 64, 2
LIFE = b"L" * 16
GROUPS = [
    Group(0, "full", 16, {"class": "full"}, ["a"]),
    Group(1, "mla", 16, {"class": "mla"}, ["b", "c"], tp_replicas=2),
    Group(2, "swa", 32, {"class": "swa"}, ["d"], window_tokens=40),
    Group(3, "ring", 8, {}, ["e"], cacheable=False),
]
PLACES = [
    Placement(group.group, group.layers, 0, 0, BLOCKS * PAGE, PAGE, PAGE) for group in GROUPS[:3]
]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A sidecar with an engine of two ranks."""
    memories = [KvMemory(BLOCKS, PAGE, layers=2) for _ in range(RANKS)]
    with running_sidecar() as sidecar:
        halves = [RawHalf(sidecar.run_dir)]
        halves += [RawHalf(sidecar.run_dir, n, memory=one) for n, one in enumerate(memories)]
        for half in halves:
            half.attach()
        shared = {"scheduler_block_tokens": 32, "alignment_tokens": 32, "retention_tokens": 64}
        halves[0].register(engine_registration(range(RANKS), LIFE, **shared))
        for rank, memory in enumerate(memories):
            registration = memory.registration(rank, RANKS, groups=GROUPS, placements=PLACES)
            halves[1 + rank].register(registration)
        for half in halves:
            half.stream.expect(Ready)
        yield sidecar.run_dir
        for half in halves:
            half.leave()
    for memory in memories:
        memory.close()


def test_a_registered_geometry_is_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--run-dir", str(run_dir)]
    assert main(["geometry", "show", "--json", *flags]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    shown = json.loads(line)
    assert (shown["sessions"], shown["ranks"]) == (["raw/one"], [0, 1])
    groups = shown["geometry"]["groups"]
    assert [(one["shards"], one["stored_bytes"], one["held_bytes"]) for one in groups] == [
        (2, 2 * PAGE, 2 * PAGE),
        (1, 2 * PAGE, 4 * PAGE),
        (2, 2 * PAGE, 2 * PAGE),
        (0, 0, 0),
    ]
    assert [one["save_rule"] for one in groups] == ["all", "all", "held", "none"]
    assert [one["layers"] for one in groups] == [1, 2, 1, 1]

    assert main(["geometry", "show", shown["namespace"][:8], *flags]) == 0
    text = capsys.readouterr().out
    assert "states are kept every 64 tokens and where prompts end or part" in text
    row = next(line for line in text.splitlines() if " mla " in line)
    assert row.split() == ["1", "mla", "16", "-", "2", "2", "1", "2", "KiB", "4", "KiB", "all"]

    assert main(["geometry", "show", "beef", *flags]) == 1
    assert f"there are: {shown['namespace'][:12]}" in capsys.readouterr().err


def test_what_is_shown_can_be_asked(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["geometry", "show", "--json", "--run-dir", str(run_dir)]) == 0
    question = json.loads(capsys.readouterr().out)["question"]
    question["ask"] = {"op": "load", "length": 96}
    masks = json.loads(answer(json.dumps(question).encode(), 1 << 20))
    assert masks == {"load": [[True] * 6, [True] * 6, [False, True, True], []]}

"""`kvferry geometry eval`: a line in, a line out, whatever the line says."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from kvferry_sidecar import cli
from kvferry_sidecar.cli import geometry
from kvferry_sidecar.cli.questions import answer, chunks_max, tokens_max
from kvferry_sidecar.errors import ExitCode
from support.sources import ROOT

DOCS = ROOT / "docs" / "geometry.md"
MODEL = {
    "groups": [
        {"kind": "full", "block": 16},
        {"kind": "swa", "block": 16, "window": 40},
        {"kind": "mamba", "block": 32},
        {"kind": "ring", "block": 8, "cacheable": False},
    ],
    "hash_block": 16,
    "scheduler_block": 32,
    "alignment": 32,
    "partial": False,
    "retention": 0,
    "use_eagle": False,
}


def ask(question, **changes):
    line = json.dumps({**MODEL, **changes, "ask": question}).encode()
    return json.loads(answer(line, 1 << 20))


def indices(masks):
    return [[i for i, there in enumerate(mask) if there] for mask in masks]


def test_load():
    masks = ask({"op": "load", "length": 160})["load"]
    assert [len(mask) for mask in masks] == [10, 10, 5, 0]
    assert indices(masks) == [list(range(10)), [7, 8, 9], [4], []]


def test_store():
    question = {"op": "store", "tokens": 192, "prefill": 200, "shared_prefix": None}
    assert indices(ask(question)["store"]) == [list(range(12)), [9, 10, 11], [5], []]
    question["shared_prefix"] = 64
    assert indices(ask(question)["store"])[1:3] == [[1, 2, 3, 9, 10, 11], [1, 5]]
    assert indices(ask(question, retention=None)["store"])[2] == list(range(6))


def test_hit():
    present = {"0": list(range(16, 129, 16)), "1": [96, 112, 128], "2": [64, 128], "3": [8]}
    question = {"op": "hit", "max_length": 4096, "hashed": 4112, "present": present}
    assert ask(question) == {"hit": 128}
    assert ask(question | {"max_length": 127}) == {"hit": 0}
    assert ask(question | {"present": {}}) == {"hit": 0}


def test_a_hit_ends_where_the_hashes_end():
    local = [{"kind": "chunked", "block": 16, "chunk": 64}]
    sizes = {"groups": local, "hash_block": 16, "scheduler_block": 16, "alignment": 16}
    question = {"op": "hit", "max_length": 144, "hashed": 96, "present": {"0": [16, 32]}}
    # 64 needs nothing, 80 needs the chunk before it, and no hash tells what is past 96.
    assert ask(question, **sizes) == {"hit": 64}
    assert ask({**question, "present": {"0": [80, 96]}}, **sizes) == {"hit": 96}


def test_eagle_drops_a_block():
    groups = [
        {"kind": "full", "block": 16, "eagle": True},
        {"kind": "swa", "block": 16, "window": 9},
    ]
    sizes = {"groups": groups, "scheduler_block": 16, "alignment": 16, "use_eagle": True}
    ends = list(range(16, 65, 16))
    question = {"op": "hit", "max_length": 100, "hashed": 112, "present": {"0": ends, "1": ends}}
    assert ask(question, **sizes) == {"hit": 48}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"groups": []}, "no group is cacheable"),
        ({"groups": [{"kind": "sink", "block": 16}]}, "group 0: vLLM 0.32 cannot build"),
        ({"groups": [{"kind": "cross", "block": 16}]}, "cross-attention"),
        ({"groups": [{"kind": "hisparse", "block": 16}]}, "HiSparse"),
        ({"groups": [{"kind": "sparkle", "block": 16}]}, "'sparkle' is unknown"),
        ({"groups": [{"kind": "mamba", "block": 32, "mode": "none"}]}, "mode none"),
        ({"groups": [{"kind": "chunked", "block": 32, "chunk": 48}] * 2}, "chunk 48"),
        ({"pcp": 2}, "prefill context parallelism"),
        ({"retention": 33}, "retention 33"),
        ({"alignment": 16}, "needs partial hits"),
        ({"alignment": 64}, "the alignment is the scheduler block, 32, not 64"),
        ({"groups": [{"kind": "full", "block": 0}]}, "Expected `int` >= 1"),
        ({"groups": [{"kind": "full", "block": 16, "widow": 3}]}, "unknown field `widow`"),
        ({"use_eagle": "yes"}, "Expected `bool`"),
    ],
)
def test_refused_configurations_say_why(changes, reason):
    refused = ask({"op": "load", "length": 32}, **changes)
    assert list(refused) == ["refused"]
    assert reason in refused["refused"]


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"op": "guess"}, "guess"),
        ({"op": "load"}, "missing required field `length`"),
        ({"op": "load", "length": -1}, ">= 0"),
        ({"op": "load", "length": tokens_max + 1}, "<="),
        ({"op": "load", "length": 1e400}, "Number out of range"),
        ({"op": "hit", "max_length": 9, "hashed": 9, "present": {"4": [1]}}, "group '4'"),
        ({"op": "hit", "max_length": 9, "hashed": 9, "present": {"01": [1]}}, "group '01'"),
        ({"op": "hit", "max_length": 9, "hashed": 9, "present": {"1" * 5000: [1]}}, "are 0 to 3"),
        ({"op": "hit", "max_length": 9, "hashed": 9, "present": {"0": ["a"]}}, "Expected `int`"),
    ],
)
def test_refused_questions_say_why(question, reason):
    line = json.dumps({**MODEL, "ask": question}).replace("Infinity", "1e400").encode()
    assert reason in json.loads(answer(line, 1 << 20))["refused"]


def test_an_answer_has_a_bound():
    groups = [{"kind": "full", "block": 1}] * 2
    tiny = {"groups": groups, "hash_block": 1, "scheduler_block": 1, "alignment": 1}
    whole = {"op": "hit", "max_length": 5, "hashed": tokens_max, "present": {}}
    for question in ({"op": "load", "length": tokens_max}, whole):
        assert f"more than {chunks_max} chunks" in ask(question, **tiny)["refused"]


def eval_lines(monkeypatch, capsys, data, *arguments):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    code = cli.main(("geometry", "eval", *arguments))
    out = capsys.readouterr().out
    return code, [json.loads(line) for line in out.splitlines()]


def test_a_bad_line_does_not_end_the_stream(monkeypatch, capsys):
    good = json.dumps({**MODEL, "ask": {"op": "load", "length": 32}}).encode()
    lines = [good, b"", b"{", b"[]", b'"\xff"', b"null", good]
    code, out = eval_lines(monkeypatch, capsys, b"\n".join(lines), "-")
    assert code == ExitCode.OK
    assert [list(line) for line in out] == [["load"], *[["refused"]] * 5, ["load"]]
    assert out[0] == out[-1]


def test_a_long_line_is_refused_whole(monkeypatch, capsys):
    good = json.dumps({**MODEL, "ask": {"op": "load", "length": 32}}).encode()
    monkeypatch.setattr(geometry, "line_bytes_max", len(good))
    for extra in (1, len(good), 3 * len(good) + 1):
        data = good + b"\n" + good + b" " * extra + b"\n" + good
        code, out = eval_lines(monkeypatch, capsys, data)
        assert code == ExitCode.OK
        assert [list(line) for line in out] == [["load"], ["refused"], ["load"]]
        assert "longer than" in out[1]["refused"]


def test_a_file_is_read_and_an_unreadable_one_is_an_error(tmp_path, capsys):
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({**MODEL, "ask": {"op": "load", "length": 0}}) + "\n")
    assert cli.main(("geometry", "eval", str(file))) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == {"load": [[], [], [], []]}
    for missing in (tmp_path / "none", tmp_path):
        assert cli.main(("geometry", "eval", str(missing))) == ExitCode.FAILED
        assert "remedy" in capsys.readouterr().err


def test_a_pipe_gets_each_answer_before_the_next_question():
    command = [Path(sys.executable).parent / "kvferry", "geometry", "eval"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for length in (32, 64):
            question = {**MODEL, "ask": {"op": "load", "length": length}}
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            assert len(json.loads(process.stdout.readline())["load"][0]) == length // 16
        process.stdin.close()
        assert process.wait(90) == ExitCode.OK


def test_the_examples_of_the_documentation_are_true():
    pairs = re.findall(r"```json\n(.+)\n```\n\n```json\n(.+)\n```", DOCS.read_text())
    assert len(pairs) >= 4
    for question, answered in pairs:
        assert json.loads(answer(question.encode(), 1 << 20)) == json.loads(answered)

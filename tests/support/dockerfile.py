"""A Dockerfile as a list of instructions: enough to run and to question our own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of one stage, with its continuation lines joined."""

    stage: str
    word: str
    rest: str


def read_dockerfile(file: Path) -> list[Instruction]:
    """Return the instructions in order. Comments and parser directives are left out."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    found: list[Instruction] = []
    stage = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if not word:
            continue
        if word == "FROM":
            stage = rest.rpartition(" AS ")[2]
        found.append(Instruction(stage, word, " ".join(rest.split())))
    return found

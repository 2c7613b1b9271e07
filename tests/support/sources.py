"""The project's own source files, as the tidy tests see them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("connector", "sidecar", "native", "demo", "bench", "tests")
CODE_SUFFIXES = frozenset({".py", ".pyi", ".cpp", ".h", ".inc"})
DOCUMENTS = (
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "tests" / "README.md",
    ROOT / "helm" / "kvferry" / "README.md",
)
TEXT_NAMES = ("Makefile", "CMakeLists.txt", "pyproject.toml", ".ci/run", ".gitignore")


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its path relative to the root, and its text."""

    path: str
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)


@cache
def code_files() -> tuple[Source, ...]:
    """Every Python and C++ file of ours."""
    found = (
        path
        for folder in SOURCE_FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in CODE_SUFFIXES and "__pycache__" not in path.parts
    )
    return tuple(Source(str(path.relative_to(ROOT)), path.read_text()) for path in found)


def python_files(*prefixes: str) -> Iterator[Source]:
    """Python files (stubs not) under these folders, or all of them."""
    for source in code_files():
        if source.path.endswith(".py") and (not prefixes or source.path.startswith(prefixes)):
            yield source


def text_files() -> Iterator[Source]:
    """All code, and the documents and build files beside it."""
    yield from code_files()
    named = [ROOT / name for name in TEXT_NAMES]
    for path in (*named, *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))):
        if path.is_file():
            yield Source(str(path.relative_to(ROOT)), path.read_text())

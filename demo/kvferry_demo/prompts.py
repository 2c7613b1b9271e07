"""Prompts cut from real text: the files of the repository, or of the installed packages.

Token ids are bytes shifted by a constant: no tokenizer is needed and any text is a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

FIRST_BYTE_TOKEN = 256  # above every special id of the tiny models
CORPUS_BYTES_MAX = 4 << 20
_FOLDERS = ("connector", "sidecar", "native", "demo", "docs", "tests")
_SUFFIXES = frozenset({".py", ".pyi", ".md", ".cpp", ".h", ".toml"})
_PACKAGES = ("kvferry_connector", "kvferry_sidecar", "kvferry_native", "kvferry_demo")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and how many of the first ones are shared with an earlier prompt."""

    name: str
    tokens: tuple[int, ...]
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Cut:
    """A prompt to be: its length, and the earlier prompt whose beginning it takes over."""

    name: str
    tokens: int
    shares: str = ""
    shared_tokens: int = 0


_CUTS = (
    _Cut("note", 500),
    _Cut("page", 1100),
    _Cut("section", 2000),
    _Cut("section, other end", 2300, shares="section", shared_tokens=1500),
    _Cut("chapter", 3600),
    _Cut("chapter, other end", 4100, shares="chapter", shared_tokens=2900),
    _Cut("book", 6000),
    _Cut("page, asked on", 900, shares="page", shared_tokens=640),
)
PROMPTS_MAX = len(_CUTS)


def encode(text: bytes) -> tuple[int, ...]:
    """Return one token id per byte of ``text``."""
    return tuple(byte + FIRST_BYTE_TOKEN for byte in text)


def cut_prompts(count: int = PROMPTS_MAX, corpus: bytes | None = None) -> list[Prompt]:
    """Return ``count`` prompts of 500 to 6,000 tokens; some begin like an earlier one.

    Raises ValueError when ``count`` is out of range or the text is shorter than the prompts.
    """
    if not 1 <= count <= PROMPTS_MAX:
        raise ValueError(f"{count} prompts: there are 1 to {PROMPTS_MAX}")
    text = read_corpus() if corpus is None else corpus
    cuts = _CUTS[:count]
    needed = sum(cut.tokens - cut.shared_tokens for cut in cuts)
    if len(text) < needed:
        raise ValueError(f"the text has {len(text)} bytes, the prompts need {needed}")
    # Equal gaps between the cuts spread them over all files.
    gap = (len(text) - needed) // len(cuts)
    prompts: dict[str, Prompt] = {}
    at = 0
    for cut in cuts:
        own = cut.tokens - cut.shared_tokens
        head = prompts[cut.shares].tokens[: cut.shared_tokens] if cut.shares else ()
        tokens = head + encode(text[at : at + own])
        prompts[cut.name] = Prompt(cut.name, tokens, cut.shared_tokens)
        at += own + gap
    return list(prompts.values())


def read_corpus() -> bytes:
    """Return the text the prompts are cut from, files in the order of their paths."""
    root = Path(__file__).resolve().parents[2]
    files = _repository_files(root) if (root / "pyproject.toml").is_file() else _package_files()
    parts: list[bytes] = []
    size = 0
    for file in files:
        parts.append(file.read_bytes())
        size += len(parts[-1])
        if size >= CORPUS_BYTES_MAX:
            break
    return b"\n".join(parts)


def _repository_files(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("*.md"))
    for folder in _FOLDERS:
        yield from _text_files(root / folder)


def _package_files() -> Iterator[Path]:
    """Yield the sources of the installed packages: text that every wheel brings along."""
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            yield from _text_files(Path(folder))


def _text_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES)

"""Every document that a reader is sent to is there, and so is the section."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.sources import DOCUMENTS, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def sections(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = HEADING.findall(FENCED.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def broken(document: Path, text: str) -> list[str]:
    """Return the links of a document's text that lead nowhere; others' pages are not looked up."""
    found = []
    for link in LINK.findall(FENCED.sub("", text)):
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if name.startswith(("http://", "https://")):
            continue
        if not target.exists() or (anchor and anchor not in sections(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert broken(document, document.read_text()) == []


def test_the_rule_can_fail() -> None:
    text = "[a](docs/tiers.md) [b](docs/no.md) [c](docs/operations.md#reasons) [d](#no-such-place)"
    assert broken(ROOT / "README.md", text) == ["docs/no.md", "#no-such-place"]


def test_the_front_page_has_what_a_newcomer_needs() -> None:
    text = (ROOT / "README.md").read_text()
    for words in ("images/architecture.svg", "make demo", "make test", "kv_connector_module_path"):
        assert words in text

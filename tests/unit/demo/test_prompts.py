"""Prompts: lengths, shared prefixes, determinism, and text without a repository."""

from __future__ import annotations

import pytest
from kvferry_demo import prompts
from kvferry_demo.models import CONTEXT_TOKENS, VOCABULARY


def test_prompts_are_what_the_demo_promises() -> None:
    cut = prompts.cut_prompts()
    assert 6 <= len(cut) <= 8
    assert min(len(one.tokens) for one in cut) == 500
    assert max(len(one.tokens) for one in cut) == 6000 < CONTEXT_TOKENS
    assert all(prompts.FIRST_BYTE_TOKEN <= t < VOCABULARY for one in cut for t in one.tokens)
    assert cut == prompts.cut_prompts()


def test_some_share_a_prefix_and_only_that() -> None:
    cut = prompts.cut_prompts()
    sharing = [one for one in cut if one.shared_tokens]
    assert len(sharing) >= 2
    for one in sharing:
        heads = [
            other
            for other in cut
            if other is not one
            and other.tokens[: one.shared_tokens] == one.tokens[: one.shared_tokens]
        ]
        assert heads, one.name
        assert all(other.tokens[:-1] != one.tokens[: len(other.tokens) - 1] for other in heads)


def test_distinct_texts() -> None:
    begins = [one.tokens[:400] for one in prompts.cut_prompts() if not one.shared_tokens]
    assert len(set(begins)) == len(begins)


def test_fewer_prompts_and_too_many() -> None:
    assert len(prompts.cut_prompts(2)) == 2
    for count in (0, prompts.PROMPTS_MAX + 1):
        with pytest.raises(ValueError, match="there are 1 to"):
            prompts.cut_prompts(count)


def test_too_little_text() -> None:
    with pytest.raises(ValueError, match="the prompts need"):
        prompts.cut_prompts(corpus=b"short")


def test_an_installed_wheel_has_text_enough() -> None:
    """Without a repository around it, the packages' own sources are the text."""
    text = b"\n".join(path.read_bytes() for path in prompts._package_files())
    assert len(prompts.cut_prompts(corpus=text)) == prompts.PROMPTS_MAX

"""A drafter's KV where prompts part at the end of a block, against vLLM's own prefix cache.

What a drafter holds of a token depends on the next one, which a block's hash does not cover: of
two prompts that part right behind a block, both that cache and this store keep the first one's.
Outputs do not depend on it; what is drafted may.
"""

from __future__ import annotations

import pytest
from kvferry_demo import protocol
from support.engine import BLOCK_TOKENS, EngineUnderTest, Texts, running_engine
from support.sidecar import running_sidecar

pytestmark = [pytest.mark.engine, pytest.mark.long]

SHARED = 5 * BLOCK_TOKENS
MODEL = "llama_eagle"


def run(engine: EngineUnderTest, prompts: list[list[int]]) -> list[protocol.Result]:
    return [engine.run(tokens, max_tokens=16) for tokens in prompts]


def test_what_forks_load_is_what_the_engines_own_cache_holds() -> None:
    texts = Texts()
    page = texts.take(1100)
    forks = [[*page[:SHARED], *texts.take(260)] for _ in range(2)]
    with running_engine(model=MODEL, kv_digests=True) as plain:
        _, *first = run(plain, [page, *forks])
        own = run(plain, forks)
    with running_sidecar() as sidecar:
        with running_engine(sidecar.run_dir, model=MODEL, kv_digests=True) as writer:
            run(writer, [page, *forks])
        with running_engine(sidecar.run_dir, model=MODEL, kv_digests=True) as reader:
            loaded = run(reader, forks)
        assert sidecar.wait_idle()["pipeline"]["ledger"]["failed"] == 0
    for computed, local, ours in zip(first, own, loaded, strict=True):
        assert ours.local_tokens + ours.hit_tokens == local.local_tokens > SHARED
        assert ours.hit_tokens > 0
        assert ours.kv_digest == local.kv_digest != ""
        assert ours.drafts == local.drafts
        assert ours.output == local.output == computed.output

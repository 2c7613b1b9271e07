"""A real MLA engine: what a new process loaded is, byte for byte, what the first one computed.

Its output may differ between a prompt computed at once and one computed behind a loaded prefix,
with any cache or none; the bytes of the prefix may not.
"""

from __future__ import annotations

import pytest
from support.engine import Texts, running_engine
from support.sidecar import running_sidecar

pytestmark = pytest.mark.engine

BLOCK = 16


def test_latent_vectors_arrive_byte_for_byte() -> None:
    texts = Texts()
    first = texts.take(700)
    prompts = [first, [*first[:400], *texts.take(200)]]
    with running_sidecar() as sidecar:
        with running_engine(sidecar.run_dir, model="deepseek_v3", kv_digests=True) as writer:
            cold = [writer.run(tokens) for tokens in prompts]
        with running_engine(sidecar.run_dir, model="deepseek_v3", kv_digests=True) as reader:
            warm = [reader.run(tokens) for tokens in prompts]
        books = sidecar.wait_idle()["pipeline"]["ledger"]
    assert books["failed"] == 0
    for tokens, one, two in zip(prompts, cold, warm, strict=True):
        assert two.local_tokens + two.hit_tokens == (len(tokens) - 1) // BLOCK * BLOCK
        assert one.kv_digest == two.kv_digest != ""
    assert cold[0].kv_digest != cold[1].kv_digest

"""Two nodes in network namespaces, a real engine on each: what one computes the other loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.elsewhere import started
from support.engine import BLOCK_TOKENS, Texts, hit_of, running_engine
from support.mooncake_master import MooncakeMaster
from support.net import two_nodes
from support.server import serving
from support.slow_tiers import wait_stored

pytestmark = [pytest.mark.engine, pytest.mark.long]

POOL_BYTES = 64 << 20


def test_what_one_node_computes_another_loads(tmp_path: Path) -> None:
    texts = Texts()
    segment = {"tiers__remote__segment_bytes": "128MiB", "pool_bytes": POOL_BYTES}
    with (
        two_nodes() as (here, there),
        serving(MooncakeMaster(tmp_path, here.address, here.prefix)) as master,
        started(master.url, prefix=here.prefix, **segment) as first,
        started(master.url, prefix=there.prefix, **segment) as second,
        running_engine(first.run_dir) as writer,
        running_engine(second.run_dir) as reader,
    ):
        objects = 0
        for count in (2000, 1300):
            tokens = texts.take(count)
            cold = writer.run(tokens)
            assert cold.hit_tokens == 0
            writer.settle()
            objects += count // BLOCK_TOKENS
            wait_stored(first, objects)
            warm = reader.run(tokens)
            assert warm.hit_tokens == hit_of(tokens)
            assert warm.output == cold.output
            reader.settle()
        hits = second.wait_idle()["pipeline"]["journal"]["hit_tokens"]
        assert list(hits) == ["external"], "nothing came from its own pool"
        assert first.wait_idle()["pipeline"]["journal"]["hit_tokens"] == {}

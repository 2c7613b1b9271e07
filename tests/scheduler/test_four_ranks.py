"""Four ranks in processes of their own under vLLM's real Scheduler, beside a real sidecar.

Every block that a step reads is compared byte by byte on every rank (support/four_ranks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.v1.kv_cache_interface as interface
from kvferry_sidecar.cli import main
from support.four_ranks import EngineOfRanks, engine_of_ranks
from support.sidecar import SidecarUnderTest, running_sidecar
from support.waiting import wait_until
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

RANKS, BLOCK = 4, 64
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float16)
MLA = MLAAttentionSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float16, max_tp_shards=1
)
INDEXER = replace(
    MLA, head_size=20, dtype=torch.uint8, cache_role=interface.SparseCacheRole.INDEXER
)
SWA = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float16, sliding_window=100
)
STATE = MambaSpec(
    block_size=BLOCK, shapes=((2, 8), (4, 4)), dtypes=(torch.float16, torch.float32),
    mamba_cache_mode="align", page_size_padded=FULL.page_size_bytes,
)  # fmt: skip
STATE_BYTES = 2 * 8 * 2 + 4 * 4 * 4  # the rest of its page is padding
PER_RANK = {"a": FULL, "b": FULL}
REPLICATED = {"a": MLA, "a.indexer": INDEXER, "b": MLA, "b.indexer": INDEXER}
CHUNK_BYTES = {"per rank": 2 * FULL.page_size_bytes,
               "replicated": 2 * (MLA.page_size_bytes + INDEXER.page_size_bytes)}  # fmt: skip
Start = Callable[..., AbstractContextManager[EngineOfRanks]]


@pytest.fixture
def sidecar() -> Iterator[SidecarUnderTest]:
    with running_sidecar() as one:
        yield one


@pytest.fixture
def engine(sidecar: SidecarUnderTest, tmp_path: Path) -> Start:
    return partial(engine_of_ranks, tmp_path, sidecar.run_dir)


def prompt(chunks: int) -> list[int]:
    """Whole chunks and one token more: a repeated prompt hits all of them."""
    return [3 + (7 * number) % 450 for number in range(chunks * BLOCK + 1)]


def moved(sidecar: SidecarUnderTest) -> tuple[int, int]:
    """Bytes saved and loaded so far; nothing failed."""
    books = sidecar.wait_idle()["pipeline"]["ledger"]
    assert books["failed"] == books["cancelled"] == 0, books
    return books["saved_bytes"], books["loaded_bytes"]


@pytest.mark.parametrize(
    ("name", "specs", "objects"), [("per rank", PER_RANK, 44), ("replicated", REPLICATED, 11)]
)
def test_eleven_chunks_are_44_objects_per_rank_and_11_replicated(
    sidecar: SidecarUnderTest, engine: Start, name: str, specs: dict[str, Any], objects: int
) -> None:
    """Stored bytes are those of so many shards; every rank has loaded all of its own."""
    size = CHUNK_BYTES[name]
    with engine(specs) as writer:
        assert writer.run("cold", prompt(11)) == 0
        assert moved(sidecar) == (objects * size, 0)
        (group,) = sidecar.status()["sessions"][0]["geometry"]["groups"]
        stored, held = group["stored_bytes"], group["held_bytes"]
        assert (stored, held) == (objects * size // 11, RANKS * size)
    assert sidecar.status()["pool"]["ready"] == 11, "one stripe per chunk"
    with engine(specs) as reader:
        assert reader.run("warm", prompt(11)) == 11 * BLOCK
        assert moved(sidecar) == (objects * size, RANKS * 11 * size)


def test_all_ranks_store_when_a_step_names_its_own_blocks_only(
    sidecar: SidecarUnderTest, engine: Start
) -> None:
    """An engine whose NewRequestData has this step's ids: tables come from the manager."""
    with engine(PER_RANK, batch=3 * BLOCK) as writer:
        shown = show_only_new_blocks(writer)
        writer.run("cold", prompt(11))
        assert shown == [3, 3, 3, 3]
    assert moved(sidecar) == (44 * CHUNK_BYTES["per rank"], 0)
    with engine(PER_RANK, batch=3 * BLOCK) as reader:
        show_only_new_blocks(reader)
        assert reader.run("warm", prompt(11)) == 11 * BLOCK
    assert moved(sidecar) == (44 * CHUNK_BYTES["per rank"],) * 2


def show_only_new_blocks(engine: EngineOfRanks) -> list[int]:
    """Have the connector see new requests with the blocks of this step only, as some vLLM do."""
    build, shown = engine.connector.build_connector_meta, []

    def build_connector_meta(output: Any) -> Any:
        for new in output.scheduled_new_reqs:
            count = -(-output.num_scheduled_tokens[new.req_id] // BLOCK)
            new.block_ids = tuple(ids[-count:] for ids in new.block_ids)
        steps = [output.num_scheduled_tokens[name] for name in output.num_scheduled_tokens]
        shown.extend(-(-count // BLOCK) for count in steps)
        return build(output)

    engine.connector.build_connector_meta = build_connector_meta
    return shown


@pytest.mark.parametrize(("name", "specs"), [("per rank", PER_RANK), ("replicated", REPLICATED)])
def test_five_draft_tokens_are_not_stored(
    sidecar: SidecarUnderTest, engine: Start, name: str, specs: dict[str, Any]
) -> None:
    """Eight chunks are confirmed: 32 objects per rank, 8 replicated, however many are drafted."""
    tokens, shards = prompt(7), RANKS if name == "per rank" else 1
    with engine(specs, draft_tokens=5) as writer:
        writer.run("cold", tokens, max_tokens=BLOCK + 20)
        assert moved(sidecar) == (shards * 8 * CHUNK_BYTES[name], 0)
        turn = [*tokens, *writer.output]
    assert sidecar.status()["pool"]["ready"] == 8
    with engine(specs, draft_tokens=5) as reader:
        assert reader.run("warm", turn) == 8 * BLOCK
        assert moved(sidecar) == (shards * 8 * CHUNK_BYTES[name], RANKS * 8 * CHUNK_BYTES[name])


@pytest.mark.parametrize("specs", [PER_RANK, REPLICATED], ids=["per rank", "replicated"])
def test_a_cold_request_of_15317_tokens_from_another_instance(
    sidecar: SidecarUnderTest, engine: Start, specs: dict[str, Any]
) -> None:
    tokens = [3 + (11 * number) % 449 for number in range(15_317)]
    with engine(specs, batch=4096, kv_bytes=8 << 20) as writer:
        writer.run("cold", tokens)
    with engine(specs, batch=4096, kv_bytes=8 << 20) as reader:
        assert reader.run("warm", tokens) == 15_317 // BLOCK * BLOCK
    saved, loaded = moved(sidecar)
    assert loaded == saved * (1 if specs is PER_RANK else RANKS) > 0


@pytest.mark.parametrize(
    ("retention", "hit"), [("engine", 0), ("dense", 7), (str(4 * BLOCK - 10), 4)]
)
def test_denser_retention_hits_inside_a_long_prompt(
    tmp_path: Path, retention: str, hit: int
) -> None:
    """vLLM keeps the end of a prompt only; the sidecar may keep more, and loads stay exact."""
    specs = {"a": FULL, "b": SWA}
    tokens, shared = prompt(12), 7 * BLOCK + 5
    other = [*tokens[:shared], *(token + 1 for token in tokens[shared:])]
    with running_sidecar(flags=("--retention", retention)) as sidecar:
        start = partial(engine_of_ranks, tmp_path, sidecar.run_dir, specs, ranks=2)
        with start() as writer:
            writer.run("cold", tokens)
        with start() as reader:
            assert reader.run("warm", other) == hit * BLOCK
            moved(sidecar)


@pytest.mark.parametrize("specs", [PER_RANK, REPLICATED], ids=["per rank", "replicated"])
def test_ranks_that_share_a_block_s_tokens_each_keep_their_own(
    sidecar: SidecarUnderTest, engine: Start, specs: dict[str, Any]
) -> None:
    """Decode context parallel: a chunk has the tokens of two blocks, and no rank is a replica."""
    with engine(specs, ranks=2, dcp=2) as writer:
        writer.run("cold", prompt(9))
    assert sidecar.status()["pool"]["ready"] == 4, "of 9 blocks of tokens, one chunk in two"
    with engine(specs, ranks=2, dcp=2) as reader:
        assert reader.run("warm", prompt(9)) == 4 * 2 * BLOCK
        size = CHUNK_BYTES["per rank" if specs is PER_RANK else "replicated"]
        assert moved(sidecar) == (2 * 4 * size, 2 * 4 * size)
    with engine(specs, ranks=2) as other:
        assert other.run("warm", prompt(9)) == 0, "other tokens in the same blocks"


@pytest.mark.parametrize(("attention", "ranks"), [(FULL, 2), (MLA, 4)], ids=["full", "mla"])
def test_states_beside_attention_whose_tokens_ranks_share(
    sidecar: SidecarUnderTest, engine: Start, attention: Any, ranks: int
) -> None:
    """Attention's blocks hold twice the tokens of a state's, so the hit ends inside one."""
    specs, tokens = {"a": attention, "m": STATE}, prompt(9)
    with engine(specs, ranks=ranks, dcp=2) as writer:
        writer.run("cold", tokens)
    size = 5 * attention.page_size_bytes + STATE_BYTES
    assert moved(sidecar) == (ranks * size, 0), "four chunks and a tail, one state"
    with engine(specs, ranks=ranks, dcp=2) as reader:
        assert reader.run("warm", tokens, max_tokens=2 * BLOCK) == 9 * BLOCK
        assert moved(sidecar)[1] == ranks * size
        assert reader.compared[1] >= ranks, "the state was there when the request went on from it"


def test_without_the_hybrid_manager_windows_are_kept_as_full_attention(
    sidecar: SidecarUnderTest, engine: Start
) -> None:
    """One group, every chunk stored and loaded; a hybrid engine shares nothing with it."""
    specs = {"a": FULL, "b": SWA}
    with engine(specs, ranks=2, hybrid=False) as writer:
        writer.run("cold", prompt(6))
        moved(sidecar)
        (group,) = sidecar.status()["sessions"][0]["geometry"]["groups"]
        assert (group["kind"], group["layers"], group["window_tokens"]) == ("full", 2, 0)
    assert sidecar.status()["pool"]["ready"] == 6
    with engine(specs, ranks=2, hybrid=False) as reader:
        other = [*prompt(4), *prompt(2)]
        assert reader.run("warm", other) == 4 * BLOCK, "also inside a prompt"
    with engine(specs, ranks=2) as hybrid:
        assert hybrid.run("warm", prompt(6)) == 0


def test_kv_events_of_the_store(sidecar: SidecarUnderTest, engine: Start) -> None:
    """Stored once per chunk and group, when all ranks have; removed when the pool is cleared."""
    specs = {"a": FULL, "b": SWA}
    with engine(specs, ranks=2, kv_events=True) as writer:
        writer.run("cold", prompt(5))
        wait_until(lambda: chunks_told(writer, BlockStored) == {0: 5, 1: 2}, "saves are told")
        for event in writer.events:
            assert (event.medium, event.locality) == ("CPU", "LOCAL")
        assert main(["act", "clear-pool", "--run-dir", str(sidecar.run_dir)]) == 0
        wait_until(lambda: chunks_told(writer, BlockRemoved) == {0: 5, 1: 2}, "removals are told")
        told = {kind: names_told(writer, kind) for kind in (BlockStored, BlockRemoved)}
        assert told[BlockStored] == told[BlockRemoved]
    with engine(specs, ranks=2) as silent:
        silent.run("other", prompt(5))
        assert silent.events == []


def chunks_told(engine: EngineOfRanks, kind: type) -> dict[int, int]:
    engine.step()
    return {group: len(names) for group, names in names_told(engine, kind).items()}


def names_told(engine: EngineOfRanks, kind: type) -> dict[int, set[bytes]]:
    told: dict[int, set[bytes]] = {}
    for event in engine.events:
        if isinstance(event, kind):
            names = told.setdefault(event.group_idx, set())
            assert names.isdisjoint(event.block_hashes), "told once"
            names.update(event.block_hashes)
    return told

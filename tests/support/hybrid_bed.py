"""Saves and loads of several kinds of groups through the pipeline, with tables as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry_connector.wire.hot import (
    HandOff,
    LoadJob,
    Outcome,
    OutcomeAck,
    Probe,
    Release,
    SaveJob,
    TableSlice,
)
from kvferry_sidecar.masks.kinds import Kind
from kvferry_sidecar.masks.load import load_mask, skipped_tokens
from kvferry_sidecar.masks.rules import Rules
from kvferry_sidecar.masks.store import kept_boundaries, kept_chunks
from kvferry_sidecar.sessions.rules import rules_of
from support.pipeline_bed import BLOCK, HASH_BYTES, Bed, Engine, chain, make_engine, table, value_of

LOADED = 500  # the block id of chunk 0 in a load; a save's chunk i is in block i + 1
SCRATCH = 900  # of the first scratch block


def bed_and_engine(kinds: Sequence[dict[str, Any]], **options: Any) -> tuple[Bed, Engine]:
    return Bed(slots=256), make_engine(kinds=kinds, num_blocks=1000, **options)


def rules(engine: Engine) -> Rules:
    return rules_of(engine.session, engine.workers[0].geometry)


def scratch(engine: Engine, group: int) -> list[int]:
    """The blocks that close a state's table."""
    count = engine.workers[0].geometry.groups[group].scratch_blocks
    return list(range(SCRATCH, SCRATCH + count))


def save(
    bed: Bed, engine: Engine, prompt: int, tokens: int, *,
    batch: int = 100, junction: int = 0, lost: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Prefill a prompt in steps of ``batch`` tokens and save each; chunk ``lost`` has no block."""
    step = rules(engine).scheduler_block
    for (rank, group), layout in engine.layouts.items():
        for chunk in range(tokens // BLOCK):
            layout.values[chunk + 1] = value_of(prompt, chunk, rank, group)
    for before in range(0, tokens, batch):
        start = before // step * step
        end = min(before + batch, tokens) // step * step
        if end > start:
            _save_span(bed, engine, prompt, (start, end, before, tokens), junction, lost)


def _save_span(
    bed: Bed, engine: Engine, prompt: int, span: tuple[int, int, int, int],
    junction: int, lost: tuple[int, int] | None,
) -> None:  # fmt: skip
    start, end, before, tokens = span
    slices, raw, states = [], b"", []
    boundaries = kept_boundaries(rules(engine), tokens, junction)
    for group, rule in enumerate(rules(engine).groups):
        if rule.kind is Kind.MAMBA:  # the engine names what it keeps
            kept = kept_chunks(
                rules(engine), group, start_tokens=start, tokens=end, boundaries=boundaries
            ).tolist()
            states += [HandOff(group, i + 1, (i + 1) * rule.block) for i in kept]
            continue
        gone = skipped_tokens(rule, before) // rule.block
        chunks = range(start // rule.block, end // rule.block)
        ids = [0 if i < gone or (group, i) == lost else i + 1 for i in chunks]
        slices.append(TableSlice(group, chunks.start, len(chunks)))
        raw += table(ids)
    job = SaveJob(
        bed.next_job(), engine.session.life, engine.session.version, "r", 0, 0, start, end,
        start // BLOCK, HASH_BYTES, slices, states, tokens, junction,
    )  # fmt: skip
    for worker in engine.workers:
        bed.submit(worker, job, [raw, chain(prompt, end // BLOCK, start // BLOCK)])
    bed.run_copies()
    for worker in engine.workers:
        (outcome,) = bed.take(Outcome, worker)
        assert outcome.status == "done", outcome
        bed.say(worker, OutcomeAck([job.job]))


def probe(
    bed: Bed, engine: Engine, admission: int, prompt: int, tokens: int, *, shared: int = 0
) -> None:
    """Probe a prompt whose first ``shared`` tokens are prompt 1's."""
    own, head = tokens // BLOCK, shared // BLOCK
    hashes = chain(1, head) + chain(prompt, own, head)
    message = Probe(
        f"r{admission}", admission, engine.session.version, 0, own, tokens, HASH_BYTES, b""
    )
    bed.say(engine.scheduler, message, [hashes])


def hit(bed: Bed, engine: Engine, admission: int, tokens: int, local: int = 0) -> int:
    return bed.ask(engine, admission, local=local, most=tokens - 1, seq=admission).hit_tokens


def load(
    bed: Bed, engine: Engine, admission: int, total: int, *,
    local: int = 0, lost: tuple[int, int] | None = None, tables: dict[int, list[int]] | None = None,
) -> list[Outcome]:  # fmt: skip
    """Load a leased prefix into blocks of its own; chunk ``lost`` has none.

    ``tables``: whole tables of groups, as a half sends those that are not one slot per chunk.
    """
    slices, raw = [], b""
    for group, rule in enumerate(rules(engine).groups):
        mask = load_mask(rule, total_tokens=total)
        chunks = range(local // rule.block, len(mask))
        if rule.kind is Kind.MAMBA:
            chunks = range(len(mask))
        ids = [LOADED + i if mask[i] and (group, i) != lost else 0 for i in chunks]
        if rule.kind is Kind.MAMBA:
            ids += scratch(engine, group)
        if tables is not None and group in tables:
            chunks, ids = range(0), tables[group]
        slices.append(TableSlice(group, chunks.start, len(ids)))
        raw += table(ids)
    job = LoadJob(
        bed.next_job(), engine.session.life, engine.session.version, "r", admission, 0,
        local, total, slices,
    )  # fmt: skip
    for worker in engine.workers:
        bed.submit(worker, job, [raw])
    bed.run_copies()
    outcomes = bed.take(Outcome)
    for worker in engine.workers:
        bed.say(worker, OutcomeAck([job.job]))
    return outcomes


def assert_loaded(engine: Engine, prompt: int, total: int, local: int = 0) -> None:
    """Every chunk that a hit of ``total`` needs past ``local`` is in place, and no other."""
    for (rank, group), layout in engine.layouts.items():
        rule = rules(engine).groups[group]
        mask = load_mask(rule, total_tokens=total)
        expected = {
            LOADED + i: value_of(prompt, i, rank, group)
            for i in range(local // rule.block, len(mask))
            if mask[i]
        }
        found = {block: value for block, value in layout.values.items() if block >= LOADED}
        assert found == expected, (rank, group)


def check_repeated_prompt(kinds: Sequence[dict[str, Any]], tokens: int) -> None:
    """A prompt that was saved hits at its replay boundary, and two ranks load all of it."""
    bed, engine = bed_and_engine(kinds, ranks=2)
    save(bed, engine, 1, tokens)
    probe(bed, engine, 1, 1, tokens)
    step = rules(engine).scheduler_block
    total = hit(bed, engine, 1, tokens)
    assert total == (tokens - 1) // step * step
    needed = sum(load_mask(rule, total_tokens=total).sum() for rule in rules(engine).groups)
    assert bed.pipeline.snapshot().leased_entries == needed
    assert [end.status for end in load(bed, engine, 1, total)] == ["done", "done"]
    assert_loaded(engine, 1, total)
    bed.say(engine.scheduler, Release([1]))
    bed.assert_clean()

"""What the halves of one session must agree on, and the version of their namespace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kvferry_connector.wire.attach import (
    Bye,
    Group,
    Ready,
    Refused,
    Registered,
    RegisterRank,
    Rotate,
    Shard,
)
from kvferry_sidecar.sessions.agreement import check_engine
from kvferry_sidecar.sessions.model import Session, SessionKey
from kvferry_sidecar.sessions.rules import retention_of
from support.node import Node
from support.node_messages import VERSION, engine_registration, rank_registration
from support.sessions import (
    attached,
    close_all,
    only_session,
    ready_session,
    refused_fields,
    registered,
)


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as made:
        yield made
        assert not made.errors, made.errors


# --- agreement ---------------------------------------------------------------------------------


def test_a_rank_that_differs_is_refused_field_by_field(node: Node) -> None:
    first, _ = attached(node, 0)
    second, _ = attached(node, 1)
    registered(first, rank_registration(0))
    answer = registered(
        second,
        rank_registration(
            1, identity={"model": "tiny", "hash_seed": "1"}, layout="NHD", num_blocks=9
        ),
    )
    fields = refused_fields(answer)
    assert fields.keys() == {"hash_seed", "layout", "num_blocks"}
    assert (fields["hash_seed"].theirs, fields["hash_seed"].ours) == ("1", "0")
    assert "PYTHONHASHSEED" in fields["hash_seed"].remedy
    second.wait_end()
    close_all([first, second])


def test_a_session_with_a_refused_rank_never_becomes_ready(node: Node) -> None:
    scheduler, _ = attached(node)
    registered(scheduler, engine_registration([0, 1]))
    good, _ = attached(node, 0)
    registered(good, rank_registration(0))
    wide = [Group(0, "full", 32, {}, ["l0"])]
    for _ in range(3):  # it may try as often as it likes
        other, _ = attached(node, 1)
        refused_fields(registered(other, rank_registration(1, groups=wide)))
        other.wait_end()
        other.close()
        assert not only_session(node).ready
    mended, _ = attached(node, 1)
    registered(mended, rank_registration(1))
    node.pump(lambda: only_session(node).ready, "both ranks agree at last")
    close_all([scheduler, good, mended])


def stage(pp_rank: int, *layers: list[str], tp_rank: int = 0, **changes: Any) -> RegisterRank:
    """A rank of a pipeline of two stages; a group without layers has them all elsewhere."""
    groups = [
        Group(number, "full", 16, {"dtype": "x", "backends": "b" if names else ""}, names)
        for number, names in enumerate(layers)
    ]
    shard = Shard(tp_rank=tp_rank, tp_size=2, pp_rank=pp_rank, pp_size=2)
    return rank_registration(0, **({"shard": shard, "groups": groups} | changes))


def test_pipeline_stages_differ_in_their_layers_only(node: Node) -> None:
    halves = [attached(node, rank)[0] for rank in range(3)]
    identity = {"model": "tiny", "hash_seed": "0", "attention_backends": "of its own layers"}
    assert isinstance(registered(halves[0], stage(0, ["a", "b"], [])), Registered)
    assert isinstance(registered(halves[1], stage(1, [], ["c"], identity=identity)), Registered)
    refused = refused_fields(registered(halves[2], stage(0, ["a"], [], tp_rank=1)))
    assert refused.keys() == {"groups[0].layers"}, "within a stage all is equal"
    close_all(halves)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"groups": [Group(0, "full", 32, {"dtype": "x"}, ["c"])]}, {"groups[0].block_tokens"}),
        ({"groups": [Group(0, "full", 16, {"dtype": "y"}, ["c"])]}, {"groups[0].spec"}),
        ({"groups": []}, {"groups"}),
        ({"identity": {"model": "other", "hash_seed": "0"}, "num_blocks": 9},
         {"model", "num_blocks"}),
    ],
)  # fmt: skip
def test_pipeline_stages_of_two_engines_are_refused(
    node: Node, changes: dict[str, Any], fields: set[str]
) -> None:
    first, second = attached(node, 0)[0], attached(node, 1)[0]
    registered(first, stage(0, ["a"]))
    answer = registered(second, stage(1, ["c"], **changes))
    assert refused_fields(answer).keys() == fields
    close_all([first, second])


def test_geometry_refusals_are_passed_on(node: Node) -> None:
    half, _ = attached(node, 0)
    fields = refused_fields(registered(half, rank_registration(0, layout="bad")))
    assert fields["layout"].remedy == "use HND"
    half.close()


FULL = Group(0, "full", 16, {}, ["l0"])
CHUNKED = Group(1, "chunked", 16, {}, ["l1"], chunk_tokens=40)


@pytest.mark.parametrize("rank_first", [True, False])
def test_groups_without_exact_masks_are_refused_whoever_comes_second(
    node: Node, rank_first: bool
) -> None:
    worker, _ = attached(node, 0)
    scheduler, _ = attached(node, -1)
    rank = rank_registration(0, groups=[FULL, CHUNKED])
    pairs = [(worker, rank), (scheduler, engine_registration([0]))]
    (first, said), (second, says) = pairs if rank_first else reversed(pairs)
    assert isinstance(registered(first, said), Registered)
    refusal = refused_fields(registered(second, says))["groups"]
    assert refusal.theirs == "group 1 (chunked): chunk 40 is no multiple of block 16"
    assert "--disable-hybrid-kv-cache-manager" in refusal.remedy
    close_all([first, second])


@pytest.mark.parametrize(("retention", "rule"), [(0, "tail:3"), (None, "held"), (64, "held")])
def test_a_sliding_windows_save_rule_follows_the_engines_retention(
    node: Node, retention: int | None, rule: str
) -> None:
    worker, _ = attached(node, 0)
    scheduler, _ = attached(node, -1)
    window = Group(1, "swa", 16, {}, ["l1"], window_tokens=40)
    answer = registered(worker, rank_registration(0, groups=[FULL, window]))
    assert isinstance(answer, Registered)
    assert answer.save_rules == ["all", "held"]
    answer = registered(scheduler, engine_registration([0], retention_tokens=retention))
    assert isinstance(answer, Registered)
    assert answer.save_rules == ["all", rule]
    close_all([worker, scheduler])


@pytest.mark.parametrize(
    ("flagged", "reprefill", "refused"),
    [((), 0, False), ((), 2, True), ((0,), 2, False), ((1,), 2, True)],
)
def test_states_of_a_drafter_of_several_modules_are_refused(
    node: Node, flagged: tuple[int, ...], reprefill: int, refused: bool
) -> None:
    worker, _ = attached(node, 0)
    scheduler, _ = attached(node, -1)
    groups = [Group(i, kind, 16, {}, [f"l{i}"], eagle=i in flagged)
              for i, kind in enumerate(("full", "mamba"))]  # fmt: skip
    registered(worker, rank_registration(0, groups=groups))
    message = engine_registration([0], use_eagle=True, reprefill_tokens=reprefill)
    answer = registered(scheduler, message)
    if refused:
        assert refused_fields(answer).keys() == {"reprefill_tokens"}
    else:
        assert isinstance(answer, Registered)
    close_all([worker, scheduler])


@pytest.mark.parametrize("scheduler_at", [0, 1, 2])
@pytest.mark.parametrize("marks", ["full", "states", "nobody"])
def test_draft_groups_are_those_that_any_pipeline_stage_marks(
    node: Node, scheduler_at: int, marks: str
) -> None:
    """vLLM clears the mark on the stage without layers of the group: that one says nothing."""
    unmarked = [Group(0, "full", 16, {}, []), Group(1, "mamba", 16, {}, ["s0"])]
    full = Group(0, "full", 16, {}, ["l1"], eagle=marks == "full")
    states = Group(1, "mamba", 16, {}, ["s1"], eagle=marks == "states")
    ranks = [stage(0, groups=unmarked), stage(1, groups=[full, states])]
    halves = [attached(node, rank)[0] for rank in (0, 1, -1)]
    said: list[Any] = list(zip(halves, ranks, strict=False))
    engine = engine_registration([0, 1], use_eagle=True, reprefill_tokens=2)
    said.insert(scheduler_at, (halves[2], engine))
    answers = [registered(half, message) for half, message in said]
    assert all(isinstance(answer, Registered) for answer in answers[:2]), "not known until all are"
    if marks == "full":
        assert isinstance(answers[2], Registered)
        node.pump(lambda: only_session(node).ready, "it is served")
    else:
        assert refused_fields(answers[2]).keys() == {"reprefill_tokens"}
        assert not only_session(node).ready
    close_all(halves)


@pytest.mark.parametrize(
    ("setting", "engine", "kept"),
    [
        ("engine", 0, 0),
        ("engine", None, None),
        ("engine", 96, 96),
        ("dense", 0, None),
        ("dense", 96, None),
        ("100", 0, 128),
        ("1", 0, 32),
        ("4096", None, None),
        ("96", 64, 32),  # both distances' boundaries
        ("64", 64, 64),
    ],
)
def test_a_setting_keeps_no_less_than_the_engine(
    setting: str, engine: int | None, kept: int | None
) -> None:
    assert retention_of(setting, engine, 32) == kept


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"life": b"short"}, "life"),
        ({"version": b""}, "version"),
        ({"ranks": []}, "ranks"),
        ({"ranks": [0, 0]}, "ranks"),
        ({"ranks": [-1]}, "ranks"),
        ({"ranks": list(range(17))}, "ranks"),
        ({"hash_block_tokens": 0}, "hash_block_tokens"),
        ({"alignment_tokens": -3}, "alignment_tokens"),
        ({"reprefill_tokens": -1}, "retention_tokens, reprefill_tokens"),
    ],
)
def test_an_engine_registration_out_of_form_is_refused(
    node: Node, changes: dict[str, object], field: str
) -> None:
    half, _ = attached(node)
    assert field in refused_fields(registered(half, engine_registration(**changes)))
    half.close()


def test_scheduler_half_and_ranks_must_agree(node: Node) -> None:
    worker, _ = attached(node, 3)
    registered(worker, rank_registration(3))
    scheduler, _ = attached(node)
    fields = refused_fields(registered(scheduler, engine_registration([0], hash_block_tokens=32)))
    assert fields.keys() == {"ranks", "hash_block_tokens"}
    scheduler.close()
    scheduler, _ = attached(node)
    registered(scheduler, engine_registration([3, 4]))
    stranger, _ = attached(node, 7)
    fields = refused_fields(registered(stranger, rank_registration(7, hash_block_tokens=32)))
    assert fields.keys() == {"rank", "hash_block_tokens"}
    twin, _ = attached(node, 4)
    fields = refused_fields(registered(twin, rank_registration(4, shard=Shard(tp_rank=3))))
    assert fields.keys() == {"shard"}
    close_all([worker, scheduler, stranger, twin])


def test_another_life_in_the_same_place_is_refused(node: Node) -> None:
    half, _ = attached(node)
    registered(half, engine_registration())
    again, _ = attached(node)
    fields = refused_fields(registered(again, engine_registration(life=b"x" * 16)))
    assert fields.keys() == {"life"}
    close_all([half, again])


def test_a_life_of_another_session_is_refused(node: Node) -> None:
    """As of two starts of vLLM over several nodes that share this sidecar."""
    first, _ = attached(node)
    assert isinstance(registered(first, engine_registration()), Registered)
    second, _ = attached(node, engine="further")
    fields = refused_fields(registered(second, engine_registration()))
    assert fields.keys() == {"life"}
    assert "a run directory of its own" in fields["life"].remedy
    assert isinstance(registered(first, engine_registration()), Registered)
    close_all([first, second])


def test_roles_do_not_mix(node: Node) -> None:
    scheduler, _ = attached(node)
    worker, _ = attached(node, 0)
    for half, message in ((scheduler, rank_registration()), (worker, engine_registration())):
        answer = registered(half, message)
        assert isinstance(answer, Refused)
        assert answer.code == "role"
    close_all([scheduler, worker])


# --- version -----------------------------------------------------------------------------------


def test_rotation_changes_the_namespace_and_keeps_a_bounded_past(node: Node) -> None:
    halves = ready_session(node, 1)
    session = only_session(node)
    seen = [session.namespaces[VERSION]]
    for number in range(1, 7):
        version = bytes([number] * 16)
        answer = registered(halves[0], Rotate(version))
        assert isinstance(answer, Registered)
        assert session.version == version
        assert answer.namespace == session.namespaces[version].hex()
        seen.append(session.namespaces[version])
    assert len(set(seen)) == 7
    assert len(session.namespaces) == node.limits.versions_max
    assert list(session.namespaces)[-1] == session.version
    assert node.pipeline.named("version") == [session] * 6
    registered(halves[0], Rotate(session.version))
    assert len(node.pipeline.named("version")) == 6, "the same version again is no change"
    close_all(halves)


def test_a_version_that_rotated_while_away_arrives_with_the_registration(node: Node) -> None:
    halves = ready_session(node, 1)
    again, _ = attached(node)
    answer = registered(again, engine_registration(version=b"v" * 16))
    assert isinstance(answer, Registered)
    session = only_session(node)
    assert answer.namespace == session.namespaces[b"v" * 16].hex()
    assert node.pipeline.named("version") == [session]
    close_all([*halves, again])


def test_only_a_registered_scheduler_half_rotates(node: Node) -> None:
    for rank in (-1, 0):
        half, _ = attached(node, rank)
        answer = registered(half, Rotate(b"v" * 16))
        assert isinstance(answer, Refused)
        assert answer.code == "rotate"
        half.close()


def test_an_engine_on_several_nodes_needs_a_shared_store() -> None:
    session, engine = Session(SessionKey("engine", "one")), engine_registration([0], nodes=2)
    assert check_engine(session, engine, 8, shared_store=True) == []
    (refused,) = check_engine(session, engine, 8, shared_store=False)
    assert (refused.field, refused.theirs) == ("nodes", "2 nodes")
    assert "tiers.remote.url" in refused.remedy
    alone = engine_registration([0])
    assert check_engine(session, alone, 8, shared_store=False) == []


@pytest.mark.parametrize("rank_first", [True, False])
def test_on_several_nodes_each_rank_has_layers_of_every_group(node: Node, rank_first: bool) -> None:
    worker, _ = attached(node, 0)
    scheduler, _ = attached(node, -1)
    pairs = [(worker, stage(0, ["a"], [])), (scheduler, engine_registration([0], nodes=2))]
    (first, said), (second, says) = pairs if rank_first else reversed(pairs)
    assert isinstance(registered(first, said), Registered)
    refusal = refused_fields(registered(second, says))["groups"]
    assert refusal.theirs == "no layers of groups [1] on this rank, 2 nodes"
    close_all([first, second])


def test_schedulers_that_come_and_go_leave_a_bounded_past(node: Node) -> None:
    scheduler, worker = ready_session(node, 1)
    for number in range(1, 7):
        scheduler.send(Bye())
        scheduler.wait_end()
        scheduler.close()
        scheduler, _ = attached(node)
        version = bytes([number] * 16)
        registered(scheduler, engine_registration(life=version, version=version))
        for half in (scheduler, worker):
            assert isinstance(half.receive(), Ready)
    session = only_session(node)
    assert len(session.namespaces) == node.limits.versions_max
    assert list(session.namespaces)[-1] == session.version
    close_all([scheduler, worker])

"""Namespaces: equal exactly when two sessions may share bytes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvferry_connector.wire.names import NO_VERSION
from kvferry_sidecar.keys import canonical
from kvferry_sidecar.keys.namespace import namespace_digest
from kvferry_sidecar.sessions.model import RankGeometry


def geometry(digest=b"a" * 16, position=(0, 0, 0), serial=1):
    return RankGeometry(
        serial=serial,
        groups=(),
        identity={},
        digest=digest,
        hash_block_tokens=16,
        position=position,
    )


def test_the_order_of_ranks_and_their_serials_do_not_count():
    one = [geometry(position=(0, 0, 0)), geometry(position=(1, 0, 0))]
    other = [dataclasses.replace(rank, serial=5) for rank in reversed(one)]
    assert namespace_digest(one, NO_VERSION) == namespace_digest(other, NO_VERSION)
    assert len(namespace_digest(one, NO_VERSION)) == 16


@pytest.mark.parametrize(
    ("ranks", "version"),
    [
        ([geometry(b"b" * 16)], NO_VERSION),
        ([geometry()], b"v" * 16),
        ([geometry(), geometry()], NO_VERSION),
        ([geometry(position=(1, 0, 0))], NO_VERSION),
    ],
    ids=["geometry", "weights", "number of ranks", "which shard"],
)
def test_what_changes_bytes_changes_the_namespace(ranks, version):
    assert namespace_digest(ranks, version) != namespace_digest([geometry()], NO_VERSION)


def test_golden_digest():
    # Objects of the running pool are found by it: a change needs a new PAYLOAD_FORMAT.
    assert namespace_digest([geometry()], NO_VERSION).hex() == "0bd55b77c56ba0a1a370d99b25750103"


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="at least one rank"):
        namespace_digest([], NO_VERSION)
    with pytest.raises(ValueError, match="16"):
        namespace_digest([geometry()], b"short")


values = st.recursive(
    st.text() | st.integers() | st.binary() | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def typed(value):
    """Python holds True == 1; the encoding must not."""
    if isinstance(value, list):
        return [typed(entry) for entry in value]
    if isinstance(value, dict):
        return {key: typed(entry) for key, entry in value.items()}
    return (type(value), value)


@given(values, values)
def test_canonical_bytes_are_equal_only_for_equal_values(a, b):
    assert (canonical.encode(a) == canonical.encode(b)) == (typed(a) == typed(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [(["ab", "c"], ["a", "bc"]), (["1"], [1]), ([1], [True]), ([[], []], [[[]]]), ({}, [])],
)
def test_values_that_print_alike_are_told_apart(a, b):
    assert canonical.encode(a) != canonical.encode(b)


def test_other_types_have_no_canonical_form():
    with pytest.raises(TypeError, match="float"):
        canonical.encode([1.5])

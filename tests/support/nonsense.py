"""Strategies for frames that nobody should send: random, mutated, and well-formed nonsense."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from kvferry_connector.wire.codec import HEADER, MAGIC, encode_job
from kvferry_connector.wire.hot import HandOff, LoadJob, SaveJob, TableSlice
from kvferry_connector.wire.names import NO_VERSION
from support.hot_engine import HASH_BYTES, hashes, ids

EDGES = (-(2**63), -(2**31), -1, 0, 1, 2, 15, 16, 17, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**63 - 1)
numbers = st.sampled_from((*EDGES, 2**63, 2**64 - 1)) | st.integers(-4, 40)
texts = st.sampled_from(("", "a", "x" * 512, "y" * 513, "\x00\n", "z" * 70_000)) | st.text(
    max_size=8
)
blobs = st.sampled_from((b"", bytes(16), bytes(32), b"\xff" * 33, bytes(70_000))) | st.binary(
    max_size=40
)
leaves = numbers | texts | blobs | st.none() | st.booleans() | st.floats()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
raw_frames = st.lists(
    st.binary(max_size=64) | st.sampled_from((bytes(512), bytes(4096))), max_size=3
)

_number_lists = st.lists(numbers, max_size=20)
# Fields of each kind in their types, so that most of it gets past the decoder.
_TYPED: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "p": (texts, numbers, blobs, numbers, numbers, numbers, numbers, blobs),
    "a": (numbers, numbers, numbers, numbers),
    "r": (_number_lists,),
    "s": (blobs,),
    "c": (numbers,),
    "q": (numbers,),
    "k": (_number_lists,),
}
typed_bodies = st.sampled_from(sorted(_TYPED)).flatmap(
    lambda tag: st.tuples(st.just(tag), *_TYPED[tag])
)
untyped_bodies = st.tuples(st.sampled_from((*sorted(_TYPED), "", "zz", 7)), values, values, values)


def _nested(depth: int, shape: bytes) -> bytes:
    return b"\x92\xa1r" + shape * depth


def _counted(kind: int, count: int) -> bytes:
    """Return a message whose list, map, text or blob announces far more than it holds."""
    return b"\x92\xa1r" + bytes([kind]) + count.to_bytes(4, "big")


bodies = st.one_of(
    st.binary(max_size=200),
    (typed_bodies | untyped_bodies).map(msgspec.msgpack.encode),
    st.builds(
        _nested, st.sampled_from((10, 2_000, 200_000)), st.sampled_from((b"\x91", b"\x81\xa1k"))
    ),
    st.builds(
        _counted,
        st.sampled_from((0xDD, 0xDF, 0xDB, 0xC6, 0xC9)),
        st.sampled_from((1 << 16, 1 << 28, (1 << 32) - 1)),
    ),
)


def headers(epoch: int, generation: int) -> st.SearchStrategy[bytes]:
    """Return headers that are mostly right."""
    wrong = st.builds(
        HEADER.pack,
        st.sampled_from((MAGIC, b"YFVK")),
        st.sampled_from((0, 1, 2, 65535)),
        st.sampled_from((0, 1, 2, 65535)),
        st.sampled_from((0, epoch, epoch ^ 1, 2**64 - 1)),
        st.sampled_from((0, generation, generation + 1, 2**64 - 1)),
    )
    return wrong | st.binary(max_size=40)


def messages(epoch: int, generation: int) -> st.SearchStrategy[list[bytes]]:
    """Return whole messages: frames in the right form around nonsense, or in no form at all."""

    def framed(body: bytes, raw: list[bytes]) -> list[bytes]:
        return [HEADER.pack(MAGIC, 1, len(raw), epoch, generation), body, *raw]

    well_formed = st.builds(framed, bodies, st.lists(raw_frames.map(b"".join), max_size=2))
    mislabelled = st.builds(
        lambda head, body, raw: [head, body, *raw], headers(epoch, generation), bodies, raw_frames
    )
    return st.one_of(
        well_formed,
        well_formed.flatmap(mutated),
        mislabelled,
        st.lists(st.binary(max_size=30), min_size=1, max_size=7),
    )


@st.composite
def mutated(draw: st.DrawFn, frames: list[bytes]) -> list[bytes]:
    """Return the frames with some bytes changed, a frame dropped, cut or doubled."""
    found = list(frames)
    at = draw(st.integers(0, len(found) - 1))
    what = draw(st.sampled_from(("flip", "cut", "drop", "double")))
    if what == "drop" and len(found) > 1:
        del found[at]
    elif what == "double":
        found.insert(at, found[at])
    elif found[at]:
        place = draw(st.integers(0, len(found[at]) - 1))
        frame = bytearray(found[at])
        frame[place] ^= draw(st.integers(1, 255))
        found[at] = bytes(frame[:place] if what == "cut" else frame)
    return found


slices = st.lists(st.builds(TableSlice, numbers, numbers, numbers), max_size=3)
_tables = st.one_of(
    st.just([TableSlice(0, 0, 3)]),
    st.builds(lambda start, count: [TableSlice(0, start, count)], numbers, numbers),
    slices,
)
_id_frames = st.lists(st.integers(-2, 70) | st.sampled_from((2**31 - 1, -(2**31))), max_size=5).map(
    ids
) | st.sampled_from((ids([1, 2, 3]), b"\x01", ids([0, 0, 0]), ids([7, 7, 7])))
_hash_frames = st.sampled_from(
    (b"", b"\x00" * 31, *(b"".join(hashes("hostile", count)) for count in (1, 3, 5)))
)


def hostile_jobs(life: bytes) -> st.SearchStrategy[tuple[bytes, list[bytes]]]:
    """Return (encoded job, raw frames): most fields right, a few of them absurd."""
    job_ids = st.integers(1, 40) | numbers
    lives = st.just(life) | st.just(life) | blobs
    versions = st.just(NO_VERSION) | st.just(NO_VERSION) | blobs
    tokens = st.sampled_from((0, 16, 32, 48, 64)) | numbers
    save = st.builds(
        SaveJob,
        job=job_ids,
        life=lives,
        version=versions,
        request=texts,
        admission=numbers,
        step=st.sampled_from((0, 0, 0, -1, 1, 2**64 - 1)),
        start_tokens=tokens,
        end_tokens=tokens,
        first_hash=st.sampled_from((0, 0, 1, 2**62)) | numbers,
        hash_bytes=st.sampled_from((HASH_BYTES, HASH_BYTES, 1, 64, 0)) | numbers,
        tables=_tables,
        hand_offs=st.just([]) | st.lists(st.builds(HandOff, numbers, numbers, numbers), max_size=2),
    )
    load = st.builds(
        LoadJob,
        job=job_ids,
        life=lives,
        version=versions,
        request=texts,
        admission=st.sampled_from((1, 1, 2)) | numbers,
        step=st.sampled_from((0, 0, -1, 2**64 - 1)),
        local_tokens=tokens,
        total_tokens=tokens,
        tables=_tables,
    )
    raw = st.one_of(
        st.tuples(_id_frames).map(list), st.tuples(_id_frames, _hash_frames).map(list), raw_frames
    )
    return st.tuples((save | load).map(encode_job), raw.map(lambda frames: frames[:2]))

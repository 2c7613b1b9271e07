"""The pool through its Python interface: random lives against a model, and every refusal."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
from kvferry_native import FORMAT_VERSION, KEY_BYTES, Pool, PoolFormatError, crc32c, mix_keys
from support.pools import Keys, keys_of, pattern_of, segment

SLAB = 16384
PAYLOAD = 3900  # a slot of 4096


@pytest.fixture
def fd_and_bytes() -> Iterator[tuple[int, int]]:
    with segment(8 * SLAB, SLAB, 64) as made:
        yield made


@pytest.fixture
def pool(fd_and_bytes: tuple[int, int]) -> Pool:
    fd, nbytes = fd_and_bytes
    return Pool.create(fd, nbytes, SLAB, 64, epoch=1, threads=2)


def ids_of(reserved: np.ndarray) -> np.ndarray:
    assert (reserved >= 0).all()
    return reserved.astype(np.uint32)


def put(pool: Pool, *numbers: int, payload: int = PAYLOAD) -> np.ndarray:
    ids = ids_of(pool.reserve(keys_of(*numbers), payload, 1))
    pool.commit(ids)
    return ids


def payload_view(pool: Pool, entry: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    offset = int(pool.payload_offsets(np.array([entry], np.uint32))[0])
    return (ctypes.c_char * nbytes).from_address(pool.address + offset)


def test_life_and_restart(fd_and_bytes: tuple[int, int], pool: Pool) -> None:
    ids = ids_of(pool.reserve(keys_of(1, 2, 3), PAYLOAD, 2))
    for number, entry in zip((1, 2, 3), ids, strict=True):
        payload_view(pool, entry, PAYLOAD)[:] = pattern_of(number, PAYLOAD)
    pool.set_crcs(ids, 1, np.array([5, 6, 7], np.uint32))
    assert pool.prefix(keys_of(1, 2, 3)) == 0
    pool.commit(ids)
    assert pool.present(keys_of(3, 9, 1)).tolist() == [True, False, True]
    leased = pool.lease(keys_of(1, 2, 9, 3))
    assert leased.tolist() == ids[:2].tolist()
    pool.doom(ids[:1])
    stats = pool.stats()
    assert (stats.ready, stats.doomed, stats.leased, stats.used_bytes) == (2, 1, 2, 3 * 4096)
    assert pool.check() == []
    del pool
    fd, _ = fd_and_bytes
    after = Pool.attach(fd, 2)
    assert after.recovered == (2, 1, 0)
    assert not after.was_clean
    assert after.present(keys_of(1, 2, 3)).tolist() == [False, True, True]
    crcs, stored = after.crcs(ids[1:], 1)
    assert crcs.tolist() == [6, 7]
    assert stored.all()
    assert not after.crcs(ids[1:], 0)[1].any()
    assert bytes(payload_view(after, ids[2], PAYLOAD)) == pattern_of(3, PAYLOAD)
    assert after.check() == []


def test_close_is_final(fd_and_bytes: tuple[int, int], pool: Pool) -> None:
    put(pool, 1)
    pool.close()
    pool.close()
    for use in (pool.stats, pool.check, pool.clear, lambda: pool.address):
        with pytest.raises(ValueError, match="closed"):
            use()
    again = Pool.attach(fd_and_bytes[0], 2)
    assert again.was_clean
    assert again.recovered == (1, 0, 0)


def test_reserve_answers(pool: Pool) -> None:
    put(pool, 1)
    ids = ids_of(pool.reserve(keys_of(2), PAYLOAD, 1))
    assert pool.reserve(keys_of(1, 2), PAYLOAD, 1).tolist() == [-1, -2]
    pool.abort(ids)
    assert pool.reserve(keys_of(2), PAYLOAD, 1)[0] >= 0
    leases = [pool.lease(keys_of(1))]
    for number in range(10, 40):
        put(pool, number)
        leases.append(pool.lease(keys_of(number)))
    assert pool.reserve(keys_of(50), PAYLOAD, 1).tolist() == [-3]
    for lease in leases:
        pool.release(lease)
    assert pool.reserve(keys_of(50), PAYLOAD, 1)[0] >= 0
    assert pool.clear() == 30
    assert pool.check() == []


def test_a_lease_without_use_is_no_reuse(pool: Pool) -> None:
    put(pool, 1, 2, 3)
    pool.release(pool.lease(keys_of(1)))
    pool.release(pool.lease(keys_of(2), use=False))
    held = pool.lease(keys_of(3), use=False)
    [put(pool, number) for number in range(10, 60)]
    assert pool.present(keys_of(1, 2, 3)).tolist() == [True, False, True]
    assert pool.stats().dropped_before_reuse == pool.stats().evictions
    pool.release(held)
    [put(pool, number) for number in range(60, 110)]
    assert pool.present(keys_of(1, 3)).tolist() == [True, False]
    assert pool.check() == []


def test_seeds_follow_the_key(pool: Pool) -> None:
    seeds = pool.seeds(ids_of(pool.reserve(keys_of(1, 2), PAYLOAD, 1)))
    assert seeds[0] != seeds[1]
    assert pool.seeds(ids_of(pool.reserve(keys_of(3), PAYLOAD, 1))) not in seeds


@pytest.mark.parametrize(
    ("slab_bytes", "keys_max", "threads", "match"),
    [
        (1000, 64, 1, "slab_bytes is 1000"),
        (0, 64, 1, "slab_bytes is 0"),
        (SLAB, 0, 1, "keys_max is 0"),
        (SLAB, 1 << 31, 1, "keys_max is 2147483648"),
        (SLAB, 1 << 20, 1, "segment_bytes_for"),
        (SLAB, 64, 0, "threads is 0"),
    ],
)
def test_create_refuses(
    fd_and_bytes: tuple[int, int], slab_bytes: int, keys_max: int, threads: int, match: str
) -> None:
    fd, nbytes = fd_and_bytes
    with pytest.raises(ValueError, match=match):
        Pool.create(fd, nbytes, slab_bytes, keys_max, 1, threads)


def test_create_wants_the_size_it_is_told(fd_and_bytes: tuple[int, int]) -> None:
    fd, nbytes = fd_and_bytes
    with pytest.raises(ValueError, match="size it first"):
        Pool.create(fd, nbytes + SLAB, SLAB, 64, 1, 1)
    with pytest.raises(ValueError, match="arena_bytes is 0"):
        Pool.segment_bytes_for(0, SLAB, 64)
    read_fd, write_fd = os.pipe()
    try:
        with pytest.raises(OSError, match="size"):
            Pool.attach(-1, 1)
        with pytest.raises(PoolFormatError):
            Pool.attach(read_fd, 1)
    finally:
        os.close(read_fd)
        os.close(write_fd)


def test_attach_says_what_differs(fd_and_bytes: tuple[int, int], pool: Pool) -> None:
    fd, nbytes = fd_and_bytes
    pool.close()
    version_at = 8
    os.pwrite(fd, (FORMAT_VERSION + 1).to_bytes(4, "little"), version_at)
    with pytest.raises(PoolFormatError, match=f"format version {FORMAT_VERSION + 1}"):
        Pool.attach(fd, 2)
    os.pwrite(fd, FORMAT_VERSION.to_bytes(4, "little"), version_at)
    os.ftruncate(fd, nbytes + 4096)
    with pytest.raises(PoolFormatError, match=f"{nbytes + 4096} bytes, its header says {nbytes}"):
        Pool.attach(fd, 2)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, b"\xff", 32)
    with pytest.raises(PoolFormatError, match="checksum"):
        Pool.attach(fd, 2)
    os.pwrite(fd, b"X", 0)
    with pytest.raises(PoolFormatError, match="magic"):
        Pool.attach(fd, 2)
    os.ftruncate(fd, 100)
    with pytest.raises(PoolFormatError, match="100 bytes"):
        Pool.attach(fd, 2)


@pytest.mark.parametrize(
    ("payload", "shards", "match"),
    [
        (SLAB, 1, "create the pool with larger slab_bytes"),
        (0, 1, "payload_bytes is 0"),
        (10, 0, "shards is 0"),
        (10, 33, "shards is 33"),
    ],
)
def test_reserve_refuses(pool: Pool, payload: int, shards: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pool.reserve(keys_of(1), payload, shards)
    assert pool.stats().writing == 0


def test_wrong_entries_are_refused(pool: Pool) -> None:
    writing = ids_of(pool.reserve(keys_of(1), PAYLOAD, 1))
    ready = put(pool, 2)
    free = np.array([60], np.uint32)
    outside = np.array([64], np.uint32)
    for call in (pool.commit, pool.abort, pool.doom, pool.release, pool.seeds):
        for entries in (free, outside):
            with pytest.raises(ValueError, match="entry"):
                call(entries)
    for call in (pool.commit, pool.abort):
        with pytest.raises(ValueError, match="is ready"):
            call(ready)
        with pytest.raises(ValueError, match="given twice"):
            call(np.concatenate([writing, writing]))
    with pytest.raises(ValueError, match="abort it"):
        pool.doom(writing)
    with pytest.raises(ValueError, match="no lease left"):
        pool.release(ready)
    with pytest.raises(ValueError, match="does not have that shard"):
        pool.crcs(ready, 1)
    with pytest.raises(ValueError, match="2 crcs"):
        pool.set_crcs(ready, 0, np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="out of range"):
        pool.payload_offsets(outside)
    assert pool.check() == []
    assert (pool.stats().writing, pool.stats().ready) == (1, 1)


@pytest.mark.parametrize(
    "keys",
    [
        keys_of(1).astype(np.int64),
        keys_of(1)[:, :8],
        keys_of(1)[0],
        keys_of(1, 2, 3, 4)[::2],
        np.asfortranarray(keys_of(1, 2)),
        [[0] * 16],
        None,
    ],
)
def test_keys_of_another_form_are_refused(pool: Pool, keys: Keys) -> None:
    for call in (pool.prefix, pool.present, pool.lease):
        with pytest.raises(TypeError):
            call(keys)
    with pytest.raises(TypeError):
        pool.reserve(keys, 10, 1)


def test_ids_are_not_converted(pool: Pool) -> None:
    reserved = pool.reserve(keys_of(1), PAYLOAD, 1)
    with pytest.raises(TypeError):
        pool.commit(reserved)  # int64: a -1 in it would become an id


def test_empty_batches(pool: Pool) -> None:
    none = np.empty((0, 16), np.uint8)
    ids = np.empty(0, np.uint32)
    assert pool.prefix(none) == 0
    assert pool.present(none).shape == (0,)
    assert pool.lease(none).shape == (0,)
    assert pool.reserve(none, 10, 1).shape == (0,)
    for call in (pool.commit, pool.abort, pool.doom, pool.release):
        call(ids)
    assert pool.crcs(ids, 0)[0].shape == (0,)


def test_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
    assert crc32c(memoryview(bytearray(b"123456789"))) == 0xE3069283
    assert crc32c(b"") == 0
    with pytest.raises(TypeError):
        crc32c("text")  # type: ignore[arg-type]  # the wrong type is the point


def test_mix_keys_selects_and_separates() -> None:
    space = bytes(range(16))
    hashes = bytes((i * 7 + i // 256) & 0xFF for i in range(320))
    keys = mix_keys(space, 1, 0, hashes, 32, 0, 1)
    assert keys.shape == (10, KEY_BYTES)
    # Stored pools depend on it: the same on every machine, for ever.
    assert keys[0].tobytes().hex() == "2c7f02523664b5916f5c0d0c477bbbed"
    assert (mix_keys(space, 1, 0, hashes, 32, 3, 4) == keys[[3, 7]]).all()
    assert mix_keys(space, 1, 0, hashes, 32, 10, 1).shape == (0, 16)
    others = [
        mix_keys(space, 2, 0, hashes, 32, 0, 1),
        mix_keys(space, 1, 1, hashes, 32, 0, 1),
        mix_keys(bytes(16), 1, 0, hashes, 32, 0, 1),
        mix_keys(space, 1, 0, hashes, 16, 0, 2),
    ]
    seen = {key.tobytes() for batch in (keys, *others) for key in batch}
    assert len(seen) == 50
    for bad in (
        (space[:-1], 32, 1),
        (space, 0, 1),
        (space, 33, 1),
        (space, 2000, 1),
        (space, 32, 0),
    ):
        with pytest.raises(ValueError, match=r"namespace|hashes|step"):
            mix_keys(bad[0], 1, 0, hashes, bad[1], 0, bad[2])


class Model:
    """What the pool must say, apart from what it chose to evict."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self.pool = pool
        self.random = random.Random(seed)
        self.writing: dict[int, int] = {}
        self.ready: set[int] = set()
        self.leases: list[tuple[list[int], np.ndarray]] = []

    def numbers(self) -> list[int]:
        first = self.random.randrange(120)
        return [first + 3 * i for i in range(self.random.randint(1, 6))]

    def payload(self, number: int) -> int:
        return (500, 2000, PAYLOAD)[number % 3]

    def step(self) -> None:
        choice = self.random.choice(["reserve", "reserve", "commit", "abort", "lease", "release"])
        getattr(self, choice)()

    def reserve(self) -> None:
        numbers = self.numbers()
        got = self.pool.reserve(keys_of(*numbers), self.payload(numbers[0]), 1)
        kept = {n for n in self.ready if self.pool.present(keys_of(n))[0]}
        leased = {n for held, _ in self.leases for n in held}
        assert not (self.ready - kept) & (leased | set(numbers)), "evicted what must stay"
        self.ready = kept
        for number, answer in zip(numbers, got.tolist(), strict=True):
            assert (answer == -1) == (number in self.ready)
            assert (answer == -2) == (number in self.writing)
            if answer >= 0:
                self.writing[number] = answer

    def take_writing(self) -> dict[int, int]:
        taken = {n: e for n, e in self.writing.items() if self.random.random() < 0.7}
        for number in taken:
            del self.writing[number]
        return taken

    def commit(self) -> None:
        taken = self.take_writing()
        for number, entry in taken.items():
            size = self.payload(number)
            payload_view(self.pool, entry, size)[:] = pattern_of(number, size)
        self.pool.commit(np.array(list(taken.values()), np.uint32))
        self.ready |= set(taken)

    def abort(self) -> None:
        if self.random.random() < 0.3:
            self.pool.abort(np.array(list(self.take_writing().values()), np.uint32))

    def lease(self) -> None:
        numbers = self.numbers()
        ids = self.pool.lease(keys_of(*numbers))
        hits = next((i for i, n in enumerate(numbers) if n not in self.ready), len(numbers))
        assert len(ids) == hits
        for number, entry in zip(numbers, ids, strict=False):
            size = self.payload(number)
            assert bytes(payload_view(self.pool, entry, size)) == pattern_of(number, size)
        self.leases.append((numbers[:hits], ids))

    def release(self) -> None:
        if self.leases:
            _, ids = self.leases.pop(self.random.randrange(len(self.leases)))
            self.pool.release(ids)

    def verify(self) -> None:
        assert self.pool.check() == []
        stats = self.pool.stats()
        assert (stats.ready, stats.writing) == (len(self.ready), len(self.writing))
        assert all(self.pool.present(keys_of(n))[0] for n in self.ready)


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(fd_and_bytes: tuple[int, int], pool: Pool, seed: int) -> None:
    model = Model(pool, seed)
    for phase in range(6):
        for _ in range(250):
            model.step()
        model.verify()
        model.pool.close()
        model.pool = Pool.attach(fd_and_bytes[0], phase + 2)
        assert model.pool.recovered == (len(model.ready), len(model.writing), 0)
        model.writing.clear()
        model.leases.clear()
        model.verify()


def test_a_refreshed_prefix_keeps_its_head_when_its_tail_must_go(pool: Pool) -> None:
    prefix = range(1, 11)
    for start in range(0, 10, 2):  # saved in steps, as a chunked prefill does
        put(pool, *prefix[start : start + 2])
        pool.refresh(keys_of(*prefix[: start + 2]))
    others = iter(range(100, 200))
    while pool.stats().evictions < 4:
        put(pool, next(others))
    assert pool.prefix(keys_of(*prefix)) == 6
    assert pool.check() == []

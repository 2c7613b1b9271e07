"""The host tier over the native pool: the rules the pipeline stands on."""

from __future__ import annotations

import os

import numpy as np
import pytest
from kvferry_native import Pool, mix_keys
from kvferry_sidecar.tiers.host import HostTier
from support.pipeline_bed import chain

SLAB = 1 << 20
PAYLOAD = SLAB // 2 + 4096  # one to a slab: a slot also holds its checksums


@pytest.fixture
def tier():
    size = Pool.segment_bytes_for(8 * SLAB, SLAB, 1024)
    fd = os.memfd_create("pool", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    tier = HostTier(Pool.create(fd, size, SLAB, 1024, 1, 1))
    yield tier
    tier.close()
    os.close(fd)


def keys_of(prompt: int, chunks: int) -> np.ndarray:
    return mix_keys(bytes(16), 0, 0, chain(prompt, chunks), 32, 0, 1)


def store(tier: HostTier, keys: np.ndarray, crc: int = 7) -> np.ndarray:
    taken = tier.reserve(keys, PAYLOAD, 1)
    tier.set_crcs(taken.entries, 0, np.full(len(taken.entries), crc, dtype=np.uint32))
    tier.commit(taken.entries)
    return taken.entries


def test_only_committed_keys_are_a_prefix(tier):
    keys = keys_of(1, 3)
    taken = tier.reserve(keys, PAYLOAD, 1)
    assert taken.index.tolist() == [0, 1, 2]
    assert tier.prefix(keys) == 0
    tier.set_crcs(taken.entries, 0, np.zeros(3, dtype=np.uint32))
    tier.commit(taken.entries)
    assert tier.prefix(keys) == 3
    assert tier.check() == []


@pytest.mark.parametrize("payload_bytes", [1, 380, 381, 512, 4096, 5000, 65_536])
def test_the_room_behind_a_payload_is_nobodys(tier, payload_bytes):
    """The last byte of it stands right before the checksums, and writing it changes nothing."""
    keys = keys_of(1, 2)
    taken = tier.reserve(keys, payload_bytes, 32)
    entries = taken.entries
    for shard in range(32):
        tier.set_crcs(entries, shard, np.full(2, shard + 1, np.uint32))
    tier.commit(entries)
    room_bytes = tier.room_bytes(payload_bytes)
    slots = tier.scan(0, 1024).bytes
    assert payload_bytes + room_bytes + 4 * 33 == slots[0]
    for entry in entries:
        tier.payload(np.array([entry]), payload_bytes + room_bytes)[:] = 0xFF
    for shard in range(32):
        stored, known = tier.crcs(entries, shard)
        assert stored.tolist() == [shard + 1] * 2
        assert known.all()
    assert tier.check() == []


def test_a_reservation_names_why_a_key_was_skipped(tier):
    store(tier, keys_of(1, 2))
    writing = tier.reserve(keys_of(2, 1), PAYLOAD, 1)
    mixed = np.concatenate((keys_of(1, 2), keys_of(2, 1), keys_of(3, 1)))
    taken = tier.reserve(mixed, PAYLOAD, 1)
    assert (taken.stored, taken.being_written, taken.full) == (2, 1, 0)
    assert taken.index.tolist() == [3]
    tier.abort(np.concatenate((writing.entries, taken.entries)))
    assert tier.stats().writing == 0


def test_leased_entries_stay_and_a_full_pool_says_so(tier):
    keys = keys_of(1, 4)
    store(tier, keys)
    leased = tier.lease(keys)
    taken = tier.reserve(keys_of(2, 32), PAYLOAD, 1)
    assert taken.full > 0
    assert tier.prefix(keys) == 4
    tier.abort(taken.entries)
    tier.release(leased)
    assert tier.stats().leased == 0
    assert tier.check() == []


def test_a_doomed_entry_is_invisible_at_once_and_freed_with_its_lease(tier):
    keys = keys_of(1, 2)
    store(tier, keys)
    leased = tier.lease(keys)
    tier.doom(leased[1:])
    assert tier.prefix(keys) == 1
    assert tier.stats().doomed == 1
    tier.release(leased)
    assert tier.stats().doomed == 0
    assert tier.check() == []


def test_offsets_lie_within_the_pool_and_apart(tier):
    entries = store(tier, keys_of(1, 4))
    offsets = np.sort(tier.payload_offsets(entries))
    assert (np.diff(offsets.astype(np.int64)) >= PAYLOAD).all()


def test_a_stored_checksum_is_found_again(tier):
    entries = store(tier, keys_of(1, 2), crc=99)
    crcs, stored = tier.crcs(entries, 0)
    assert crcs.tolist() == [99, 99]
    assert stored.all()
    assert len(set(tier.seeds(entries).tolist())) == 2


def test_a_payload_over_a_slab_is_an_error(tier):
    with pytest.raises(ValueError, match="slab"):
        tier.reserve(keys_of(1, 1), SLAB + 1, 1)


def test_empty_arrays_are_fine(tier):
    none = np.empty((0, 16), dtype=np.uint8)
    assert len(tier.lease(none)) == 0
    assert tier.prefix(none) == 0
    tier.release(np.empty(0, dtype=np.uint32))

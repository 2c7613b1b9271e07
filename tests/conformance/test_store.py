"""One suite over every store: what the tiers under the pool may rely on, and what they may not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from kvferry_sidecar.tiers import value
from kvferry_sidecar.tiers.runner import Call, CallResult, Find, Get, Put, StoreRunner
from kvferry_sidecar.tiers.store import Form, Item
from support.store_rigs import (
    DfkvRig,
    DiskRig,
    MooncakeRig,
    RealDfkvRig,
    RedisRig,
    Rig,
    get,
    key_of,
    opened,
    pattern_of,
    put,
    verify_memory,
)
from support.waiting import wait_until

STORES = {
    "disk": DiskRig,
    "redis": RedisRig,
    "mooncake": MooncakeRig,
    "dfkv": DfkvRig,
    "dfkv-real": RealDfkvRig,
}
SIZES = [(512,), (4096,), (1000,), (4096, 4096), (65536, 512, 3), (1 << 20,)]


@pytest.fixture(scope="module")
def kept():
    """Rigs that take seconds to start and to end: one for all tests, emptied for each."""
    made: dict[str, Rig] = {}
    yield made
    for rig in made.values():
        rig.close()


def pytest_generate_tests(metafunc):
    """Every test of a rig runs over every store: the real dfkv only where one is named."""
    if "rig" in metafunc.fixturenames:
        RealDfkvRig.library = metafunc.config.getoption("--dfkv-lib")
        RealDfkvRig.url = "dfkv://" + metafunc.config.getoption("--dfkv-members")
        names = [name for name in STORES if name != "dfkv-real" or RealDfkvRig.library]
        metafunc.parametrize("rig", names, indirect=True)


@pytest.fixture
def rig(request, tmp_path, kept, tmp_path_factory):
    kind = STORES[request.param]
    if not kind.slow:
        with opened(kind(tmp_path)) as rig:
            yield rig
        return
    if request.param not in kept:
        kept[request.param] = kind(tmp_path_factory.mktemp(request.param))
    kept[request.param].empty()
    yield kept[request.param]


@contextmanager
def running(rig: Rig) -> Iterator[Callable[[Call], CallResult]]:
    """Run the store's calls on threads; yields a function that makes one and waits for it."""
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    runner = StoreRunner(rig.store, 2, fd)
    tickets = count(1)

    def ask(call: Call) -> CallResult:
        ticket = next(tickets)
        runner.submit(ticket, call)
        (result,) = wait_until(runner.collect, "the call returns", every_s=0.001)
        assert (result.ticket, result.error) == (ticket, "")
        return result

    try:
        yield ask
    finally:
        assert runner.join(10)
        os.close(fd)


def fill(rig: Rig, count: int, *shards: int, first: int = 0) -> list[Item]:
    return [rig.memory.item(first + n, *(shards or (4096,)), content=b"x") for n in range(count)]


def blank(rig: Rig, items: list[Item]) -> list[Item]:
    """The same objects, to be read into memory of their own."""
    numbers = [int.from_bytes(item.key[:8], "little") for item in items]
    return [
        rig.memory.item(number, *item.form.shard_bytes)
        for number, item in zip(numbers, items, strict=True)
    ]


@pytest.mark.parametrize("shards", SIZES, ids=str)
def test_what_is_stored_comes_back(rig, shards):
    items = fill(rig, 5, *shards)
    assert put(rig.store, items) == [True] * 5
    wanted = blank(rig, items)
    assert get(rig.store, wanted) == [True] * 5
    assert all(verify_memory(item) for item in wanted)


def test_sizes_mix_in_one_call(rig):
    items = [rig.memory.item(n, *SIZES[n % len(SIZES)], content=b"x") for n in range(24)]
    assert all(put(rig.store, items))
    wanted = blank(rig, items)[::-1]
    assert all(get(rig.store, wanted))
    assert all(verify_memory(item) for item in wanted)


def test_absent_keys_are_misses(rig):
    items = fill(rig, 3)
    put(rig.store, items[:1])
    assert rig.store.exists([item.key for item in items]) == [True, False, False]
    assert get(rig.store, blank(rig, items)) == [True, False, False]
    assert rig.store.exists([]) == []
    assert rig.store.get([]) == []
    assert rig.store.put([], []) == []


def test_a_removed_key_is_a_miss_and_can_be_stored_anew(rig):
    items = fill(rig, 2)
    put(rig.store, items)
    rig.store.remove([items[0].key, key_of(999)])
    assert rig.store.exists([item.key for item in items]) == [False, True]
    assert get(rig.store, blank(rig, items)) == [False, True]
    put(rig.store, items[:1])
    assert get(rig.store, blank(rig, items)) == [True, True]


def test_storing_again_is_no_fault(rig):
    items = fill(rig, 2)
    put(rig.store, items)
    put(rig.store, items)
    assert get(rig.store, blank(rig, items)) == [True, True]


def test_another_form_is_no_hit(rig):
    """The key names the form; whoever asks for another one must not get bytes of this one."""
    (item,) = fill(rig, 1, 8192)
    put(rig.store, [item])
    other = Item(item.key, item.seed, rig.memory.item(50, 4096).address, Form((4096,)))
    assert get(rig.store, [other]) == [False]


def test_a_damaged_value_is_a_miss_and_forgotten(rig):
    items = fill(rig, 3, 16384)
    put(rig.store, items)
    rig.damage(items[1])
    with running(rig) as ask:
        result = ask(Get(tuple(blank(rig, items))))
        assert [crcs is not None for crcs in result.crcs] == [True, False, True]
        assert result.damaged == 1
        found = ask(Find((tuple(item.key for item in items),), stop=False))
        assert found.found == ((True, False, True),)
        assert ask(Put(tuple(items))).stored == (True,) * 3
        assert None not in ask(Get(tuple(blank(rig, items)))).crcs


def test_the_largest_value(rig):
    (item,) = fill(rig, 1, min(rig.store.value_bytes_max, 16 << 20))
    assert put(rig.store, [item]) == [True]
    assert get(rig.store, blank(rig, [item])) == [True]


def test_a_whole_batch(rig):
    items = fill(rig, rig.store.batch_max, 512)
    assert all(put(rig.store, items))
    assert all(rig.store.exists([item.key for item in items]))
    assert all(get(rig.store, blank(rig, items)))


def test_it_outlives_its_process_if_it_says_so(rig):
    if not rig.persistent:
        pytest.skip("this store keeps nothing")
    items = fill(rig, 4)
    put(rig.store, items)
    rig.reopen()
    assert get(rig.store, blank(rig, items)) == [True] * 4


def test_calls_from_many_threads(rig):
    """Writers, readers and removers at once: a hit has the right bytes, whatever the order."""
    items = fill(rig, 60, 8192)
    wrong: list[str] = []
    done = threading.Event()

    def write(part: list[Item]) -> None:
        for _ in range(6):
            put(rig.store, part)
            rig.store.remove([item.key for item in part[::3]])

    def read(wanted: list[Item]) -> None:
        while not done.is_set():
            for item, hit in zip(wanted, get(rig.store, wanted), strict=True):
                if hit and not verify_memory(item):
                    wrong.append(item.key.hex())

    readers = [threading.Thread(target=read, args=(blank(rig, items),)) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(items[n::3],)) for n in range(3)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert wrong == []


def test_a_prefix_is_asked_for_until_its_first_hole(rig):
    items = fill(rig, 3)
    put(rig.store, [items[0], items[2]])
    with running(rig) as ask:
        keys = tuple(item.key for item in items)
        assert ask(Find((keys, ()), stop=False)).found == ((True, False, True), ())
        assert ask(Find((keys,), stop=True)).found[0][:2] == (True, False)


def test_facts_can_be_shown(rig):
    put(rig.store, fill(rig, 2))
    facts = rig.store.facts()
    assert facts
    assert all(isinstance(fact, str | int) for fact in facts.values())


def test_a_header_of_another_key_or_format_is_none():
    item = Item(key_of(1), 1, 0, Form((4, 4)), (1, 2))
    header = value.pack(item)
    assert value.unpack(header, item.key, item.form) == (1, 2)
    assert value.unpack(header, key_of(2), item.form) is None
    assert value.unpack(header, item.key, Form((8,))) is None
    assert value.unpack(header[:-1], item.key, item.form) is None
    for at in range(len(header)):
        broken = header[:at] + bytes([header[at] ^ 1]) + header[at + 1 :]
        assert value.unpack(broken, item.key, item.form) is None


def test_the_patterns_differ():
    a, b = (Item(key_of(n), 0, 0, Form((64,))) for n in (1, 2))
    assert pattern_of(a) != pattern_of(b)

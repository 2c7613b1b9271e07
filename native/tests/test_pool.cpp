// What each operation promises, one at a time.
#include <cstring>
#include <vector>

#include "kvferry/crc32c.h"
#include "pool_fixture.h"

namespace {

using namespace kvferry_test;
using kvferry::kReserveBusy;
using kvferry::kReserveNoSpace;
using kvferry::kReserveReady;

constexpr uint64_t kSlab = 16384;
constexpr uint64_t kPayload = 3900;  // a slot of 4096, four to a slab

void test_life_of_an_entry() {
    PoolFixture pool(4, kSlab, 100);
    const std::vector<Key> keys = keys_of(0, 3);
    const std::vector<int64_t> got = pool.reserve(keys, kPayload, 2);
    CHECK(pool->prefix(pool.view(keys)) == 0);
    CHECK(pool.reserve(keys, kPayload, 2)[0] == kReserveBusy);
    const std::vector<uint32_t> ids(got.begin(), got.end());
    const std::vector<uint32_t> crcs = {7, 8, 9};
    pool->set_crcs(ids, 1, crcs.data());
    pool->commit(ids);
    CHECK(pool->prefix(pool.view(keys)) == 3);
    CHECK(pool.reserve(keys, kPayload, 2)[2] == kReserveReady);
    uint32_t values[3];
    bool stored[3];
    pool->crcs(ids, 1, values, stored);
    CHECK(stored[0] && stored[2] && values[1] == 8);
    pool->crcs(ids, 0, values, stored);
    CHECK(!stored[0] && values[0] == 0);
    const std::vector<uint32_t> leased = pool->lease(pool.view(keys));
    CHECK(leased == ids && pool->stats().leased == 3);
    pool->doom({&ids[1], 1});
    CHECK(pool->prefix(pool.view(keys)) == 1 && pool->stats().doomed == 1);
    CHECK(pool.reserve(keys, kPayload, 2)[1] == kReserveBusy);
    pool.check();
    pool->release(leased);
    CHECK(pool->stats().doomed == 0 && pool->stats().leased == 0);
    CHECK(pool.reserve(keys, kPayload, 2)[1] >= 0);
    pool.check();
}

void test_refusals() {
    PoolFixture pool(2, kSlab, 10);
    const std::vector<Key> keys = keys_of(0, 1);
    using std::invalid_argument;
    CHECK_THROWS(pool.reserve(keys, kSlab, 1), invalid_argument);
    CHECK_THROWS(pool.reserve(keys, ~0ull, 1), invalid_argument);
    CHECK_THROWS(pool.reserve(keys, 0, 1), invalid_argument);
    CHECK_THROWS(pool.reserve(keys, 1, 0), invalid_argument);
    CHECK_THROWS(pool.reserve(keys, 1, 33), invalid_argument);
    const auto id = static_cast<uint32_t>(pool.reserve(keys, kPayload, 1)[0]);
    const std::vector<uint32_t> twice = {id, id};
    const uint32_t outside = 10;
    const uint32_t free_id = id == 5 ? 6 : 5;
    CHECK_THROWS(pool->commit(twice), invalid_argument);
    CHECK_THROWS(pool->abort(twice), invalid_argument);
    CHECK_THROWS(pool->commit({&outside, 1}), invalid_argument);
    CHECK_THROWS(pool->abort({&free_id, 1}), invalid_argument);
    CHECK_THROWS(pool->doom({&id, 1}), invalid_argument);
    CHECK_THROWS(pool->release({&id, 1}), invalid_argument);
    CHECK_THROWS(pool->release({&outside, 1}), invalid_argument);
    uint32_t crc = 0;
    bool stored = false;
    CHECK_THROWS(pool->set_crcs({&id, 1}, 1, &crc), invalid_argument);
    CHECK_THROWS(pool->crcs({&free_id, 1}, 0, &crc, &stored), invalid_argument);
    pool->commit({&id, 1});
    CHECK_THROWS(pool->commit({&id, 1}), invalid_argument);
    CHECK_THROWS(pool->abort({&id, 1}), invalid_argument);
    // One lease, released twice in one call: nothing of it happens.
    CHECK(pool->lease(pool.view(keys)).size() == 1);
    CHECK_THROWS(pool->release(twice), invalid_argument);
    CHECK(pool->stats().leased == 1);
    pool.check();
}

void test_tail_goes_first() {
    PoolFixture pool(4, kSlab, 100);
    pool.put(keys_of(0, 8), kPayload);
    pool.put(keys_of(100, 8), kPayload);
    pool.put(keys_of(200, 3), kPayload);  // takes the tail of the oldest prefix
    CHECK(pool->prefix(pool.view(keys_of(0, 8))) == 5);
    // A leased and released prefix is younger, its tail still older than its head.
    pool->release(pool->lease(pool.view(keys_of(0, 5))));
    pool.put(keys_of(300, 8), kPayload);
    CHECK(pool->prefix(pool.view(keys_of(0, 5))) == 5);
    CHECK(pool->prefix(pool.view(keys_of(100, 8))) == 0);
    CHECK(pool->stats().dropped_before_reuse == 11);
    pool.check();
}

void test_scan_resistance() {
    PoolFixture pool(16, kSlab, 100);
    pool.put(keys_of(0, 32), kPayload);
    pool->release(pool->lease(pool.view(keys_of(0, 32))));
    for (uint64_t n = 1000; n < 2000; n += 8) {
        pool.put(keys_of(n, 8), kPayload);
    }
    // Of 64 slots an eighth stays with what was used again: the head of that prefix.
    CHECK(pool->prefix(pool.view(keys_of(0, 32))) == 8);
    pool.check();
}

void test_same_call_is_safe() {
    PoolFixture pool(2, kSlab, 100);
    pool.put(keys_of(0, 8), kPayload);
    // Eight slots: four stay because this call found them, four are taken, the rest finds none.
    std::vector<Key> keys = keys_of(100, 3);
    const std::vector<Key> old = keys_of(0, 4);
    keys.insert(keys.end(), old.begin(), old.end());
    const std::vector<Key> more = keys_of(200, 3);
    keys.insert(keys.end(), more.begin(), more.end());
    const std::vector<int64_t> got = pool.reserve(keys, kPayload, 1);
    for (size_t i = 0; i < 10; ++i) {
        const bool found = i >= 3 && i < 7;
        CHECK(found ? got[i] == kReserveReady : i < 8 ? got[i] >= 0 : got[i] == kReserveNoSpace);
    }
    CHECK(pool->prefix(pool.view(old)) == 4);
    pool.check();
    const std::vector<Key> same = {key_of(500), key_of(500)};
    pool->abort(std::vector<uint32_t>{static_cast<uint32_t>(got[0])});
    const std::vector<int64_t> dup = pool.reserve(same, kPayload, 1);
    CHECK(dup[0] >= 0 && dup[1] == kReserveBusy);
    pool.check();
}

void test_leased_is_never_evicted() {
    PoolFixture pool(2, kSlab, 100);
    pool.put(keys_of(0, 8), kPayload);
    const std::vector<uint32_t> ids = pool->lease(pool.view(keys_of(0, 8)));
    CHECK(pool.reserve(keys_of(50, 1), kPayload, 1)[0] == kReserveNoSpace);
    CHECK(pool.reserve(keys_of(50, 1), 100, 1)[0] == kReserveNoSpace);  // nor for another class
    pool->release({&ids[0], 1});
    CHECK(pool.reserve(keys_of(50, 1), kPayload, 1)[0] >= 0);
    CHECK(pool->prefix(pool.view(keys_of(1, 7))) == 7);
    pool.check();
}

void test_index_full() {
    PoolFixture pool(4, kSlab, 3);
    pool.put(keys_of(0, 3), 1000);
    pool.put(keys_of(10, 1), 2000);  // another class: the coldest entry of all goes
    CHECK(pool->prefix(pool.view(keys_of(0, 2))) == 2 && !pool.has(key_of(2)));
    CHECK(pool->stats().ready == 3 && pool->stats().evictions == 1);
    pool.check();
}

void test_a_left_model_gives_way() {
    PoolFixture pool(8, kSlab, 1000);
    pool.put(keys_of(0, 32), kPayload);  // all eight slabs
    pool->release(pool->lease(pool.view(keys_of(0, 10))));
    for (uint64_t n = 0; n < 200; ++n) {
        const std::vector<Key> keys = keys_of(1000 + n, 1);
        pool.put(keys, 7000);  // two to a slab
        pool->release(pool->lease(pool.view(keys)));
    }
    CHECK(pool->prefix(pool.view(keys_of(0, 1))) == 0 && pool->stats().ready == 16);
    pool.check();
    // A scan of a third class does not push out what is in use.
    for (uint64_t n = 0; n < 200; ++n) {
        pool.put(keys_of(5000 + n, 1), 1000);
    }
    CHECK(pool->stats().ready > 14);
    CHECK(pool.has(key_of(1199)) && pool.has(key_of(1190)));
    pool.check();
}

void test_classes() {
    PoolFixture pool(200, 128 * 512, 10'000);
    for (uint64_t c = 0; c < 64; ++c) {
        pool.put(keys_of(c, 1), 512 * (c + 1));
    }
    CHECK_THROWS(pool.reserve(keys_of(100, 1), 512 * 65, 1), kvferry::PoolFull);
    pool.check();
    CHECK(pool->clear() == 64 && pool->stats().slabs_free == 200);
    pool.put(keys_of(100, 1), 512 * 65);  // an empty class changes its size
    pool.restart();
    CHECK(pool.has(key_of(100)));
    pool.check();
}

void test_restart() {
    PoolFixture pool(8, kSlab, 100);
    const std::vector<uint32_t> ids = pool.put(keys_of(0, 8), kPayload);
    for (size_t i = 0; i < ids.size(); ++i) {
        std::memset(pool.payload(ids[i]), static_cast<int>(i + 1), kPayload);
    }
    pool->lease(pool.view(keys_of(0, 4)));
    pool->doom({&ids[3], 1});
    pool.reserve(keys_of(50, 2), kPayload, 1);
    pool.restart();
    CHECK(pool->recovered().kept == 7 && pool->recovered().freed == 3);
    CHECK(pool->recovered().dropped == 0 && !pool->recovered().clean);
    CHECK(pool->stats().leased == 0 && pool->stats().writing == 0);
    CHECK(pool->prefix(pool.view(keys_of(0, 8))) == 3);
    CHECK(pool.payload(ids[7])[100] == std::byte{8});
    pool.check();
    // The order of eviction survives: what was leased stays longest.
    pool.put(keys_of(100, 29), kPayload);
    CHECK(pool->prefix(pool.view(keys_of(0, 3))) == 3 && !pool.has(key_of(7)));
    pool->mark_clean();
    pool.restart();
    CHECK(pool->recovered().clean);
    pool.check();
}

// The header differs in one place: each time a refusal, never a crash.
void test_damaged_header() {
    PoolFixture pool(4, kSlab, 100);
    const size_t sealed = offsetof(kvferry::Header, checksum) + sizeof(uint32_t);
    for (size_t at = 0; at < sealed; ++at) {
        pool->base()[at] ^= std::byte{0x10};
        CHECK_THROWS(Pool::attach(pool.fd(), 2), kvferry::PoolFormatError);
        pool->base()[at] ^= std::byte{0x10};
    }
    Pool::attach(pool.fd(), 2);
    CHECK(ftruncate(pool.fd(), static_cast<off_t>(pool.bytes() + 4096)) == 0);
    CHECK_THROWS(Pool::attach(pool.fd(), 2), kvferry::PoolFormatError);
    const int empty = memfd_create("kvferry-test", 0);
    CHECK_THROWS(Pool::attach(empty, 2), kvferry::PoolFormatError);
    CHECK(ftruncate(empty, 1 << 20) == 0);
    CHECK_THROWS(Pool::attach(empty, 2), kvferry::PoolFormatError);
    close(empty);
}

// Entries that cannot be are dropped, the others kept.
void test_damaged_entries() {
    PoolFixture pool(4, kSlab, 100);
    const std::vector<uint32_t> ids = pool.put(keys_of(0, 8), kPayload);
    auto* entries = reinterpret_cast<kvferry::Entry*>(pool->base() + pool->layout().entries_at);
    entries[ids[0]].slot = 0xFFFFFF00;
    entries[ids[1]].slot += 1;
    entries[ids[2]].size_class = 77;
    entries[ids[3]].shards = 0;
    entries[ids[4]].state = 9;
    entries[ids[5]].key = entries[ids[6]].key;
    entries[99] = entries[ids[7]];
    entries[99].key = key_of(1234);
    pool.restart();
    CHECK(pool->recovered().kept == 2 && pool->recovered().dropped == 7);
    pool.check();
    pool.put(keys_of(300, 16), kPayload);
    pool.check();
}

void test_many_leases() {
    PoolFixture pool(2, kSlab, 10);
    const std::vector<uint32_t> ids = pool.put(keys_of(0, 2), kPayload);
    for (int i = 0; i < 65'535; ++i) {
        CHECK(pool->lease(pool.view(keys_of(1, 1))).size() == 1);
    }
    CHECK(pool->lease(pool.view(keys_of(0, 2))).size() == 1);
    CHECK(pool->lease(pool.view(keys_of(1, 1))).empty());
    pool.check();
}

}  // namespace

// Keys of one home, over several lines and around the table's end: lookups of many at once, which
// read no entry, answer as those that do.
void test_crowded_lines() {
    for (const uint64_t high : {uint64_t{0}, ~uint64_t{0}}) {
        PoolFixture pool(8, 16384, 64);
        std::vector<Key> keys;
        for (uint64_t n = 0; n < 32; ++n) {
            keys.push_back({n << 3, high});
        }
        const std::vector<uint32_t> ids = pool.put({keys.begin(), keys.begin() + 24}, 256);
        const std::vector<int64_t> writing = pool.reserve({keys[24]}, 256, 1);
        const auto expect = [&](const std::vector<bool>& wanted) {
            bool found[32];
            pool->present(PoolFixture::view(keys), found);
            CHECK(std::equal(wanted.begin(), wanted.end(), found));
            pool.check();
        };
        std::vector<bool> wanted(32, false);
        std::fill_n(wanted.begin(), 24, true);
        expect(wanted);
        const std::vector<uint32_t> leased = pool->lease(KeyView(&keys[0], 2));
        pool->doom({&ids[1], 2});  // leased, and not
        wanted[1] = wanted[2] = false;
        expect(wanted);
        const uint32_t committed = static_cast<uint32_t>(writing[0]);
        pool->commit({&committed, 1});
        wanted[24] = true;
        expect(wanted);
        pool->release(leased);
        expect(wanted);
        pool.restart();
        expect(wanted);
    }
}

// What differs only where the buckets do not look counts as present, and cannot be leased.
void test_a_lookalike_is_never_leased() {
    PoolFixture pool(8, 16384, 64);
    const Key stored = key_of(1);
    pool.put({stored}, 256);
    const Key lookalike{stored.low ^ (uint64_t{1} << 40), stored.high};
    CHECK(pool.has(lookalike));
    CHECK(pool->lease(KeyView(&lookalike, 1)).empty());
    CHECK(pool->evicted_age_ms(lookalike) == -1 && !pool->being_written(lookalike));
    const std::vector<uint32_t> ids = pool.put({lookalike}, 256);  // beside the other
    CHECK(pool->lease(KeyView(&lookalike, 1)) == ids);
    pool.check();
}

int main() {
    test_life_of_an_entry();
    test_refusals();
    test_tail_goes_first();
    test_scan_resistance();
    test_same_call_is_safe();
    test_leased_is_never_evicted();
    test_index_full();
    test_a_left_model_gives_way();
    test_classes();
    test_restart();
    test_damaged_header();
    test_damaged_entries();
    test_many_leases();
    test_crowded_lines();
    test_a_lookalike_is_never_leased();
    return 0;
}

// Owners, quotas and pins: what each promises, then random operations against a plain map. A
// failing line and the seed in main() reproduce it.
#include <algorithm>
#include <random>
#include <unordered_map>

#include "pool_fixture.h"

namespace {

using namespace kvferry_test;
using kvferry::OwnerOf;
using kvferry::Pin;
using kvferry::Seen;

constexpr uint64_t kSlab = 8192;
constexpr uint64_t kPayload = 800;  // and the trailer: slots of 1,024 bytes, 8 a slab
constexpr uint64_t kSlot = 1024;

OwnerOf owner_of(uint64_t n, uint64_t slots = 0) {
    return {n == 0 ? Key{} : key_of(1'000'000 + n), slots * kSlot, static_cast<uint16_t>(n + 40)};
}

std::vector<int64_t> reserve(PoolFixture& pool, const std::vector<Key>& keys, const OwnerOf& owner,
                             uint64_t payload = kPayload) {
    std::vector<int64_t> out(keys.size());
    pool->reserve(PoolFixture::view(keys), payload, 1, out.data(), owner);
    return out;
}

std::vector<uint32_t> put(PoolFixture& pool, const std::vector<Key>& keys, const OwnerOf& owner) {
    std::vector<uint32_t> ids;
    for (const int64_t id : reserve(pool, keys, owner)) {
        if (id >= 0) {
            ids.push_back(static_cast<uint32_t>(id));
        }
    }
    pool->commit(ids);
    pool.check();
    return ids;
}

std::vector<Seen> scan_all(PoolFixture& pool, uint64_t keys_max) {
    std::vector<Seen> seen;
    for (uint64_t at = 0; at < keys_max; at = pool->scan(at, 7, &seen)) {
    }
    return seen;
}

size_t present(PoolFixture& pool, const std::vector<Key>& keys) {
    return static_cast<size_t>(
        std::count_if(keys.begin(), keys.end(), [&](const Key& key) { return pool.has(key); }));
}

void an_owner_over_its_quota_evicts_its_own() {
    PoolFixture pool(8, kSlab, 200);
    const std::vector<Key> others = keys_of(0, 20);
    put(pool, others, owner_of(1));
    for (uint64_t n = 100; n < 140; n += 5) {
        put(pool, keys_of(n, 5), owner_of(2, 10));
    }
    CHECK(present(pool, others) == 20);            // though they are older
    CHECK(present(pool, keys_of(100, 40)) == 10);  // and the newest of its own are left
    CHECK(present(pool, keys_of(130, 10)) == 10);
    CHECK(pool->stats().quota_evictions == 30);
    CHECK(put(pool, keys_of(200, 15), owner_of(2, 10)).size() == 10);  // the head of a prefix
    CHECK(reserve(pool, keys_of(300, 1), {key_of(9), 100, 0})[0] == kvferry::kReserveNoSpace);
    CHECK(put(pool, keys_of(400, 30), owner_of(2)).size() == 30);  // bounded no more
    put(pool, keys_of(500, 2), owner_of(3, 2));
    CHECK(reserve(pool, keys_of(510, 1), owner_of(3, 2), 4000)[0] == kvferry::kReserveNoSpace);
    CHECK(present(pool, keys_of(500, 2)) == 2);  // what could never fit costs nothing
}

void what_is_pinned_hard_stays_and_softly_goes_last() {
    PoolFixture pool(2, kSlab, 100);
    const std::vector<uint32_t> hard = put(pool, keys_of(0, 4), owner_of(1));
    const std::vector<uint32_t> soft = put(pool, keys_of(10, 4), owner_of(1));
    pool->pin(hard, Pin::kHard);
    pool->pin(soft, Pin::kSoft);
    put(pool, keys_of(20, 8), owner_of(2));
    put(pool, keys_of(30, 8), owner_of(2));  // what is not pinned makes room for it
    CHECK(present(pool, keys_of(10, 4)) == 4 && present(pool, keys_of(30, 8)) == 8);
    const std::vector<uint32_t> held = pool->lease(PoolFixture::view(keys_of(30, 8)));
    CHECK(put(pool, keys_of(40, 8), owner_of(2)).size() == 4);  // now the soft ones do, no others
    CHECK(present(pool, keys_of(10, 4)) == 0 && present(pool, keys_of(0, 4)) == 4);
    pool->release(held);
    CHECK(pool->stats().pinned_hard == 4 && pool->stats().pinned_soft == 0);
    CHECK(pool->clear() == 12 && present(pool, keys_of(0, 4)) == 4);
    const std::vector<uint32_t> again = pool->lease(PoolFixture::view(keys_of(0, 4)));
    std::vector<uint32_t> twice = again;
    twice.insert(twice.end(), again.begin(), again.end());
    pool->lease(PoolFixture::view(keys_of(0, 4)));
    pool->release(twice);  // the same entry twice in one call, pinned: in no list all the same
    pool.check();
    pool->pin(hard, Pin::kNone);
    CHECK(pool->clear() == 4);
    pool.check();
}

void a_restart_keeps_owners_and_pins() {
    PoolFixture pool(4, kSlab, 100);
    put(pool, keys_of(0, 3), owner_of(1));
    const std::vector<uint32_t> pinned = put(pool, keys_of(10, 5), owner_of(2));
    pool->pin({pinned.data(), 2}, Pin::kHard);
    pool->pin({pinned.data() + 2, 1}, Pin::kSoft);
    reserve(pool, keys_of(20, 2), owner_of(3));  // never committed
    pool.restart();
    pool.check();
    const std::vector<kvferry::Holding> held = pool->holdings();
    CHECK(held.size() == 2 && held[0].name == owner_of(1).name && held[0].entries == 3);
    CHECK(held[1].name == owner_of(2).name && held[1].bytes == 5 * kSlot);
    CHECK(pool->stats().pinned_hard == 2 && pool->stats().pinned_soft == 1);
    CHECK(pool->stats().pinned_hard_bytes == 2 * kSlot);
    const std::vector<Seen> seen = scan_all(pool, 100);
    CHECK(seen.size() == 8);
    for (const Seen& one : seen) {
        CHECK(one.age_s < 60 && one.bytes == kSlot && one.group == one.owner + 40);
        CHECK(one.owner == (one.key == key_of(0) || one.key == key_of(1) || one.key == key_of(2)
                                ? held[0].owner
                                : held[1].owner));
    }
}

void more_owners_than_rows_are_nobodys() {
    PoolFixture pool(40, kSlab, 400);
    for (uint64_t n = 1; n < kvferry::kOwnersMax; ++n) {
        put(pool, keys_of(n, 1), owner_of(n));
    }
    put(pool, keys_of(500, 1), owner_of(500, 1));
    put(pool, keys_of(501, 3), owner_of(500, 1));  // no row, so no quota
    CHECK(pool->holdings()[0].name == Key{} && pool->holdings()[0].entries == 4);
    const std::vector<uint32_t> ids = pool->lease(PoolFixture::view(keys_of(7, 1)));
    pool->doom(ids);
    pool->release(ids);
    put(pool, keys_of(600, 2), owner_of(600, 1));  // the row that is free now
    CHECK(present(pool, keys_of(600, 2)) == 1);
}

struct Known {
    uint32_t id;
    uint64_t owner;
    bool ready;
    uint32_t leases;
    Pin pin;
};

class Model {
  public:
    explicit Model(uint64_t seed) : pool_(12, kSlab, 120), random_(seed) {}

    void run(int steps) {
        for (int i = 0; i < steps; ++i) {
            step();
            compare();
        }
        CHECK(evictions_ > 0 && quota_evictions_ > 0);
    }

  private:
    // Owners 1 and 2 have quotas, 0 is nobody.
    static constexpr uint64_t kQuotas[4] = {0, 20, 5, 0};
    uint64_t pick(uint64_t below) { return random_() % below; }

    void step() {
        switch (pick(10)) {
            case 0:
            case 1:
            case 2:
                return store();
            case 3:
                return finish();
            case 4:
                return lease();
            case 5:
            case 6:
            case 7:
                return release();
            case 8:
                return pin();
            default:
                return pick(20) == 0 ? restart() : doom();
        }
    }

    void store() {
        const uint64_t owner = pick(4);
        const uint64_t first = pick(300);
        const uint64_t count = 1 + pick(5);
        const uint64_t payload = pick(3) == 0 ? 3 * kPayload : kPayload;
        const std::vector<int64_t> got =
            reserve(pool_, keys_of(first, count), owner_of(owner, kQuotas[owner]), payload);
        forget_evicted(owner, first, count);
        for (uint64_t i = 0; i < count; ++i) {
            if (got[i] >= 0) {
                CHECK(known_.count(first + i) == 0);
                known_[first + i] = {static_cast<uint32_t>(got[i]), owner, false, 0, Pin::kNone};
            }
        }
        uint64_t bytes = 0;
        for (const kvferry::Holding& held : pool_->holdings()) {
            bytes = held.name == owner_of(owner).name ? held.bytes : bytes;
        }
        // Over it only with what was there before and may not be evicted: then nothing was added.
        const bool added = std::any_of(got.begin(), got.end(), [](int64_t id) { return id >= 0; });
        CHECK(kQuotas[owner] == 0 || bytes <= kQuotas[owner] * kSlot || !added);
    }

    void forget_evicted(uint64_t by, uint64_t first, uint64_t count) {
        for (auto it = known_.begin(); it != known_.end();) {
            const bool gone = it->second.ready && !pool_.has(key_of(it->first));
            const bool in_batch = it->first >= first && it->first < first + count;
            CHECK(!gone || (it->second.leases == 0 && it->second.pin != Pin::kHard && !in_batch));
            const bool soft = gone && it->second.pin == Pin::kSoft && kQuotas[by] == 0;
            CHECK(!soft || !plain_left(first, count));
            evictions_ += gone ? 1 : 0;
            it = gone ? known_.erase(it) : std::next(it);
        }
    }
    // Whole slabs of plain entries of any class: a soft pin should not have gone before them.
    bool plain_left(uint64_t first, uint64_t count) {
        std::unordered_map<uint64_t, bool> plain;  // by slab
        std::vector<uint64_t> offsets(1);
        for (const auto& [n, one] : known_) {
            if (one.ready && !pool_.has(key_of(n))) {
                continue;
            }
            pool_->payload_offsets({&one.id, 1}, offsets.data());
            const uint64_t slab = (offsets[0] - pool_->layout().arena_at) / kSlab;
            const bool evictable = one.ready && one.leases == 0 && one.pin == Pin::kNone &&
                                   (n < first || n >= first + count);
            plain[slab] = evictable && (plain.count(slab) == 0 || plain[slab]);
        }
        return std::any_of(plain.begin(), plain.end(), [](const auto& one) { return one.second; });
    }

    void finish() {
        for (auto it = known_.begin(); it != known_.end();) {
            if (it->second.ready || pick(3) == 0) {
                ++it;
            } else if (pick(4) == 0) {
                pool_->abort({&it->second.id, 1});
                it = known_.erase(it);
            } else {
                pool_->commit({&it->second.id, 1});
                it->second.ready = true;
                ++it;
            }
        }
    }

    void lease() {
        const std::vector<Key> keys = keys_of(pick(300), 2);
        const std::vector<uint32_t> ids = pool_->lease(PoolFixture::view(keys), pick(2) == 0);
        for (const uint32_t id : ids) {
            leased_.push_back(id);
            find(id)->leases += 1;
        }
    }
    void release() {
        if (leased_.empty()) {
            return;
        }
        const size_t at = pick(leased_.size());
        const uint32_t id = leased_[at];
        leased_.erase(leased_.begin() + static_cast<long>(at));
        pool_->release({&id, 1});
        if (Known* one = find(id)) {
            one->leases -= 1;
        }
    }
    void pin() {
        const auto it = known_.find(pick(300));
        if (it != known_.end()) {
            const auto level = static_cast<Pin>(pick(5) == 0 ? 2 : pick(2));
            pool_->pin({&it->second.id, 1}, level);
            it->second.pin = it->second.ready ? level : Pin::kNone;
        }
    }
    void doom() {
        const auto it = known_.find(pick(300));
        if (it != known_.end() && it->second.ready && it->second.leases == 0) {
            pool_->doom({&it->second.id, 1});
            known_.erase(it);
        }
    }
    void restart() {
        quota_evictions_ += pool_->stats().quota_evictions;
        pool_.restart();
        leased_.clear();
        std::erase_if(known_, [](const auto& item) { return !item.second.ready; });
        for (auto& item : known_) {
            item.second.leases = 0;
        }
    }

    Known* find(uint32_t id) {
        const auto it = std::find_if(known_.begin(), known_.end(),
                                     [&](const auto& item) { return item.second.id == id; });
        return it == known_.end() ? nullptr : &it->second;
    }

    void compare() {
        pool_.check();
        uint64_t hard = 0;
        uint64_t soft = 0;
        uint64_t entries[4] = {};
        for (const auto& [n, one] : known_) {
            CHECK(pool_.has(key_of(n)) == one.ready);
            hard += one.pin == Pin::kHard ? 1 : 0;
            soft += one.pin == Pin::kSoft ? 1 : 0;
            ++entries[one.owner];
        }
        CHECK(pool_->stats().pinned_hard == hard && pool_->stats().pinned_soft == soft);
        for (const kvferry::Holding& held : pool_->holdings()) {
            for (uint64_t owner = 0; owner < 4; ++owner) {
                CHECK(held.name != owner_of(owner).name || held.entries == entries[owner]);
            }
        }
    }

    PoolFixture pool_;
    std::mt19937_64 random_;
    uint64_t evictions_ = 0;
    uint64_t quota_evictions_ = 0;
    std::unordered_map<uint64_t, Known> known_;
    std::vector<uint32_t> leased_;
};

}  // namespace

// Seconds of the wall clock, kept with the entries: told when they are evicted, also after a
// restart, and not when they are dropped in another way.
void evicted_entries_tell_how_long_they_were_there() {
    PoolFixture pool(4, kSlab, 100);
    const auto stored_before = [&](uint32_t id, uint32_t seconds) {
        auto* notes = reinterpret_cast<kvferry::Note*>(pool->base() + pool->layout().notes_at);
        notes[id].stored_s -= seconds;
    };
    const std::vector<uint32_t> ids = put(pool, keys_of(0, 5), owner_of(1));
    stored_before(ids[0], 45);
    stored_before(ids[1], 500);
    stored_before(ids[2], 30 * 86'400);
    stored_before(ids[3], static_cast<uint32_t>(-1000));  // the clock was set back since
    pool->doom({&ids[4], 1});
    CHECK(pool->residence().sum() == 0.0);
    pool.restart();
    CHECK(pool->evict_to(0, 100) == 4);
    const std::vector<uint64_t>& counts = pool->residence().counts();
    const std::vector<uint64_t> wanted = {1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1};
    CHECK(counts == wanted);
    CHECK(pool->residence().sum() >= 45 + 500 + 30 * 86'400);
    put(pool, keys_of(10, 2), owner_of(1));
    CHECK(pool->clear() == 2 && pool->residence().counts() == wanted);
}

int main() {
    evicted_entries_tell_how_long_they_were_there();
    an_owner_over_its_quota_evicts_its_own();
    what_is_pinned_hard_stays_and_softly_goes_last();
    a_restart_keeps_owners_and_pins();
    more_owners_than_rows_are_nobodys();
    for (uint64_t seed = 0; seed < 8; ++seed) {
        Model(seed).run(3'000);
    }
    return 0;
}

// Random operations against a plain map: states, leases, what may be evicted, and that a hit has
// the bytes of its key. The seed is printed on failure by CHECK's line and the argument here.
#include <algorithm>
#include <cstring>
#include <random>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvferry/crc32c.h"
#include "pool_fixture.h"

namespace {

using namespace kvferry_test;
using kvferry::EntryState;

struct Known {
    EntryState state;
    uint32_t id;
    uint32_t leases;
};

class Model {
  public:
    Model(uint64_t seed, uint64_t slabs, uint64_t keys_max, uint64_t universe)
        : pool_(slabs, 8192, keys_max), random_(seed), universe_(universe) {}

    void run(int steps) {
        for (int i = 0; i < steps; ++i) {
            step();
            if (i % 50 == 0) {
                compare();
            }
        }
        compare();
        CHECK(evictions_ > 0);
    }

  private:
    static constexpr uint64_t kPayloads[4] = {300, 1000, 1900, 8000};
    static uint64_t payload_of(uint64_t n) { return kPayloads[n % 4]; }

    uint64_t pick(uint64_t below) { return random_() % below; }

    void step() {
        const uint64_t dice = pick(1000);
        if (dice < 350) {
            reserve();
        } else if (dice < 600) {
            finish();
        } else if (dice < 780) {
            lease();
        } else if (dice < 960) {
            release();
        } else if (dice < 994) {
            doom();
        } else if (dice < 996) {
            clear();
        } else {
            restart();
        }
    }

    // Chunks of one size in sequence: n, n + 4, n + 8, ...
    std::vector<uint64_t> pick_prefix() {
        std::vector<uint64_t> numbers;
        const uint64_t first = pick(universe_);
        for (uint64_t i = 0, length = 1 + pick(6); i < length; ++i) {
            numbers.push_back(first + 4 * i);
        }
        return numbers;
    }
    static std::vector<Key> to_keys(const std::vector<uint64_t>& numbers) {
        std::vector<Key> keys;
        std::transform(numbers.begin(), numbers.end(), std::back_inserter(keys), key_of);
        return keys;
    }

    void reserve() {
        const std::vector<uint64_t> numbers = pick_prefix();
        const uint64_t evictions = pool_->stats().evictions;
        uint64_t gone_count = 0;
        const auto shards = static_cast<uint32_t>(1 + numbers[0] % 3);
        const std::vector<int64_t> got =
            pool_.reserve(to_keys(numbers), payload_of(numbers[0]), shards);
        const std::unordered_set<uint64_t> batch(numbers.begin(), numbers.end());
        for (auto it = known_.begin(); it != known_.end();) {
            const bool gone =
                it->second.state == EntryState::kReady && !pool_.has(key_of(it->first));
            CHECK(!gone || (it->second.leases == 0 && batch.count(it->first) == 0));
            it = gone ? known_.erase(it) : std::next(it);
            gone_count += gone ? 1 : 0;
        }
        CHECK(pool_->stats().evictions == evictions + gone_count);
        evictions_ += gone_count;
        for (size_t i = 0; i < numbers.size(); ++i) {
            const auto it = known_.find(numbers[i]);
            if (it != known_.end()) {
                const bool ready = it->second.state == EntryState::kReady;
                CHECK(got[i] == (ready ? kvferry::kReserveReady : kvferry::kReserveBusy));
            } else if (got[i] >= 0) {
                known_[numbers[i]] = {EntryState::kWriting, static_cast<uint32_t>(got[i]), 0};
            } else {
                CHECK(got[i] == kvferry::kReserveNoSpace);
            }
        }
    }

    void write(uint64_t n, uint32_t id) {
        std::memset(pool_.payload(id), static_cast<int>(n), payload_of(n));
        uint32_t seed = 0;
        pool_->seeds({&id, 1}, &seed);
        const uint32_t crc = kvferry::crc32c(pool_.payload(id), payload_of(n), seed);
        pool_->set_crcs({&id, 1}, 0, &crc);
    }
    void verify(uint64_t n, uint32_t id) {
        uint32_t seed = 0;
        uint32_t crc = 0;
        bool stored = false;
        pool_->seeds({&id, 1}, &seed);
        pool_->crcs({&id, 1}, 0, &crc, &stored);
        CHECK(stored && kvferry::crc32c(pool_.payload(id), payload_of(n), seed) == crc);
        CHECK(pool_.payload(id)[payload_of(n) - 1] == static_cast<std::byte>(n));
    }

    // Commits or aborts some of what is being written.
    void finish() {
        std::vector<uint64_t> commits;
        std::vector<uint32_t> commit_ids;
        std::vector<uint32_t> abort_ids;
        for (auto it = known_.begin(); it != known_.end();) {
            const bool writing = it->second.state == EntryState::kWriting;
            const uint64_t fate = writing ? pick(5) : 0;
            if (fate == 4) {
                abort_ids.push_back(it->second.id);
                it = known_.erase(it);
                continue;
            }
            if (fate > 0) {
                write(it->first, it->second.id);
                it->second.state = EntryState::kReady;
                commit_ids.push_back(it->second.id);
            }
            ++it;
        }
        pool_->commit(commit_ids);
        pool_->abort(abort_ids);
    }

    void lease() {
        const std::vector<uint64_t> numbers = pick_prefix();
        const std::vector<Key> keys = to_keys(numbers);
        size_t expected = 0;
        for (; expected < numbers.size(); ++expected) {
            const auto it = known_.find(numbers[expected]);
            if (it == known_.end() || it->second.state != EntryState::kReady) {
                break;
            }
        }
        CHECK(pool_->prefix(pool_.view(keys)) == expected);
        const std::vector<uint32_t> ids = pool_->lease(pool_.view(keys));
        CHECK(ids.size() == expected);
        for (size_t i = 0; i < expected; ++i) {
            CHECK(known_[numbers[i]].id == ids[i]);
            ++known_[numbers[i]].leases;
            verify(numbers[i], ids[i]);
        }
        if (!ids.empty()) {
            leases_.push_back({ids.begin(), ids.end()});
        }
    }

    void release() {
        if (leases_.empty()) {
            return;
        }
        const size_t at = pick(leases_.size());
        const std::vector<uint32_t> ids = leases_[at];
        leases_.erase(leases_.begin() + static_cast<long>(at));
        pool_->release(ids);
        for (auto it = known_.begin(); it != known_.end();) {
            const bool mine = std::count(ids.begin(), ids.end(), it->second.id) > 0;
            it->second.leases -= mine ? 1 : 0;
            const bool freed = it->second.state == EntryState::kDoomed && it->second.leases == 0;
            it = freed ? known_.erase(it) : std::next(it);
        }
    }

    void doom() {
        const auto it = known_.find(pick(universe_));
        if (it == known_.end() || it->second.state == EntryState::kWriting) {
            return;
        }
        pool_->doom({&it->second.id, 1});
        if (it->second.leases == 0) {
            known_.erase(it);
        } else {
            it->second.state = EntryState::kDoomed;
        }
    }

    void clear() {
        const uint64_t before = known_.size();
        std::erase_if(known_, [](const auto& item) {
            return item.second.state == EntryState::kReady && item.second.leases == 0;
        });
        CHECK(pool_->clear() == before - known_.size());
    }

    void restart() {
        const uint64_t before = known_.size();
        std::erase_if(known_,
                      [](const auto& item) { return item.second.state != EntryState::kReady; });
        for (auto& item : known_) {
            item.second.leases = 0;
        }
        leases_.clear();
        pool_.restart();
        CHECK(pool_->recovered().kept == known_.size());
        CHECK(pool_->recovered().freed == before - known_.size());
        CHECK(pool_->recovered().dropped == 0);
    }

    void compare() {
        pool_.check();
        uint64_t counts[4] = {};
        uint64_t leased = 0;
        for (const auto& [n, entry] : known_) {
            ++counts[static_cast<size_t>(entry.state)];
            leased += entry.leases > 0 ? 1 : 0;
            CHECK(pool_.has(key_of(n)) == (entry.state == EntryState::kReady));
            if (entry.state == EntryState::kReady) {
                verify(n, entry.id);
            }
        }
        const kvferry::PoolStats stats = pool_->stats();
        CHECK(stats.writing == counts[1] && stats.ready == counts[2] && stats.doomed == counts[3]);
        CHECK(stats.leased == leased);
    }

    PoolFixture pool_;
    std::mt19937_64 random_;
    uint64_t universe_;
    uint64_t evictions_ = 0;
    std::unordered_map<uint64_t, Known> known_;
    std::vector<std::vector<uint32_t>> leases_;
};

}  // namespace

int main() {
    for (uint64_t seed = 0; seed < 6; ++seed) {
        Model(seed, 24, 500, 400).run(6'000);         // short of space
        Model(seed + 100, 300, 120, 400).run(4'000);  // short of entries
        Model(seed + 200, 5, 64, 60).run(3'000);      // short of slabs for the classes
    }
    return 0;
}

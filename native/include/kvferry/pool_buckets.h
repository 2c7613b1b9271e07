// Key -> entry id: linear probing over 8-byte buckets from the start of a cache line,
// backward-shift deletion, batched lookups. A line is compared at once; few are full, so few probes
// read a second.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvferry/key_mix.h"
#include "kvferry/pool_format.h"

namespace kvferry {

class Buckets {
  public:
    Buckets(Bucket* buckets, uint64_t count, const Entry* entries)
        : buckets_(buckets), count_(count), entries_(entries) {}

    // Keys per group of find_group: enough cache misses in flight, few wasted behind a miss.
    static constexpr size_t kGroup = 256;

    // ids[i] = the entry under keys[i] in whatever state, or kNone. keys.size() <= kGroup.
    void find_group(KeyView keys, uint32_t* ids) const;
    uint32_t find(const Key& key) const;
    void prefetch(const Key& key) const { __builtin_prefetch(&buckets_[home(key)], 1); }

    // The key of entries[id] must not be in the table.
    void insert(uint32_t id);
    // The entry's key must still be in place.
    void erase(uint32_t id);
    void clear();

    // For Pool::check.
    uint64_t count() const { return count_; }
    uint32_t id_at(uint64_t at) const { return buckets_[at].id_plus_one - 1; }  // kNone: empty

  private:
    // The first bucket of a line.
    uint64_t home(const Key& key) const {
        const uint64_t lines = count_ / kLineBuckets;
        return static_cast<uint64_t>((static_cast<unsigned __int128>(key.high) * lines) >> 64) *
               kLineBuckets;
    }
    uint64_t after(uint64_t at) const { return at + 1 == count_ ? 0 : at + 1; }
    uint64_t distance(uint64_t from, uint64_t to) const {
        return to >= from ? to - from : to + count_ - from;
    }
    static uint32_t tag_of(const Key& key) { return static_cast<uint32_t>(key.low); }
    // First bucket from `at` on with this tag; the empty one behind them when there is none.
    uint64_t scan(uint64_t at, uint32_t tag) const {
        while (buckets_[at].id_plus_one != 0 && buckets_[at].tag != tag) {
            at = after(at);
        }
        return at;
    }
    // The same from the start of a line.
    uint64_t scan_line(uint64_t at, uint32_t tag) const;
    uint32_t resolve(uint64_t at, const Key& key) const;

    Bucket* buckets_;
    uint64_t count_;
    const Entry* entries_;
};

}  // namespace kvferry

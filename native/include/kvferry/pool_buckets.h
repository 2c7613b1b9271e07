// Key -> entry id and whether it is ready: linear probing over 8-byte buckets from the start of a
// cache line, backward-shift deletion, batched lookups. A line is compared at once; few are full,
// so few probes read a second.
//
// The buckets lie in this process's own memory, which gets huge pages where shared memory often
// does not: with many keys a probe misses the caches, and should not miss the TLB as well.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvferry/key_mix.h"
#include "kvferry/pool_format.h"
#include "kvferry/pool_segment.h"

namespace kvferry {

struct Bucket {
    uint32_t entry;  // id + 1, and kReadyBit while it is ready; 0 = empty
    uint32_t tag;
};
inline constexpr size_t kLineBuckets = 64 / sizeof(Bucket);  // of a cache line
inline constexpr uint32_t kReadyBit = 1u << 31;
static_assert(kKeysMax < kReadyBit);

class Buckets {
  public:
    // Of memory, for so many keys: load below 0.5 with every entry in use, so that one line in
    // twenty is full.
    static constexpr uint64_t bytes_for(uint64_t keys_max) {
        return (2 * keys_max + kLineBuckets) / kLineBuckets * kLineBuckets * sizeof(Bucket);
    }
    // Throws std::system_error where the memory cannot be had.
    Buckets(uint64_t keys_max, const Entry* entries);

    // Keys per group of find_group and ready_group: enough cache misses in flight, few wasted
    // behind a miss.
    static constexpr size_t kGroup = 256;

    // ids[i] = the entry under keys[i] in whatever state, or kNone. keys.size() <= kGroup.
    void find_group(KeyView keys, uint32_t* ids) const;
    uint32_t find(const Key& key) const;
    // Whether a ready entry has the tag and, but for full lines, the home of keys[i]; reads no
    // entry. Never wrong about a key that is there, about one in 10^9 that is not.
    void ready_group(KeyView keys, bool* ready) const;
    void prefetch(const Key& key) const { __builtin_prefetch(&buckets_[home(key)], 1); }

    // The key of entries[id] must not be in the table.
    void insert(uint32_t id, bool ready);
    // The entry's key must be in the table.
    void set_ready(uint32_t id, bool ready);
    // The entry's key must still be in place.
    void erase(uint32_t id);

    // For Pool::check.
    uint64_t count() const { return count_; }
    uint32_t id_at(uint64_t at) const { return id_of(buckets_[at]); }  // kNone: empty
    bool ready_at(uint64_t at) const { return (buckets_[at].entry & kReadyBit) != 0; }

  private:
    static uint32_t id_of(const Bucket& bucket) { return (bucket.entry & ~kReadyBit) - 1; }
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
        while (buckets_[at].entry != 0 && buckets_[at].tag != tag) {
            at = after(at);
        }
        return at;
    }
    // The same from the start of a line.
    uint64_t scan_line(uint64_t at, uint32_t tag) const;
    uint64_t place_of(uint32_t id) const;
    uint32_t resolve(uint64_t at, const Key& key) const;

    uint64_t count_;
    Segment memory_;
    Bucket* buckets_;
    const Entry* entries_;
};

}  // namespace kvferry

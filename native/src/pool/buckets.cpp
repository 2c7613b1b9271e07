#include "kvferry/pool_buckets.h"

#include <bit>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvferry {
namespace {

// Bit 2k: bucket k of the line is empty; bit 2k + 1: it has this tag.
inline uint32_t compare_line(const Bucket* line, uint32_t tag) {
#if defined(__SSE2__)
    const __m128i wanted = _mm_set1_epi64x(static_cast<int64_t>(uint64_t{tag} << 32));
    const auto* pairs = reinterpret_cast<const __m128i*>(line);
    const auto compare = [&](size_t i) {
        return _mm_cmpeq_epi32(_mm_load_si128(&pairs[i]), wanted);
    };
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(
        _mm_packs_epi32(compare(0), compare(1)), _mm_packs_epi32(compare(2), compare(3)))));
#else
    uint32_t found = 0;
    for (size_t k = 0; k < kLineBuckets; ++k) {
        found |= static_cast<uint32_t>(line[k].entry == 0) << (2 * k);
        found |= static_cast<uint32_t>(line[k].tag == tag) << (2 * k + 1);
    }
    return found;
#endif
}

// A prefetch into the level-2 cache: more of them can be under way than into level 1, which the
// loads behind them can bear.
inline void prefetch_soon(const void* address) {
    __builtin_prefetch(address, 0, 2);
}

}  // namespace

Buckets::Buckets(uint64_t keys_max, const Entry* entries)
    : count_(bytes_for(keys_max) / sizeof(Bucket)),
      memory_(Segment::own(bytes_for(keys_max))),
      buckets_(reinterpret_cast<Bucket*>(memory_.base())),
      entries_(entries) {}

uint64_t Buckets::scan_line(uint64_t at, uint32_t tag) const {
    for (;;) {
        if (const uint32_t found = compare_line(&buckets_[at], tag); found != 0) {
            return at + static_cast<uint64_t>(std::countr_zero(found)) / 2;
        }
        at = after(at + kLineBuckets - 1);
    }
}

// Three steps per key, some keys apart, so that their cache misses overlap: fetch its line, pick a
// candidate by its tag and fetch that entry, compare the keys.
void Buckets::find_group(KeyView keys, uint32_t* ids) const {
    constexpr size_t kApart = 32;
    uint64_t at[kGroup];
    const size_t n = keys.size();
    for (size_t i = 0; i < n + 2 * kApart; ++i) {
        if (i < n) {
            at[i] = home(keys[i]);
            prefetch_soon(&buckets_[at[i]]);
        }
        if (const size_t k = i - kApart; k < n) {
            at[k] = scan_line(at[k], tag_of(keys[k]));
            if (const uint32_t candidate = id_of(buckets_[at[k]]); candidate != kNone) {
                prefetch_soon(&entries_[candidate]);
            }
        }
        if (const size_t k = i - 2 * kApart; k < n) {
            ids[k] = resolve(at[k], keys[k]);
        }
    }
}

// As above without the entries. The keys whose line is full wait for their next one together.
void Buckets::ready_group(KeyView keys, bool* ready) const {
    constexpr size_t kApart = 64;
    uint64_t at[kGroup];
    uint32_t full[kGroup];
    size_t full_count = 0;
    const size_t n = keys.size();
    for (size_t i = 0; i < n + kApart; ++i) {
        if (i < n) {
            at[i] = home(keys[i]);
            prefetch_soon(&buckets_[at[i]]);
        }
        if (const size_t k = i - kApart; k < n) {
            if (const uint32_t found = compare_line(&buckets_[at[k]], tag_of(keys[k]))) {
                ready[k] = ready_at(at[k] + static_cast<uint64_t>(std::countr_zero(found)) / 2);
            } else {
                at[k] = after(at[k] + kLineBuckets - 1);
                prefetch_soon(&buckets_[at[k]]);
                full[full_count++] = static_cast<uint32_t>(k);
            }
        }
    }
    for (size_t i = 0; i < full_count; ++i) {
        const uint32_t k = full[i];
        ready[k] = ready_at(scan_line(at[k], tag_of(keys[k])));
    }
}

uint32_t Buckets::find(const Key& key) const {
    return resolve(scan_line(home(key), tag_of(key)), key);
}

uint32_t Buckets::resolve(uint64_t at, const Key& key) const {
    while (buckets_[at].entry != 0) {
        const uint32_t id = id_of(buckets_[at]);
        if (entries_[id].key == key) {
            return id;
        }
        at = scan(after(at), tag_of(key));
    }
    return kNone;
}

uint64_t Buckets::place_of(uint32_t id) const {
    uint64_t at = home(entries_[id].key);
    while (id_of(buckets_[at]) != id) {
        at = after(at);
    }
    return at;
}

void Buckets::insert(uint32_t id, bool ready) {
    const Key& key = entries_[id].key;
    uint64_t at = home(key);
    while (buckets_[at].entry != 0) {
        at = after(at);
    }
    buckets_[at] = {(id + 1) | (ready ? kReadyBit : 0), tag_of(key)};
}

void Buckets::set_ready(uint32_t id, bool ready) {
    Bucket& bucket = buckets_[place_of(id)];
    bucket.entry = ready ? bucket.entry | kReadyBit : bucket.entry & ~kReadyBit;
}

void Buckets::erase(uint32_t id) {
    uint64_t hole = place_of(id);
    // Move back whatever the hole would cut off from its home bucket.
    for (uint64_t at = after(hole); buckets_[at].entry != 0; at = after(at)) {
        const uint64_t its_home = home(entries_[id_of(buckets_[at])].key);
        const uint64_t from_home = distance(its_home, at);
        const uint64_t from_hole = distance(hole, at);
        if (from_home >= from_hole) {
            buckets_[hole] = buckets_[at];
            hole = at;
        }
    }
    buckets_[hole] = {0, 0};
}

}  // namespace kvferry

#include <cstring>

#include "kvferry/pool_buckets.h"

namespace kvferry {

// Three sweeps, so that the misses of a group overlap: fetch the buckets, pick a candidate by its
// tag and fetch its entry, compare the keys.
void Buckets::find_group(KeyView keys, uint32_t* ids) const {
    uint64_t at[kGroup];
    const size_t n = keys.size();
    for (size_t i = 0; i < n; ++i) {
        at[i] = home(keys[i]);
        __builtin_prefetch(&buckets_[at[i]]);
    }
    for (size_t i = 0; i < n; ++i) {
        at[i] = scan(at[i], tag_of(keys[i]));
        if (const uint32_t candidate = buckets_[at[i]].id_plus_one; candidate != 0) {
            __builtin_prefetch(&entries_[candidate - 1]);
        }
    }
    for (size_t i = 0; i < n; ++i) {
        ids[i] = resolve(at[i], keys[i]);
    }
}

uint32_t Buckets::find(const Key& key) const {
    return resolve(scan(home(key), tag_of(key)), key);
}

uint32_t Buckets::resolve(uint64_t at, const Key& key) const {
    while (buckets_[at].id_plus_one != 0) {
        const uint32_t id = buckets_[at].id_plus_one - 1;
        if (entries_[id].key == key) {
            return id;
        }
        at = scan(after(at), tag_of(key));
    }
    return kNone;
}

void Buckets::insert(uint32_t id) {
    const Key& key = entries_[id].key;
    uint64_t at = home(key);
    while (buckets_[at].id_plus_one != 0) {
        at = after(at);
    }
    buckets_[at] = {id + 1, tag_of(key)};
}

void Buckets::erase(uint32_t id) {
    uint64_t hole = home(entries_[id].key);
    while (buckets_[hole].id_plus_one != id + 1) {
        hole = after(hole);
    }
    // Move back whatever the hole would cut off from its home bucket.
    for (uint64_t at = after(hole); buckets_[at].id_plus_one != 0; at = after(at)) {
        const uint64_t its_home = home(entries_[buckets_[at].id_plus_one - 1].key);
        const uint64_t from_home = distance(its_home, at);
        const uint64_t from_hole = distance(hole, at);
        if (from_home >= from_hole) {
            buckets_[hole] = buckets_[at];
            hole = at;
        }
    }
    buckets_[hole] = {0, 0};
}

void Buckets::clear() {
    std::memset(buckets_, 0, count_ * sizeof(Bucket));
}

}  // namespace kvferry

#include "kvferry/pool.h"

#include <algorithm>

namespace kvferry {
namespace {

constexpr uint16_t kLeasesMax = 0xFFFF;

[[noreturn]] void refuse(const char* verb, uint32_t id, const char* why) {
    throw std::invalid_argument(std::string(verb) + ": entry " + std::to_string(id) + " " + why);
}

const char* name_of(EntryState state) {
    constexpr const char* kNames[] = {"is free", "is writing", "is ready", "is doomed"};
    return kNames[static_cast<size_t>(state)];
}

}  // namespace

Pool::Pool(Segment segment, const SegmentLayout& layout)
    : segment_(std::move(segment)),
      layout_(layout),
      entries_(reinterpret_cast<Entry*>(segment_.base() + layout.entries_at)),
      links_(reinterpret_cast<Links*>(segment_.base() + layout.links_at)),
      notes_(reinterpret_cast<Note*>(segment_.base() + layout.notes_at)),
      buckets_(layout.keys_max, entries_),
      slabs_(layout.slabs, layout.slab_bytes),
      owners_(header().owners),
      lists_(entries_, links_, notes_, slabs_, owners_) {}

PoolStats Pool::stats() const {
    PoolStats stats;
    stats.total_bytes = layout_.slabs * layout_.slab_bytes;
    stats.used_bytes = slabs_.used_bytes();
    stats.ready = counts_[static_cast<size_t>(EntryState::kReady)];
    stats.writing = counts_[static_cast<size_t>(EntryState::kWriting)];
    stats.doomed = counts_[static_cast<size_t>(EntryState::kDoomed)];
    stats.leased = leased_;
    stats.keys_max = layout_.keys_max;
    stats.evictions = evictions_;
    stats.dropped_before_reuse = dropped_before_reuse_;
    stats.slabs = layout_.slabs;
    stats.slabs_free = slabs_.free_slabs();
    stats.quota_evictions = quota_evictions_;
    stats.pinned_soft = pinned_soft_;
    stats.pinned_hard = pinned_hard_;
    stats.pinned_hard_bytes = pinned_hard_units_ * kUnitBytes;
    return stats;
}

std::vector<uint32_t> Pool::find_ready_prefix(KeyView keys) const {
    std::vector<uint32_t> ids;
    ids.reserve(keys.size());
    uint32_t found[Buckets::kGroup];
    for (size_t at = 0; at < keys.size(); at += Buckets::kGroup) {
        const size_t n = std::min(Buckets::kGroup, keys.size() - at);
        buckets_.find_group(keys.from(at, n), found);
        for (size_t i = 0; i < n; ++i) {
            if (found[i] == kNone || entries_[found[i]].load_state() != EntryState::kReady) {
                return ids;
            }
            ids.push_back(found[i]);
        }
    }
    return ids;
}

size_t Pool::prefix(KeyView keys) const {
    bool ready[Buckets::kGroup];
    for (size_t at = 0; at < keys.size(); at += Buckets::kGroup) {
        const size_t n = std::min(Buckets::kGroup, keys.size() - at);
        buckets_.ready_group(keys.from(at, n), ready);
        if (const bool* end = std::find(ready, ready + n, false); end != ready + n) {
            return at + static_cast<size_t>(end - ready);
        }
    }
    return keys.size();
}

void Pool::refresh(KeyView keys) {
    const std::vector<uint32_t> ids = find_ready_prefix(keys);
    for (size_t i = ids.size(); i-- > 0;) {
        Entry& entry = entries_[ids[i]];
        touch(entry);
        const uint8_t list = entry.flags & kInList;
        if (list != 0) {  // what is leased or pinned hard is in none
            lists_.remove(ids[i]);
            lists_.push(ids[i], list);
        }
    }
}

bool Pool::being_written(const Key& key) const {
    const uint32_t id = buckets_.find(key);
    return id != kNone && entries_[id].load_state() == EntryState::kWriting;
}

void Pool::present(KeyView keys, bool* out) const {
    for (size_t at = 0; at < keys.size(); at += Buckets::kGroup) {
        const size_t n = std::min(Buckets::kGroup, keys.size() - at);
        buckets_.ready_group(keys.from(at, n), out + at);
    }
}

std::vector<uint32_t> Pool::lease(KeyView keys, bool use) {
    std::vector<uint32_t> ids = find_ready_prefix(keys);
    const uint64_t last_use = use_ + ids.size();  // of the head: it is evicted last
    for (size_t i = 0; i < ids.size(); ++i) {
        Entry& entry = entries_[ids[i]];
        if (entry.leases == kLeasesMax) {
            ids.resize(i);
            break;
        }
        leased_ += entry.leases == 0 ? 1 : 0;
        ++entry.leases;
        lists_.remove(ids[i]);
        if (use) {
            entry.flags |= kLeasedOnce;
            used_at(entry, last_use - i);
        }
    }
    use_ = use ? last_use : use_;
    return ids;
}

void Pool::release(Ids ids) {
    std::vector<uint32_t> ended;  // each once, where its last lease falls
    ended.reserve(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
        const bool held = ids[i] < layout_.keys_max && entries_[ids[i]].leases > 0;
        if (!held) {
            for (size_t done = 0; done < i; ++done) {
                ++entries_[ids[done]].leases;
            }
            refuse("release", ids[i], "has no lease left to release");
        }
        if (--entries_[ids[i]].leases == 0) {
            ended.push_back(ids[i]);
        }
    }
    leased_ -= ended.size();
    for (size_t i = ended.size(); i-- > 0;) {
        Entry& entry = entries_[ended[i]];
        if (entry.load_state() == EntryState::kDoomed) {
            free_entry(ended[i]);
            continue;
        }
        touch(entry);
        if (const uint8_t list = list_for(entry); list != 0) {
            lists_.push(ended[i], list);
        }
    }
}

void Pool::commit(Ids ids) {
    require_state(ids, EntryState::kWriting, "commit");
    require_distinct(ids, "commit");
    const uint32_t now_s = unix_s();
    for (size_t i = ids.size(); i-- > 0;) {
        Entry& entry = entries_[ids[i]];
        touch(entry);
        notes_[ids[i]].stored_s = now_s;
        move_state(entry, EntryState::kReady);
        buckets_.set_ready(ids[i], true);
        lists_.push(ids[i], kInProbation);
    }
}

void Pool::abort(Ids ids) {
    require_state(ids, EntryState::kWriting, "abort");
    require_distinct(ids, "abort");
    for (const uint32_t id : ids) {
        free_entry(id);
    }
}

void Pool::doom(Ids ids) {
    for (const uint32_t id : ids) {
        if (known(id).load_state() == EntryState::kWriting) {
            refuse("doom", id, "is writing: abort it");
        }
    }
    for (const uint32_t id : ids) {
        Entry& entry = entries_[id];
        if (entry.load_state() != EntryState::kReady) {
            continue;  // given twice, or doomed by another reader
        }
        if (entry.leases > 0) {
            move_state(entry, EntryState::kDoomed);
            buckets_.set_ready(id, false);
        } else {
            lists_.remove(id);
            free_entry(id);
        }
    }
}

uint64_t Pool::clear() {
    uint64_t dropped = 0;
    for (uint8_t c = 0; c < kClassesMax; ++c) {
        for (const bool soft : {false, true}) {
            for (uint32_t id = lists_.coldest(c, soft); id != kNone; id = lists_.coldest(c, soft)) {
                lists_.remove(id);
                free_entry(id);
                ++dropped;
            }
        }
    }
    return dropped;
}

void Pool::payload_offsets(Ids ids, uint64_t* out) const {
    for (size_t i = 0; i < ids.size(); ++i) {
        out[i] = layout_.arena_at + known(ids[i]).slot * uint64_t{kUnitBytes};
    }
}

void Pool::set_crcs(Ids ids, uint32_t shard, const uint32_t* crcs) {
    for (const uint32_t id : ids) {
        if (shard >= known(id).shards) {
            refuse("set_crcs", id, "does not have that shard");
        }
    }
    for (size_t i = 0; i < ids.size(); ++i) {
        Trailer& stored = trailer(entries_[ids[i]]);
        stored.crcs[shard] = crcs[i];
        publish_fence();  // the bit says that the value is there
        stored.valid_mask |= 1u << shard;
    }
}

void Pool::crcs(Ids ids, uint32_t shard, uint32_t* out, bool* stored) const {
    for (size_t i = 0; i < ids.size(); ++i) {
        const Entry& entry = known(ids[i]);
        if (shard >= entry.shards) {
            refuse("crcs", ids[i], "does not have that shard");
        }
        const Trailer& from = trailer(entry);
        stored[i] = (from.valid_mask >> shard & 1) != 0;
        out[i] = stored[i] ? from.crcs[shard] : 0;
    }
}

void Pool::seeds(Ids ids, uint32_t* out) const {
    for (size_t i = 0; i < ids.size(); ++i) {
        out[i] = crc_seed(known(ids[i]).key);
    }
}

void Pool::mark_clean() {
    header().clean = 1;
}

Entry& Pool::known(uint32_t id) const {
    if (id >= layout_.keys_max) {
        throw std::invalid_argument("entry " + std::to_string(id) +
                                    " is out of range: the pool has " +
                                    std::to_string(layout_.keys_max));
    }
    if (entries_[id].load_state() == EntryState::kFree) {
        throw std::invalid_argument("entry " + std::to_string(id) + " is free");
    }
    return entries_[id];
}

void Pool::require_state(Ids ids, EntryState wanted, const char* verb) const {
    for (const uint32_t id : ids) {
        if (const EntryState state = known(id).load_state(); state != wanted) {
            refuse(verb, id, name_of(state));
        }
    }
}

void Pool::require_distinct(Ids ids, const char* verb) {
    std::vector<uint32_t> sorted(ids.begin(), ids.end());
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) {
        refuse(verb, *twice, "is given twice");
    }
}

void Pool::touch(Entry& entry) {
    used_at(entry, ++use_);
}

void Pool::used_at(Entry& entry, uint64_t use) {
    entry.set_last_use(use);
    uint64_t& newest_use = slabs_.of(entry.slot).newest_use;
    newest_use = std::max(newest_use, use);
}

void Pool::move_state(Entry& entry, EntryState next) {
    --counts_[static_cast<size_t>(entry.load_state())];
    ++counts_[static_cast<size_t>(next)];
    entry.store_state(next);
}

// The entry is in no list. Its slot may be given away only once the state is stored.
void Pool::free_entry(uint32_t id) {
    Entry& entry = entries_[id];
    move_state(entry, EntryState::kFree);
    publish_fence();
    buckets_.erase(id);
    count_pin(entry, false);
    Owner& owner = owners_.at(notes_[id].owner);
    --owner.entries;
    owner.units -= slabs_.in_class(entry.size_class).units;
    slabs_.give(entry.slot);
    push_free_id(id);
}

void Pool::push_free_id(uint32_t id) {
    links_[id].next = free_id_;
    free_id_ = id;
}

uint32_t Pool::pop_free_id() {
    const uint32_t id = free_id_;
    free_id_ = links_[id].next;
    return id;
}

Trailer& Pool::trailer(const Entry& entry) const {
    const uint64_t units = slabs_.in_class(entry.size_class).units;
    const uint64_t end = (entry.slot + units) * kUnitBytes;
    return *reinterpret_cast<Trailer*>(segment_.base() + layout_.arena_at + end - sizeof(Trailer));
}

}  // namespace kvferry

// Reservation and eviction.
//
// A class that needs a slot takes, in this order: a free slot of its own; a free slab; a slab of
// another class that nobody used since this class's own coldest entry was used (so a model that
// left gives its memory to the one that came); its own coldest entry; and, when it has nothing to
// evict, the coldest slab whose entries may all go. What is pinned softly goes when all of that
// gave nothing. An owner at its quota makes room among its own entries first.
#include <algorithm>

#include "kvferry/pool.h"

namespace kvferry {

void Pool::reserve(KeyView keys, uint64_t payload_bytes, uint32_t shards, int64_t* out,
                   const OwnerOf& owner) {
    if (shards == 0 || shards > kShardsMax) {
        throw std::invalid_argument("shards is " + std::to_string(shards) + ": it must be 1 .. " +
                                    std::to_string(kShardsMax));
    }
    if (payload_bytes == 0) {
        throw std::invalid_argument("payload_bytes is 0: a stripe has at least one byte");
    }
    const bool fits = payload_bytes <= layout_.slab_bytes &&
                      slot_units_for(payload_bytes) * kUnitBytes <= layout_.slab_bytes;
    if (!fits) {
        throw std::invalid_argument(
            "payload_bytes is " + std::to_string(payload_bytes) + " (and " +
            std::to_string(sizeof(Trailer)) + " for checksums): more than a slab, slab_bytes is " +
            std::to_string(layout_.slab_bytes) + "; create the pool with larger slab_bytes");
    }
    const auto units = static_cast<uint32_t>(slot_units_for(payload_bytes));
    Reservation call{slabs_.class_for(units, header().classes),
                     static_cast<uint8_t>(shards),
                     static_cast<uint16_t>(owners_.row_of(owner.name)),
                     owner.group,
                     units,
                     0};
    if (call.owner != 0 && owner.quota_bytes != 0) {
        call.quota_units = std::max<uint64_t>(owner.quota_bytes / kUnitBytes, 1);
    }
    const std::vector<uint32_t> held = hold_found(keys, out);
    for (size_t i = 0; i < keys.size(); ++i) {
        if (out[i] == kReserveNoSpace) {
            out[i] = reserve_one(keys[i], call);
        }
    }
    for (size_t i = held.size(); i-- > 0;) {  // back, as just used, tail first
        Entry& entry = entries_[held[i]];
        touch(entry);
        lists_.push(held[i], list_for(entry));
    }
}

// Answers the keys that are there and takes the ready ones out of their lists, so that this call
// evicts none of them. What is missing reads kReserveNoSpace.
std::vector<uint32_t> Pool::hold_found(KeyView keys, int64_t* out) {
    std::vector<uint32_t> held;
    held.reserve(keys.size());
    uint32_t found[Buckets::kGroup];
    for (size_t at = 0; at < keys.size(); at += Buckets::kGroup) {
        const size_t n = std::min(Buckets::kGroup, keys.size() - at);
        buckets_.find_group(keys.from(at, n), found);
        for (size_t i = 0; i < n; ++i) {
            if (found[i] == kNone) {
                out[at + i] = kReserveNoSpace;
                continue;
            }
            const Entry& entry = entries_[found[i]];
            const bool ready = entry.load_state() == EntryState::kReady;
            out[at + i] = ready ? kReserveReady : kReserveBusy;
            if ((entry.flags & kInList) != 0) {
                lists_.remove(found[i]);
                held.push_back(found[i]);
            }
        }
    }
    return held;
}

int64_t Pool::reserve_one(const Key& key, Reservation& call) {
    if (buckets_.find(key) != kNone) {
        return kReserveBusy;  // twice in this batch
    }
    if (!make_way_within_quota(call)) {
        return kReserveNoSpace;
    }
    if (free_id_ == kNone && !evict_one(call.size_class, false) && !evict_anywhere(false) &&
        !evict_anywhere(true)) {
        return kReserveNoSpace;
    }
    const uint32_t id = pop_free_id();
    const uint32_t slot = take_slot(id, call);
    if (slot == kNone) {
        push_free_id(id);
        return kReserveNoSpace;
    }
    Entry& entry = entries_[id];
    entry.key = key;
    entry.slot = slot;
    entry.set_last_use(0);
    entry.leases = 0;
    entry.flags = 0;
    entry.size_class = call.size_class;
    entry.shards = call.shards;
    trailer(entry).valid_mask = 0;
    notes_[id] = {0, call.owner, call.group};
    Owner& owner = owners_.at(call.owner);
    ++owner.entries;
    owner.units += call.units;
    move_state(entry, EntryState::kWriting);
    buckets_.insert(id, false);
    return id;
}

uint32_t Pool::take_slot(uint32_t id, Reservation& call) {
    for (;;) {
        const uint32_t slot = slabs_.take(call.size_class, id);
        if (slot != kNone) {
            return slot;
        }
        if (slabs_.grow(call.size_class)) {
            continue;
        }
        // One search over the slabs a call, and one more after each success.
        call.may_steal_older = call.may_steal_older && steal_older_slab(call.size_class);
        if (call.may_steal_older || evict_one(call.size_class, false) ||
            steal_coldest_slab(false) || evict_one(call.size_class, true) ||
            steal_coldest_slab(true)) {
            continue;
        }
        return kNone;
    }
}

bool Pool::make_way_within_quota(const Reservation& call) {
    const Owner& owner = owners_.at(call.owner);
    if (call.quota_units == 0) {
        return true;
    }
    if (call.units > call.quota_units) {
        return false;
    }
    while (owner.units + call.units > call.quota_units) {
        const uint32_t id = lists_.coldest_of(call.owner, call.size_class);
        if (id == kNone) {
            return false;
        }
        evict(id);
        ++quota_evictions_;
    }
    return true;
}

bool Pool::evict_one(uint8_t size_class, bool soft) {
    const uint32_t id = lists_.coldest(size_class, soft);
    if (id == kNone) {
        return false;
    }
    evict(id);
    return true;
}

// For want of an entry, not of space: the coldest of all classes.
bool Pool::evict_anywhere(bool soft) {
    uint32_t coldest = kNone;
    for (uint8_t c = 0; c < kClassesMax; ++c) {
        const uint32_t id = lists_.coldest(c, soft);
        if (id != kNone &&
            (coldest == kNone || entries_[id].last_use() < entries_[coldest].last_use())) {
            coldest = id;
        }
    }
    if (coldest == kNone) {
        return false;
    }
    evict(coldest);
    return true;
}

uint64_t Pool::evict_to(uint64_t used_bytes, uint64_t most) {
    uint64_t evicted = 0;
    while (evicted < most && slabs_.used_bytes() > used_bytes && evict_anywhere(false)) {
        ++evicted;
    }
    return evicted;
}

// Compares like with like, so that a scan in one class does not push out another's entries that
// proved their worth: a slab with protected entries has to be older than this class's own
// protected ones.
bool Pool::steal_older_slab(uint8_t size_class) {
    const auto use_of = [&](uint32_t id) { return id == kNone ? 0 : entries_[id].last_use(); };
    const uint64_t own = use_of(lists_.coldest(size_class));
    const uint64_t own_safe = use_of(lists_.tail(size_class, kInProtected));
    Slab* oldest = nullptr;
    for (Slab& slab : slabs_.all()) {
        const uint64_t limit = slab.listed_safe > 0 ? own_safe : own;
        if (slab.evictable() && slab.listed_soft == 0 && slab.size_class != size_class &&
            slab.newest_use < limit &&
            (oldest == nullptr || slab.newest_use < oldest->newest_use)) {
            oldest = &slab;
        }
    }
    if (oldest == nullptr) {
        return false;
    }
    evict_slab(*oldest);
    return true;
}

bool Pool::steal_coldest_slab(bool soft) {
    Slab* oldest = nullptr;
    for (Slab& slab : slabs_.all()) {
        if (slab.evictable() && (soft || slab.listed_soft == 0) &&
            (oldest == nullptr || slab.newest_use < oldest->newest_use)) {
            oldest = &slab;
        }
    }
    if (oldest == nullptr) {
        return false;
    }
    evict_slab(*oldest);
    return true;
}

void Pool::evict_slab(Slab& slab) {
    std::vector<uint32_t> owners;
    owners.reserve(slab.used);
    for (const uint32_t owner : slab.owners) {
        if ((owner & Slabs::kFreeSlot) == 0) {
            owners.push_back(owner);
        }
    }
    for (const uint32_t id : owners) {
        evict(id);
    }
}

void Pool::evict(uint32_t id) {
    lists_.remove(id);
    ++evictions_;
    dropped_before_reuse_ += (entries_[id].flags & kLeasedOnce) == 0 ? 1 : 0;
    residence_s_.observe(age_s(notes_[id], unix_s()));
    ghosts_.note(entries_[id].key);
    if (evicted_.size() < kEvictedMax) {
        evicted_.push_back(entries_[id].key);
    }
    free_entry(id);
}

}  // namespace kvferry

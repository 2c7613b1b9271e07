// How a pool starts: formatted anew, or taken over from an owner that ended in whatever way.
#include <algorithm>
#include <cstring>

#include "kvferry/pool.h"

namespace kvferry {

std::unique_ptr<Pool> Pool::create(int fd, uint64_t segment_bytes, uint64_t slab_bytes,
                                   uint64_t keys_max, uint64_t epoch, int threads) {
    const SegmentLayout layout = plan_segment(segment_bytes, slab_bytes, keys_max);
    if (threads < 1) {
        throw std::invalid_argument("threads is " + std::to_string(threads) +
                                    ": at least one has to touch the pages");
    }
    if (const uint64_t there = Segment::file_bytes(fd); there != segment_bytes) {
        throw std::invalid_argument("segment_bytes is " + std::to_string(segment_bytes) +
                                    ", the descriptor has " + std::to_string(there) +
                                    " bytes: size it first");
    }
    Segment segment(fd, segment_bytes);
    segment.populate(0, segment_bytes, threads);
    std::unique_ptr<Pool> pool(new Pool(std::move(segment), layout));
    pool->format();
    pool->header().epoch = epoch;
    return pool;
}

std::unique_ptr<Pool> Pool::attach(int fd, uint64_t epoch) {
    const uint64_t bytes = Segment::file_bytes(fd);
    if (bytes < sizeof(Header)) {
        throw PoolFormatError("no pool: the segment has " + std::to_string(bytes) +
                              " bytes, less than a header");
    }
    Segment segment(fd, bytes);
    const Header& header = *reinterpret_cast<const Header*>(segment.base());
    validate_header(header, bytes);
    const SegmentLayout layout = header.layout;
    std::unique_ptr<Pool> pool(new Pool(std::move(segment), layout));
    pool->recovered_.clean = pool->header().clean == 1;
    pool->header().clean = 0;
    pool->header().epoch = epoch;
    pool->recover();
    return pool;
}

// Links, notes and the arena need no zeros: none is read before it is written.
void Pool::format() {
    header().magic.fill(0);
    publish_fence();
    std::memset(static_cast<void*>(entries_), 0, layout_.keys_max * sizeof(Entry));
    for (uint64_t id = layout_.keys_max; id-- > 0;) {
        push_free_id(static_cast<uint32_t>(id));
    }
    counts_[static_cast<size_t>(EntryState::kFree)] = layout_.keys_max;
    publish_fence();
    seal_header(header(), layout_);
}

void Pool::recover() {
    constexpr uint64_t kAhead = 32;
    slabs_.load_classes(header().classes);
    owners_.find_end();
    std::vector<uint32_t> kept;
    for (uint64_t i = layout_.keys_max; i-- > 0;) {
        const auto id = static_cast<uint32_t>(i);
        Entry& entry = entries_[id];
        if (i >= kAhead) {
            buckets_.prefetch(entries_[i - kAhead].key);
        }
        const EntryState state = entry.load_state();
        entry.leases = 0;
        if (state == EntryState::kReady && adopt(id)) {
            kept.push_back(id);
            continue;
        }
        if (state == EntryState::kWriting || state == EntryState::kDoomed) {
            ++recovered_.freed;
        } else if (state != EntryState::kFree) {
            ++recovered_.dropped;
        }
        entry.store_state(EntryState::kFree);
        entry.flags = 0;
        push_free_id(id);
    }
    recovered_.kept = kept.size();
    counts_[static_cast<size_t>(EntryState::kReady)] = kept.size();
    counts_[static_cast<size_t>(EntryState::kFree)] = layout_.keys_max - kept.size();
    slabs_.finish_claims();
    relink(kept);
}

// False for an entry that cannot be: somebody else wrote to the segment.
bool Pool::adopt(uint32_t id) {
    const Entry& entry = entries_[id];
    if (entry.shards == 0 || entry.shards > kShardsMax || buckets_.find(entry.key) != kNone ||
        !slabs_.claim(entry.slot, entry.size_class, id)) {
        return false;
    }
    buckets_.insert(id, true);
    return true;
}

// Owners, pins, and eviction order by last use. What was leased at the end belongs to protected.
void Pool::relink(const std::vector<uint32_t>& kept) {
    struct Aged {
        uint64_t use;
        uint32_t id;
    };
    std::vector<Aged> order;
    order.reserve(kept.size());
    for (const uint32_t id : kept) {
        order.push_back({entries_[id].last_use(), id});
    }
    std::sort(order.begin(), order.end(), [](const Aged& a, const Aged& b) {
        return a.use != b.use ? a.use < b.use : a.id > b.id;
    });
    for (const Aged& aged : order) {
        Entry& entry = entries_[aged.id];
        const uint8_t was_in = entry.flags & kInList;
        const bool leased = was_in == 0 && (entry.flags & kLeasedOnce) != 0;
        const bool safe = was_in == kInProtected || leased;
        entry.flags &= kLeasedOnce | kPins;
        slabs_.of(entry.slot).newest_use = aged.use;
        Note& note = notes_[aged.id];
        note.owner = static_cast<uint16_t>(owners_.known(note.owner));
        Owner& owner = owners_.at(note.owner);
        ++owner.entries;
        owner.units += slabs_.in_class(entry.size_class).units;
        count_pin(entry, true);
        if ((entry.flags & kPins) == 0) {
            lists_.push(aged.id, safe ? kInProtected : kInProbation);
        } else if (const uint8_t list = list_for(entry); list != 0) {
            lists_.push(aged.id, list);
        }
    }
    use_ = order.empty() ? 0 : order.back().use;
}

}  // namespace kvferry

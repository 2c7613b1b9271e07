// Whose entries are there, how old, and how they are pinned.
#include <time.h>

#include <algorithm>

#include "kvferry/pool.h"

namespace kvferry {

uint32_t Pool::unix_s() {
    timespec now{};
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    return static_cast<uint32_t>(now.tv_sec);
}

// The clock may have been set back.
uint32_t Pool::age_s(const Note& note, uint32_t now_s) {
    return now_s > note.stored_s ? now_s - note.stored_s : 0;
}

void Pool::pin(Ids ids, Pin level) {
    for (const uint32_t id : ids) {
        known(id);
    }
    for (const uint32_t id : ids) {
        Entry& entry = entries_[id];
        if (entry.load_state() != EntryState::kReady) {
            continue;
        }
        lists_.remove(id);
        count_pin(entry, false);
        entry.flags &= static_cast<uint8_t>(~kPins);
        entry.flags |= level == Pin::kHard ? kPinHard : level == Pin::kSoft ? kPinSoft : 0;
        count_pin(entry, true);
        touch(entry);
        if (const uint8_t list = list_for(entry); list != 0 && entry.leases == 0) {
            lists_.push(id, list);
        }
    }
}

uint64_t Pool::scan(uint64_t first, uint64_t count, std::vector<Seen>* out) const {
    const uint64_t end = std::min(layout_.keys_max, first + std::min(count, layout_.keys_max));
    const uint32_t now = unix_s();
    for (uint64_t i = first; i < end; ++i) {
        const auto id = static_cast<uint32_t>(i);
        const Entry& entry = entries_[id];
        if (entry.load_state() != EntryState::kReady) {
            continue;
        }
        const Note& note = notes_[id];
        const Pin pin = (entry.flags & kPinHard) != 0   ? Pin::kHard
                        : (entry.flags & kPinSoft) != 0 ? Pin::kSoft
                                                        : Pin::kNone;
        const uint64_t bytes = slabs_.in_class(entry.size_class).units * uint64_t{kUnitBytes};
        out->push_back({id, entry.key, note.owner, note.group, age_s(note, now), bytes, pin});
    }
    return end;
}

std::vector<Holding> Pool::holdings() const {
    std::vector<Holding> found;
    for (uint32_t row = 0; row < owners_.end(); ++row) {
        if (const Owner& owner = owners_.at(row); owner.entries > 0) {
            const Key name = row == 0 ? Key{} : owners_.name(row);
            found.push_back({row, name, owner.entries, owner.units * kUnitBytes});
        }
    }
    return found;
}

// The list of an entry that is ready and not leased; 0: none. What was held for its own sake only
// (written to another tier) is as cold as it was.
uint8_t Pool::list_for(const Entry& entry) {
    if ((entry.flags & kPins) != 0) {
        return (entry.flags & kPinHard) != 0 ? 0 : kInSoft;
    }
    return (entry.flags & kLeasedOnce) != 0 ? kInProtected : kInProbation;
}

void Pool::count_pin(const Entry& entry, bool more) {
    const uint64_t one = more ? 1 : ~0ull;  // minus one
    if ((entry.flags & kPinHard) != 0) {
        pinned_hard_ += one;
        pinned_hard_units_ += one * slabs_.in_class(entry.size_class).units;
    } else if ((entry.flags & kPinSoft) != 0) {
        pinned_soft_ += one;
    }
}

}  // namespace kvferry

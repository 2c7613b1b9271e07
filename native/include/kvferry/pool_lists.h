// Eviction order: per size class a segmented LRU. Probation holds what was committed and never
// leased, protected what was leased at least once; a scan fills and empties probation only. An
// entry that is leased or being written is in neither, so whatever is listed may be evicted.
#pragma once

#include <array>
#include <cstdint>

#include "kvferry/pool_format.h"
#include "kvferry/pool_slabs.h"

namespace kvferry {

struct List {
    uint32_t head = kNone;
    uint32_t tail = kNone;
    uint64_t size = 0;
};

class Lists {
  public:
    Lists(Entry* entries, Links* links, Slabs& slabs)
        : entries_(entries), links_(links), slabs_(slabs) {}

    // At the head of the list named by `flag` (kInProbation or kInProtected).
    void push(uint32_t id, uint8_t flag);
    // Out of its list; no effect when it is in none.
    void remove(uint32_t id);
    // Before an eviction: protected may hold 80 % of the class's used slots, its tail beyond that
    // moves to the head of probation. At most two a call, so that no single eviction pays for a
    // long time without any; two for one still shrink it.
    void demote_overflow(uint8_t size_class);

    const List& list(uint8_t size_class, uint8_t flag) const {
        return flag == kInProbation ? lists_[size_class].probation : lists_[size_class].safe;
    }
    // The entry to evict first, or kNone.
    uint32_t coldest(uint8_t size_class) const {
        const Pair& pair = lists_[size_class];
        return pair.probation.tail != kNone ? pair.probation.tail : pair.safe.tail;
    }

  private:
    struct Pair {
        List probation;
        List safe;
    };
    List& list_of(uint8_t size_class, uint8_t flag) {
        return flag == kInProbation ? lists_[size_class].probation : lists_[size_class].safe;
    }

    Entry* entries_;
    Links* links_;
    Slabs& slabs_;
    std::array<Pair, kClassesMax> lists_;
};

}  // namespace kvferry

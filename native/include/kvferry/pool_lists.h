// Eviction order: per size class least recently used first, but an eighth of its slots belongs to
// what was used again, so that a scan of any length leaves something. Probation holds what was
// committed and never leased, protected what was leased at least once. An entry that is leased or
// being written is in neither, so whatever is listed may be evicted.
//
// Why so little: on the traces of bench/policies.py most reuse comes soon after the first use. With
// more slots kept back, conversations that have ended hold memory that running ones need.
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

    const List& list(uint8_t size_class, uint8_t flag) const {
        return flag == kInProbation ? lists_[size_class].probation : lists_[size_class].safe;
    }
    // The entry to evict first, or kNone.
    uint32_t coldest(uint8_t size_class) const;

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

// Eviction order: per size class least recently used first, but an eighth of its slots belongs to
// what was used again, so that a scan of any length leaves something. Probation holds what was
// committed and never leased, protected what was leased at least once; each owner has lists of its
// own, of whose tails the least recently used counts. What is pinned softly is in a third list,
// looked at when both are empty. An entry that is leased, being written or pinned hard is in none,
// so whatever is listed may be evicted.
//
// Why so little: on the traces of bench/policies.py most reuse comes soon after the first use. With
// more slots kept back, conversations that have ended hold memory that running ones need.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kvferry/pool_format.h"
#include "kvferry/pool_owners.h"
#include "kvferry/pool_slabs.h"

namespace kvferry {

struct List {
    uint32_t head = kNone;
    uint32_t tail = kNone;
    uint64_t size = 0;
};

class Lists {
  public:
    Lists(Entry* entries, Links* links, const Note* notes, Slabs& slabs, const Owners& owners)
        : entries_(entries), links_(links), notes_(notes), slabs_(slabs), owners_(owners) {}

    // At the head of the list named by `flag` (kInProbation, kInProtected or kInSoft).
    void push(uint32_t id, uint8_t flag);
    // Out of its list; no effect when it is in none.
    void remove(uint32_t id);

    const List& list(uint8_t size_class, uint32_t owner, uint8_t flag) const {
        return lists_[place(size_class, owner, flag)];
    }
    // The tail of a class's lists of one kind that was used least recently, or kNone.
    uint32_t tail(uint8_t size_class, uint8_t flag) const;
    // The entry to evict first, or kNone: of what is not pinned, or of what is pinned softly.
    uint32_t coldest(uint8_t size_class, bool soft = false) const;
    // Of one owner, pinned softly or not; of `size_class` where that has one, else of any.
    uint32_t coldest_of(uint32_t owner, uint8_t size_class) const;

  private:
    static constexpr size_t kKinds = 3;
    static size_t place(uint8_t size_class, uint32_t owner, uint8_t flag) {
        const size_t kind = flag == kInProbation ? 0 : flag == kInProtected ? 1 : 2;
        return (size_class * kOwnersMax + owner) * kKinds + kind;
    }
    List& list_of(uint32_t id, uint8_t flag) {
        return lists_[place(entries_[id].size_class, notes_[id].owner, flag)];
    }
    uint32_t older(uint32_t a, uint32_t b) const;
    uint32_t first_of(uint32_t once, uint32_t again, bool within_share) const;

    Entry* entries_;
    Links* links_;
    const Note* notes_;
    Slabs& slabs_;
    const Owners& owners_;
    std::vector<List> lists_ = std::vector<List>(kClassesMax * kOwnersMax * kKinds);
    std::array<uint64_t, kClassesMax> safe_ = {};  // in the protected lists of a class
};

}  // namespace kvferry

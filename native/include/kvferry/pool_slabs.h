// The arena's slabs: each belongs to one size class from its first slot to its last. All of it is
// on the heap and rebuilt at attach.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kvferry/pool_format.h"

namespace kvferry {

inline constexpr uint8_t kNoClass = 0xFF;

struct Slab {
    uint8_t size_class = kNoClass;
    uint32_t used = 0;             // slots that have an owner
    uint32_t listed = 0;           // of these: entries in an eviction list (evictable)
    uint32_t listed_safe = 0;      // of these: in the protected list
    uint32_t listed_soft = 0;      // or in that of what is pinned softly
    uint32_t free_slot = kNone;    // chain through owners
    uint32_t partial_index = 0;    // place in SizeClass::partial while a slot is free
    uint64_t newest_use = 0;       // no entry was used later
    std::vector<uint32_t> owners;  // per slot: entry id, or kFreeSlot | next free slot

    bool evictable() const { return used > 0 && listed == used; }
};

struct SizeClass {
    uint32_t units = 0;  // of a slot; 0 = unused
    uint32_t slabs = 0;
    uint64_t used = 0;              // slots that have an owner
    std::vector<uint32_t> partial;  // slabs with a free slot
};

class Slabs {
  public:
    static constexpr uint32_t kFreeSlot = 0x80000000;

    Slabs(uint64_t count, uint64_t slab_bytes);

    // The class of this slot size; a new one where none is. Throws PoolFull when 64 are in use.
    // `words` is the header's table.
    uint8_t class_for(uint32_t units, std::array<uint64_t, kClassesMax>& words);
    // Takes the header's table over at attach; damaged words stay unused.
    void load_classes(const std::array<uint64_t, kClassesMax>& words);

    // A free slot of the class in units from the arena's start, or kNone: then grow() may help.
    uint32_t take(uint8_t size_class, uint32_t owner);
    // Gives a free slab to the class; false when there is none.
    bool grow(uint8_t size_class);
    // Frees a slot; a slab without any returns to the free ones.
    void give(uint32_t slot);

    // Attach: records that `owner` holds `slot`. False when no such slot can exist, or it is
    // taken, or its slab belongs to another class.
    bool claim(uint32_t slot, uint8_t size_class, uint32_t owner);
    // Ends the claims: chains the free slots.
    void finish_claims();

    // Asked for with every use of an entry: the division by multiplication, exact for 32 bits.
    Slab& of(uint32_t slot) {
        return slabs_[static_cast<uint64_t>(
            (static_cast<unsigned __int128>(slot) * slabs_per_unit_) >> 64)];
    }
    uint32_t owner_of(uint32_t slot) const;
    SizeClass& in_class(uint8_t size_class) { return classes_[size_class]; }
    const SizeClass& in_class(uint8_t size_class) const { return classes_[size_class]; }
    std::vector<Slab>& all() { return slabs_; }
    const std::vector<Slab>& all() const { return slabs_; }
    uint64_t free_slabs() const { return free_.size(); }
    uint64_t used_bytes() const;
    uint32_t slots_in(uint8_t size_class) const;

  private:
    void assign(uint32_t slab, uint8_t size_class);
    void chain_free_slots(Slab& slab);
    void add_partial(uint32_t slab);
    void drop_partial(uint32_t slab);

    uint32_t units_per_slab_;  // at least a page's
    uint64_t slabs_per_unit_;  // in 2^-64, rounded up
    std::vector<Slab> slabs_;
    std::vector<uint32_t> free_;
    std::array<SizeClass, kClassesMax> classes_;
};

}  // namespace kvferry

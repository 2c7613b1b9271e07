#include <numeric>

#include "kvferry/pool_slabs.h"

namespace kvferry {

Slabs::Slabs(uint64_t count, uint64_t slab_bytes)
    : units_per_slab_(static_cast<uint32_t>(slab_bytes / kUnitBytes)),
      slabs_per_unit_(~uint64_t{0} / units_per_slab_ + 1),
      slabs_(count),
      free_(count) {
    std::iota(free_.rbegin(), free_.rend(), 0u);  // the lowest is handed out first
}

uint8_t Slabs::class_for(uint32_t units, std::array<uint64_t, kClassesMax>& words) {
    uint8_t spare = kNoClass;
    for (uint8_t c = 0; c < kClassesMax; ++c) {
        if (classes_[c].units == units) {
            return c;
        }
        if (spare == kNoClass && classes_[c].slabs == 0) {
            spare = c;
        }
    }
    if (spare == kNoClass) {
        throw PoolFull("all " + std::to_string(kClassesMax) +
                       " size classes of the pool hold entries: the engines served use too many "
                       "chunk sizes; clear the pool, or give some engines another sidecar");
    }
    classes_[spare].units = units;
    words[spare] = encode_class(units);
    publish_fence();
    return spare;
}

void Slabs::load_classes(const std::array<uint64_t, kClassesMax>& words) {
    for (size_t c = 0; c < kClassesMax; ++c) {
        const uint32_t units = decode_class(words[c]);
        classes_[c].units = units <= units_per_slab_ ? units : 0;
    }
}

uint32_t Slabs::slots_in(uint8_t size_class) const {
    return units_per_slab_ / classes_[size_class].units;
}

uint32_t Slabs::take(uint8_t size_class, uint32_t owner) {
    SizeClass& cls = classes_[size_class];
    if (cls.partial.empty()) {
        return kNone;
    }
    const uint32_t index = cls.partial.back();
    Slab& slab = slabs_[index];
    const uint32_t slot = slab.free_slot;
    const uint32_t next = slab.owners[slot] & ~kFreeSlot;
    slab.owners[slot] = owner;
    slab.free_slot = next == (kNone & ~kFreeSlot) ? kNone : next;
    ++slab.used;
    ++cls.used;
    if (slab.free_slot == kNone) {
        drop_partial(index);
    }
    return index * units_per_slab_ + slot * cls.units;
}

bool Slabs::grow(uint8_t size_class) {
    if (free_.empty()) {
        return false;
    }
    const uint32_t index = free_.back();
    assign(index, size_class);
    free_.pop_back();
    chain_free_slots(slabs_[index]);
    add_partial(index);
    return true;
}

void Slabs::give(uint32_t slot) {
    const uint32_t index = slot / units_per_slab_;
    Slab& slab = slabs_[index];
    SizeClass& cls = classes_[slab.size_class];
    const uint32_t local = slot % units_per_slab_ / cls.units;
    if (slab.free_slot == kNone) {
        add_partial(index);
    }
    slab.owners[local] = kFreeSlot | slab.free_slot;
    slab.free_slot = local;
    --slab.used;
    --cls.used;
    if (slab.used == 0) {
        drop_partial(index);
        --cls.slabs;
        slab = Slab{};
        free_.push_back(index);
    }
}

bool Slabs::claim(uint32_t slot, uint8_t size_class, uint32_t owner) {
    const uint32_t index = slot / units_per_slab_;
    if (index >= slabs_.size() || size_class >= kClassesMax || classes_[size_class].units == 0) {
        return false;
    }
    const uint32_t units = classes_[size_class].units;
    const uint32_t local = slot % units_per_slab_ / units;
    Slab& slab = slabs_[index];
    if (slot % units_per_slab_ % units != 0 || local >= units_per_slab_ / units) {
        return false;
    }
    if (slab.size_class == kNoClass) {
        assign(index, size_class);
    }
    if (slab.size_class != size_class || slab.owners[local] != kNone) {
        return false;
    }
    slab.owners[local] = owner;
    ++slab.used;
    ++classes_[size_class].used;
    return true;
}

void Slabs::finish_claims() {
    free_.clear();
    for (size_t i = slabs_.size(); i-- > 0;) {
        const auto index = static_cast<uint32_t>(i);
        if (slabs_[index].size_class == kNoClass) {
            free_.push_back(index);
            continue;
        }
        chain_free_slots(slabs_[index]);
        if (slabs_[index].free_slot != kNone) {
            add_partial(index);
        }
    }
}

uint32_t Slabs::owner_of(uint32_t slot) const {
    const uint32_t index = slot / units_per_slab_;
    if (index >= slabs_.size() || slabs_[index].size_class == kNoClass) {
        return kNone;
    }
    const Slab& slab = slabs_[index];
    const uint32_t units = classes_[slab.size_class].units;
    const uint32_t local = slot % units_per_slab_ / units;
    return slot % units_per_slab_ % units == 0 && local < slab.owners.size() ? slab.owners[local]
                                                                             : kNone;
}

uint64_t Slabs::used_bytes() const {
    uint64_t units = 0;
    for (const SizeClass& cls : classes_) {
        units += cls.used * cls.units;
    }
    return units * kUnitBytes;
}

// Leaves the slots without owners (kNone).
void Slabs::assign(uint32_t index, uint8_t size_class) {
    Slab& slab = slabs_[index];
    slab.owners.assign(slots_in(size_class), kNone);
    slab.size_class = size_class;
    ++classes_[size_class].slabs;
}

void Slabs::chain_free_slots(Slab& slab) {
    slab.free_slot = kNone;
    for (size_t i = slab.owners.size(); i-- > 0;) {
        if (slab.owners[i] == kNone) {
            slab.owners[i] = kFreeSlot | slab.free_slot;
            slab.free_slot = static_cast<uint32_t>(i);
        }
    }
}

void Slabs::add_partial(uint32_t index) {
    std::vector<uint32_t>& partial = classes_[slabs_[index].size_class].partial;
    slabs_[index].partial_index = static_cast<uint32_t>(partial.size());
    partial.push_back(index);
}

void Slabs::drop_partial(uint32_t index) {
    std::vector<uint32_t>& partial = classes_[slabs_[index].size_class].partial;
    const uint32_t place = slabs_[index].partial_index;
    partial[place] = partial.back();
    slabs_[partial[place]].partial_index = place;
    partial.pop_back();
}

}  // namespace kvferry

// Whose entries the pool holds, and how much of it: the rows' names lie in the header, the counters
// on the heap, rebuilt at attach.
#pragma once

#include <array>
#include <cstdint>

#include "kvferry/pool_format.h"

namespace kvferry {

struct Owner {
    uint64_t entries = 0;  // in any state but free
    uint64_t units = 0;    // of their slots
};

class Owners {
  public:
    explicit Owners(std::array<OwnerRow, kOwnersMax>& rows) : rows_(rows) {}

    // The row of this name, taken now where none is. 0, nobody's, for the name of zeros and when
    // every row has entries.
    uint32_t row_of(const Key& name);
    // Attach: the row an entry names, 0 where that was never taken.
    uint32_t known(uint32_t row) const { return row < kOwnersMax && taken(row) ? row : 0; }
    bool taken(uint32_t row) const { return rows_[row].taken == kOwnerTaken; }
    const Key& name(uint32_t row) const { return rows_[row].name; }
    // Rows at and above it were never taken.
    uint32_t end() const { return end_; }
    void find_end();

    Owner& at(uint32_t row) { return owners_[row]; }
    const Owner& at(uint32_t row) const { return owners_[row]; }

  private:
    std::array<OwnerRow, kOwnersMax>& rows_;
    std::array<Owner, kOwnersMax> owners_;
    uint32_t end_ = 1;
};

}  // namespace kvferry

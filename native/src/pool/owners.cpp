#include "kvferry/pool_owners.h"

namespace kvferry {

uint32_t Owners::row_of(const Key& name) {
    if (name == Key{}) {
        return 0;
    }
    uint32_t spare = 0;
    for (uint32_t row = 1; row < kOwnersMax; ++row) {
        if (taken(row) && rows_[row].name == name) {
            return row;
        }
        if (spare == 0 && owners_[row].entries == 0) {
            spare = row;
        }
    }
    if (spare != 0) {
        rows_[spare].taken = 0;
        publish_fence();
        rows_[spare].name = name;
        publish_fence();  // a row counts only with its whole name
        rows_[spare].taken = kOwnerTaken;
        owners_[spare] = Owner{};
        end_ = spare >= end_ ? spare + 1 : end_;
    }
    return spare;
}

void Owners::find_end() {
    end_ = kOwnersMax;
    while (end_ > 1 && !taken(end_ - 1)) {
        --end_;
    }
}

}  // namespace kvferry

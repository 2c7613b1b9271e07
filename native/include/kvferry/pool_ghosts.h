// When which key was evicted, for whoever explains a miss: a fixed table where a newer eviction
// overwrites an older one in its place, so that remembering costs the same however many there are.
#pragma once

#include <time.h>

#include <cstdint>
#include <vector>

#include "kvferry/key_mix.h"

namespace kvferry {

class Ghosts {
  public:
    void note(const Key& key) { table_[key.low % kPlaces] = {key, now_ms()}; }

    // Milliseconds since the key was evicted; -1 where that is not known.
    int64_t age_ms(const Key& key) const {
        const Ghost& ghost = table_[key.low % kPlaces];
        return ghost.at_ms != 0 && ghost.key == key ? now_ms() - ghost.at_ms : -1;
    }

  private:
    static constexpr size_t kPlaces = 65536;

    struct Ghost {
        Key key{};
        int64_t at_ms = 0;
    };

    static int64_t now_ms() {
        timespec now{};
        clock_gettime(CLOCK_MONOTONIC_COARSE, &now);  // a few ns: it is read per eviction
        return now.tv_sec * 1000 + now.tv_nsec / 1000000 + 1;
    }

    std::vector<Ghost> table_ = std::vector<Ghost>(kPlaces);
};

}  // namespace kvferry

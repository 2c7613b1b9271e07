// Keys with known bytes: what an owner of a pool writes, and what another one must find.
#pragma once

#include <vector>

#include "kvferry/crc32c.h"
#include "pool_fixture.h"

namespace kvferry_test {

constexpr uint64_t kUniverse = 200;
constexpr uint64_t kPayloads[3] = {700, 3000, 7000};

inline uint64_t payload_of(uint64_t n) {
    return kPayloads[n % 3];
}
inline uint8_t byte_of(uint64_t n, uint64_t at) {
    return static_cast<uint8_t>(n * 31 + at * 7 + at / 256);
}

// Writes the bytes of a reserved entry's one shard; returns their checksum.
inline uint32_t fill_bytes(Pool& pool, uint64_t n, uint32_t id) {
    uint64_t offset = 0;
    uint32_t seed = 0;
    pool.payload_offsets({&id, 1}, &offset);
    pool.seeds({&id, 1}, &seed);
    auto* to = reinterpret_cast<uint8_t*>(pool.base() + offset);
    for (uint64_t at = 0; at < payload_of(n); ++at) {
        to[at] = byte_of(n, at);
    }
    return kvferry::crc32c(to, payload_of(n), seed);
}

// A pool just attached: nothing was dropped, and what is ready has its key's bytes and checksum.
// Returns how many entries that are.
inline uint64_t verify_bytes(Pool& pool) {
    check_sound(pool);
    CHECK(pool.recovered().dropped == 0);
    uint64_t ready = 0;
    for (uint64_t n = 0; n < kUniverse; ++n) {
        const Key key = key_of(n);
        const std::vector<uint32_t> ids = pool.lease({&key, 1});
        if (ids.empty()) {
            continue;
        }
        ++ready;
        uint64_t offset = 0;
        pool.payload_offsets(ids, &offset);
        const auto* from = reinterpret_cast<const uint8_t*>(pool.base() + offset);
        for (uint64_t at = 0; at < payload_of(n); ++at) {
            CHECK(from[at] == byte_of(n, at));
        }
        uint32_t seed = 0;
        uint32_t crc = 0;
        bool stored = false;
        pool.seeds(ids, &seed);
        pool.crcs(ids, 0, &crc, &stored);
        CHECK(stored && crc == kvferry::crc32c(from, payload_of(n), seed));
        pool.release(ids);
    }
    CHECK(ready == pool.stats().ready);
    check_sound(pool);
    return ready;
}

}  // namespace kvferry_test

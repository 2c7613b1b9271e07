// A pool in a memfd of its own, and keys to put into it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "kvferry/pool.h"

namespace kvferry_test {

using kvferry::Key;
using kvferry::KeyView;
using kvferry::Pool;

inline void check_sound(const Pool& pool) {
    const std::vector<std::string> problems = pool.check();
    for (const std::string& problem : problems) {
        std::fprintf(stderr, "%s\n", problem.c_str());
    }
    CHECK(problems.empty());
}

class PoolFixture {
  public:
    PoolFixture(uint64_t slabs, uint64_t slab_bytes, uint64_t keys_max)
        : fd_(memfd_create("kvferry-test", 0)),
          bytes_(kvferry::segment_bytes_for(slabs * slab_bytes, slab_bytes, keys_max)) {
        CHECK(fd_ >= 0 && ftruncate(fd_, static_cast<off_t>(bytes_)) == 0);
        pool_ = Pool::create(fd_, bytes_, slab_bytes, keys_max, 1, 2);
    }
    PoolFixture(const PoolFixture&) = delete;
    PoolFixture& operator=(const PoolFixture&) = delete;
    ~PoolFixture() { close(fd_); }

    Pool* operator->() { return pool_.get(); }
    int fd() const { return fd_; }
    uint64_t bytes() const { return bytes_; }

    // The next life: nothing of the last one's heap.
    void restart() {
        pool_.reset();
        pool_ = Pool::attach(fd_, 2);
    }
    void check() { check_sound(*pool_); }
    std::vector<int64_t> reserve(const std::vector<Key>& keys, uint64_t payload, uint32_t shards) {
        std::vector<int64_t> out(keys.size());
        pool_->reserve(view(keys), payload, shards, out.data());
        return out;
    }
    // Reserves and commits as one batch; every key has to get a slot.
    std::vector<uint32_t> put(const std::vector<Key>& keys, uint64_t payload) {
        std::vector<uint32_t> ids;
        for (const int64_t id : reserve(keys, payload, 1)) {
            CHECK(id >= 0);
            ids.push_back(static_cast<uint32_t>(id));
        }
        pool_->commit(ids);
        return ids;
    }
    bool has(const Key& key) { return pool_->prefix(KeyView(&key, 1)) == 1; }
    static KeyView view(const std::vector<Key>& keys) { return {keys.data(), keys.size()}; }
    std::byte* payload(uint32_t id) {
        uint64_t offset = 0;
        pool_->payload_offsets({&id, 1}, &offset);
        return pool_->base() + offset;
    }

  private:
    int fd_;
    uint64_t bytes_;
    std::unique_ptr<Pool> pool_;
};

// Spread like real keys; the same `n` gives the same key.
inline Key key_of(uint64_t n) {
    const auto mix = [](uint64_t x) {
        x ^= x >> 30;
        x *= 0xBF58476D1CE4E5B9;
        x ^= x >> 27;
        x *= 0x94D049BB133111EB;
        return x ^ (x >> 31);
    };
    return {mix(2 * n + 1), mix(2 * n + 2)};
}

inline std::vector<Key> keys_of(uint64_t first, uint64_t count) {
    std::vector<Key> keys;
    for (uint64_t n = first; n < first + count; ++n) {
        keys.push_back(key_of(n));
    }
    return keys;
}

}  // namespace kvferry_test

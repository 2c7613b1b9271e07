// Chunk keys: a 128-bit mix of (namespace, group, end kind, prefix hash). The prefix hash is
// already cryptographic, so the mix only has to spread, never to resist an attacker.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvferry {

static_assert(std::endian::native == std::endian::little,
              "keys and the pool's format are little endian");

inline constexpr size_t kKeyBytes = 16;
inline constexpr size_t kHashBytesMax = 1024;

struct Key {
    uint64_t low;
    uint64_t high;
    friend bool operator==(const Key&, const Key&) = default;
};
static_assert(sizeof(Key) == kKeyBytes);

// Packed keys as numpy holds them: (n, 16) bytes of any alignment.
class KeyView {
  public:
    KeyView(const void* bytes, size_t count)
        : at_(static_cast<const std::byte*>(bytes)), count_(count) {}
    size_t size() const { return count_; }
    Key operator[](size_t i) const {
        Key key;
        std::memcpy(&key, at_ + i * kKeyBytes, kKeyBytes);
        return key;
    }
    KeyView from(size_t first, size_t count) const { return {at_ + first * kKeyBytes, count}; }

  private:
    const std::byte* at_;
    size_t count_;
};

struct MixInput {
    const std::byte* name_space;  // kKeyBytes bytes
    uint32_t group;
    uint32_t end_kind;        // 0 full chunk, 1 partial tail
    const std::byte* hashes;  // `total` hashes of `hash_bytes` bytes each
    size_t total;
    size_t hash_bytes;  // 1 .. kHashBytesMax
    size_t first;       // index of the first hash to use
    size_t step;        // hashes per chunk, at least 1
};

// ceil((total - first) / step), 0 when first is at the end or past it.
size_t mixed_count(const MixInput& input) noexcept;

// Writes mixed_count(input) keys of kKeyBytes bytes to `out`.
void mix_keys(const MixInput& input, std::byte* out) noexcept;

// CRC seed of a key: bytes that were stored under another key do not verify.
uint32_t crc_seed(const Key& key) noexcept;

}  // namespace kvferry

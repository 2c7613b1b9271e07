#include "kvferry/key_mix.h"

namespace kvferry {
namespace {

// Odd 64-bit constants: fractional bits of the square roots of 2, 3, 5 and 7.
constexpr uint64_t kRoot2 = 0x6A09E667F3BCC909;
constexpr uint64_t kRoot3 = 0xBB67AE8584CAA73B;
constexpr uint64_t kRoot5 = 0x3C6EF372FE94F82B;
constexpr uint64_t kRoot7 = 0xA54FF53A5F1D36F1;

// 128 bits of state. Every step is invertible, so equal states need equal inputs at one block and
// nothing is lost on the way; a word that happens to cancel the state cannot pin it to zero, as it
// would with a folded 128-bit product.
struct State {
    uint64_t a;
    uint64_t b;
};

inline void absorb(State& state, uint64_t x, uint64_t y) noexcept {
    uint64_t a = (state.a ^ x) * kRoot2;
    uint64_t b = (state.b ^ y) * kRoot3;
    a ^= a >> 32;
    b ^= b >> 32;
    a += std::rotl(b, 25);
    b ^= std::rotl(a, 43);
    state.a = a * kRoot5;
    state.b = b * kRoot7;
}

inline Key finish(State state) noexcept {
    state.a ^= state.a >> 29;
    state.b ^= state.b >> 31;
    absorb(state, kRoot7, kRoot5);
    state.a ^= state.a >> 32;
    state.b ^= state.b >> 32;
    state.a += std::rotl(state.b, 17);
    state.b += std::rotl(state.a, 37);
    return {state.a ^ (state.a >> 31), state.b ^ (state.b >> 29)};
}

inline uint64_t load64(const std::byte* from) noexcept {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

inline State absorb_all(State state, const std::byte* from, size_t bytes) noexcept {
    for (; bytes >= 16; bytes -= 16, from += 16) {
        absorb(state, load64(from), load64(from + 8));
    }
    if (bytes > 0) {  // zero padded; the length is part of the start state
        uint64_t words[2] = {0, 0};
        std::memcpy(words, from, bytes);
        absorb(state, words[0], words[1]);
    }
    return state;
}

}  // namespace

size_t mixed_count(const MixInput& input) noexcept {
    if (input.first >= input.total) {
        return 0;
    }
    return (input.total - input.first - 1) / input.step + 1;
}

void mix_keys(const MixInput& input, std::byte* out) noexcept {
    State start{kRoot2, kRoot3};
    absorb(start, load64(input.name_space), load64(input.name_space + 8));
    absorb(start, input.group | (static_cast<uint64_t>(input.end_kind) << 32), input.hash_bytes);
    const size_t count = mixed_count(input);
    for (size_t i = 0; i < count; ++i) {
        const std::byte* hash = input.hashes + (input.first + i * input.step) * input.hash_bytes;
        const Key key = finish(absorb_all(start, hash, input.hash_bytes));
        std::memcpy(out + i * kKeyBytes, &key, kKeyBytes);
    }
}

uint32_t crc_seed(const Key& key) noexcept {
    State state{kRoot5, kRoot7};
    absorb(state, key.low, key.high);
    return static_cast<uint32_t>(finish(state).low);
}

}  // namespace kvferry

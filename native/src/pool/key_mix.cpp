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
// ``Word`` is one uint64_t, or a vector of them for several keys at a time.
template <typename Word>
struct State {
    Word a;
    Word b;
};

#define KVFERRY_INLINE [[gnu::always_inline]] inline  // also into functions for newer processors

template <int kBits, typename Word>
KVFERRY_INLINE void add_rotated(Word& to, const Word& from) noexcept {
    to += (from << kBits) | (from >> (64 - kBits));
}

template <typename Word>
KVFERRY_INLINE void absorb(State<Word>& state, const Word& x, const Word& y) noexcept {
    Word a = (state.a ^ x) * kRoot2;
    Word b = (state.b ^ y) * kRoot3;
    a ^= a >> 32;
    b ^= b >> 32;
    add_rotated<25>(a, b);
    b ^= (a << 43) | (a >> 21);
    state.a = a * kRoot5;
    state.b = b * kRoot7;
}

// Leaves the key's halves in the state.
template <typename Word>
KVFERRY_INLINE void finish(State<Word>& state) noexcept {
    state.a ^= state.a >> 29;
    state.b ^= state.b >> 31;
    absorb(state, Word{} + kRoot7, Word{} + kRoot5);
    state.a ^= state.a >> 32;
    state.b ^= state.b >> 32;
    add_rotated<17>(state.a, state.b);
    add_rotated<37>(state.b, state.a);
    state.a ^= state.a >> 31;
    state.b ^= state.b >> 29;
}

inline uint64_t load64(const std::byte* from) noexcept {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

inline void absorb_all(State<uint64_t>& state, const std::byte* from, size_t bytes) noexcept {
    for (; bytes >= 16; bytes -= 16, from += 16) {
        absorb(state, load64(from), load64(from + 8));
    }
    if (bytes > 0) {  // zero padded; the length is part of the start state
        uint64_t words[2] = {0, 0};
        std::memcpy(words, from, bytes);
        absorb(state, words[0], words[1]);
    }
}

#if defined(__x86_64__) && __has_builtin(__builtin_shufflevector)  // GCC has it from 12 on

// Eight keys at a time of hashes of 32 bytes that lie one after the other: what a probe of vLLM's
// hashes brings. Returns how many keys it wrote.
__attribute__((target("avx512f,avx512dq"))) size_t mix_eights(const State<uint64_t>& start,
                                                              const std::byte* hashes, size_t count,
                                                              std::byte* out) noexcept {
    typedef uint64_t Eight __attribute__((vector_size(64)));
    size_t done = 0;
    for (; count - done >= 8; done += 8, hashes += sizeof(Eight) * 4, out += sizeof(Eight) * 2) {
        Eight pairs[4];  // two hashes each
        std::memcpy(pairs, hashes, sizeof pairs);
        // Words 0 and 1, and words 2 and 3, of four hashes each; below each word of all eight.
        const Eight a = __builtin_shufflevector(pairs[0], pairs[1], 0, 4, 8, 12, 1, 5, 9, 13);
        const Eight b = __builtin_shufflevector(pairs[2], pairs[3], 0, 4, 8, 12, 1, 5, 9, 13);
        const Eight c = __builtin_shufflevector(pairs[0], pairs[1], 2, 6, 10, 14, 3, 7, 11, 15);
        const Eight d = __builtin_shufflevector(pairs[2], pairs[3], 2, 6, 10, 14, 3, 7, 11, 15);
        State<Eight> state{Eight{} + start.a, Eight{} + start.b};
        absorb(state, __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11),
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15));
        absorb(state, __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11),
               __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15));
        finish(state);
        const Eight keys[2] = {
            __builtin_shufflevector(state.a, state.b, 0, 8, 1, 9, 2, 10, 3, 11),
            __builtin_shufflevector(state.a, state.b, 4, 12, 5, 13, 6, 14, 7, 15)};
        std::memcpy(out, keys, sizeof keys);
    }
    return done;
}

const bool kMixesEights =
    __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512dq") != 0;

#else

constexpr bool kMixesEights = false;
size_t mix_eights(const State<uint64_t>&, const std::byte*, size_t, std::byte*) noexcept {
    return 0;
}

#endif

}  // namespace

size_t mixed_count(const MixInput& input) noexcept {
    if (input.first >= input.total) {
        return 0;
    }
    return (input.total - input.first - 1) / input.step + 1;
}

void mix_keys(const MixInput& input, std::byte* out) noexcept {
    State<uint64_t> start{kRoot2, kRoot3};
    absorb(start, load64(input.name_space), load64(input.name_space + 8));
    absorb(start, input.group | (static_cast<uint64_t>(input.end_kind) << 32),
           uint64_t{input.hash_bytes});
    const size_t count = mixed_count(input);
    size_t i = 0;
    if (kMixesEights && input.hash_bytes == 32 && input.step == 1 && count > 0) {
        i = mix_eights(start, input.hashes + input.first * input.hash_bytes, count, out);
    }
    for (; i < count; ++i) {
        const std::byte* hash = input.hashes + (input.first + i * input.step) * input.hash_bytes;
        State<uint64_t> state = start;
        absorb_all(state, hash, input.hash_bytes);
        finish(state);
        const Key key{state.a, state.b};
        std::memcpy(out + i * kKeyBytes, &key, kKeyBytes);
    }
}

uint32_t crc_seed(const Key& key) noexcept {
    State<uint64_t> state{kRoot5, kRoot7};
    absorb(state, key.low, key.high);
    finish(state);
    return static_cast<uint32_t>(state.a);
}

}  // namespace kvferry

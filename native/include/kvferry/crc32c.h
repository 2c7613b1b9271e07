// CRC32C (Castagnoli, reflected polynomial 0x82F63B78, as in RFC 3720), fast enough to be fused
// into a copy. Chaining: crc32c(b, crc32c(a)) == crc32c(a followed by b); the seed of an empty
// chain is 0, any other start value works as well (see Pool::seeds).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#endif

namespace kvferry {

// The CRC of `bytes` bytes at `data`, by the fastest kernel this CPU has.
uint32_t crc32c(const void* data, size_t bytes, uint32_t seed = 0) noexcept;

// memcpy(dst, src, bytes) and the CRC of what was copied, in one pass. The ranges do not overlap.
uint32_t crc32c_copy(void* dst, const void* src, size_t bytes, uint32_t seed = 0) noexcept;

// crc32c(a followed by b) of the checksums of both, b's with seed 0; b has `second_bytes` bytes.
uint32_t crc32c_joined(uint32_t first, uint32_t second, size_t second_bytes) noexcept;

// The kernel without special instructions: the reference of the tests, the fallback elsewhere.
uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t seed = 0) noexcept;

// True when this CPU has the instructions of Crc32cCpu and crc32c_fused may be called.
bool crc32c_has_cpu_kernel() noexcept;

namespace crc_detail {

constexpr uint32_t kPolynomial = 0x82F63B78;

// x^n modulo the polynomial, reflected.
constexpr uint32_t power_of_x(size_t n) {
    uint32_t value = 0x80000000;
    for (; n > 0; --n) {
        value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    }
    return value;
}

// Product modulo the polynomial, both reflected.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000; bit != 0; bit >>= 1) {
        product ^= (a & bit) != 0 ? b : 0;
        b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
    }
    return product;
}

inline uint64_t load_word(const std::byte* from) noexcept {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

}  // namespace crc_detail

// A sink of the fused kernel that does nothing: the plain checksum.
struct Crc32cNoSink {
    void operator()(size_t, uint64_t) const noexcept {}
    void operator()(size_t, std::byte) const noexcept {}
};

// A sink that stores what passes by: the fused copy.
struct Crc32cCopySink {
    std::byte* to;
    void operator()(size_t at, uint64_t word) const noexcept {
        std::memcpy(to + at, &word, sizeof word);
    }
    void operator()(size_t at, std::byte byte) const noexcept { to[at] = byte; }
};

#if defined(__x86_64__)
#define KVFERRY_CRC_KERNEL 1
#define KVFERRY_CRC_TARGET __attribute__((target("sse4.2,pclmul")))

struct Crc32cCpu {
    KVFERRY_CRC_TARGET static uint64_t step(uint64_t crc, uint64_t word) noexcept {
        return _mm_crc32_u64(crc, word);
    }
    KVFERRY_CRC_TARGET static uint32_t step(uint32_t crc, std::byte byte) noexcept {
        return _mm_crc32_u8(crc, static_cast<uint8_t>(byte));
    }
    // The state as if `Bytes` zero bytes had followed. The reflected product of two 32-bit values
    // reads as 64 bits with one factor x too many, and the CRC instruction multiplies by x^32.
    template <size_t Bytes>
    KVFERRY_CRC_TARGET static uint32_t skip(uint32_t crc) noexcept {
        constexpr uint32_t factor = crc_detail::power_of_x(8 * Bytes - 33);
        const __m128i product =
            _mm_clmulepi64_si128(_mm_cvtsi64_si128(crc), _mm_cvtsi64_si128(factor), 0);
        return static_cast<uint32_t>(
            _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product))));
    }
};
#elif defined(__aarch64__)
#define KVFERRY_CRC_KERNEL 1
#define KVFERRY_CRC_TARGET __attribute__((target("+crc")))

struct Crc32cCpu {
    KVFERRY_CRC_TARGET static uint64_t step(uint64_t crc, uint64_t word) noexcept {
        return __crc32cd(static_cast<uint32_t>(crc), word);
    }
    KVFERRY_CRC_TARGET static uint32_t step(uint32_t crc, std::byte byte) noexcept {
        return __crc32cb(crc, static_cast<uint8_t>(byte));
    }
    template <size_t Bytes>
    KVFERRY_CRC_TARGET static uint32_t skip(uint32_t crc) noexcept {
        constexpr uint32_t factor = crc_detail::power_of_x(8 * Bytes);
        return crc_detail::multiply(crc, factor);
    }
};
#endif

#if defined(KVFERRY_CRC_KERNEL)
namespace crc_detail {

// One stretch of 3 * Lane bytes in three independent chains: the CRC instruction has a latency of
// three cycles and a throughput of one.
template <size_t Lane, class Sink>
KVFERRY_CRC_TARGET inline uint32_t three_lanes(uint32_t state, const std::byte* from, size_t at,
                                               Sink sink) noexcept {
    uint64_t first = state;
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = at; i < at + Lane; i += sizeof(uint64_t)) {
        const uint64_t a = load_word(from + i);
        const uint64_t b = load_word(from + i + Lane);
        const uint64_t c = load_word(from + i + 2 * Lane);
        first = Crc32cCpu::step(first, a);
        second = Crc32cCpu::step(second, b);
        third = Crc32cCpu::step(third, c);
        sink(i, a);
        sink(i + Lane, b);
        sink(i + 2 * Lane, c);
    }
    return Crc32cCpu::skip<2 * Lane>(static_cast<uint32_t>(first)) ^
           Crc32cCpu::skip<Lane>(static_cast<uint32_t>(second)) ^ static_cast<uint32_t>(third);
}

}  // namespace crc_detail

// The CRC of `bytes` bytes at `data`, handing every word and every tail byte to `sink(offset, x)`.
// Only where crc32c_has_cpu_kernel().
template <class Sink>
KVFERRY_CRC_TARGET uint32_t crc32c_fused(const void* data, size_t bytes, uint32_t seed,
                                         Sink sink) noexcept {
    constexpr size_t kLong = 1360;
    constexpr size_t kShort = 168;
    const auto* from = static_cast<const std::byte*>(data);
    uint32_t state = ~seed;
    size_t at = 0;
    for (; bytes - at >= 3 * kLong; at += 3 * kLong) {
        state = crc_detail::three_lanes<kLong>(state, from, at, sink);
    }
    for (; bytes - at >= 3 * kShort; at += 3 * kShort) {
        state = crc_detail::three_lanes<kShort>(state, from, at, sink);
    }
    uint64_t wide = state;
    for (; bytes - at >= sizeof(uint64_t); at += sizeof(uint64_t)) {
        const uint64_t word = crc_detail::load_word(from + at);
        wide = Crc32cCpu::step(wide, word);
        sink(at, word);
    }
    state = static_cast<uint32_t>(wide);
    for (; at < bytes; ++at) {
        state = Crc32cCpu::step(state, from[at]);
        sink(at, from[at]);
    }
    return ~state;
}
#endif

}  // namespace kvferry

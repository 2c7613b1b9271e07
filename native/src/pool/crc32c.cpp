#include "kvferry/crc32c.h"

#include <array>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace kvferry {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: the CRC of byte b followed by k zero bytes.
constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc >> 1) ^ ((crc & 1) != 0 ? crc_detail::kPolynomial : 0);
        }
        tables[0][byte] = crc;
    }
    for (size_t k = 1; k < tables.size(); ++k) {
        for (size_t byte = 0; byte < 256; ++byte) {
            const uint32_t before = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
        }
    }
    return tables;
}

constexpr Tables kTables = make_tables();

bool detect_cpu_kernel() noexcept {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
    constexpr unsigned long kHwcapCrc32 = 1UL << 7;
    return (getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
#else
    return false;
#endif
}

}  // namespace

bool crc32c_has_cpu_kernel() noexcept {
    static const bool has = detect_cpu_kernel();
    return has;
}

// Eight bytes a step by tables; the word is read as little endian, which both targets are.
uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t seed) noexcept {
    const auto* from = static_cast<const std::byte*>(data);
    uint32_t crc = ~seed;
    for (; bytes >= 8; bytes -= 8, from += 8) {
        const uint64_t word = crc_detail::load_word(from) ^ crc;
        crc = 0;
        for (size_t k = 0; k < 8; ++k) {
            crc ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
        }
    }
    for (; bytes > 0; --bytes, ++from) {
        crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint32_t>(*from)) & 0xFF];
    }
    return ~crc;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t seed) noexcept {
#if defined(KVFERRY_CRC_KERNEL)
    if (crc32c_has_cpu_kernel()) {
        return crc32c_fused(data, bytes, seed, Crc32cNoSink{});
    }
#endif
    return crc32c_portable(data, bytes, seed);
}

// By squaring, because a piece has millions of bits. first * x^(8 * second_bytes) is what `first`
// is after as many zero bytes; that both are complemented at either end cancels out.
uint32_t crc32c_joined(uint32_t first, uint32_t second, size_t second_bytes) noexcept {
    uint32_t square = crc_detail::power_of_x(8);
    for (; second_bytes > 0; second_bytes >>= 1) {
        if ((second_bytes & 1) != 0) {
            first = crc_detail::multiply(first, square);
        }
        square = crc_detail::multiply(square, square);
    }
    return first ^ second;
}

uint32_t crc32c_copy(void* dst, const void* src, size_t bytes, uint32_t seed) noexcept {
#if defined(KVFERRY_CRC_KERNEL)
    if (crc32c_has_cpu_kernel()) {
        return crc32c_fused(src, bytes, seed, Crc32cCopySink{static_cast<std::byte*>(dst)});
    }
#endif
    if (bytes > 0) {
        std::memcpy(dst, src, bytes);
    }
    return crc32c_portable(dst, bytes, seed);
}

}  // namespace kvferry

#include "kvferry/copy_kernel.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "kvferry/crc32c.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvferry {
namespace {

// memcpy and crc32c as the platform has them. The checksum reads a block small enough to be still
// in the first-level cache when it is copied.
namespace portable {

void copy(std::byte* dst, const std::byte* src, size_t bytes, const std::byte*) noexcept {
    std::memcpy(dst, src, bytes);
}

uint32_t copy_crc(std::byte* dst, const std::byte* src, size_t bytes, const std::byte*,
                  uint32_t crc) noexcept {
    constexpr size_t kBlock = 4096;
    for (size_t at = 0; at < bytes; at += kBlock) {
        const size_t block = std::min(kBlock, bytes - at);
        crc = crc32c(src + at, block, crc);
        std::memcpy(dst + at, src + at, block);
    }
    return crc;
}

// Ordinary stores are ordered by the engine's own release operations.
void fence() noexcept {}

}  // namespace portable

#if defined(__x86_64__)

constexpr size_t kLine = 64;
// Three lanes of 21 lines and one line more are a 4 KiB page.
constexpr size_t kLaneLinesMax = 21;

// Factor i moves a CRC state over i lines of zeros: the carry-less product of two reflected 32-bit
// values reads with one factor x too many, and the CRC instruction that reduces it multiplies by
// x^32.
constexpr auto kSkipLines = [] {
    std::array<uint32_t, 2 * kLaneLinesMax + 1> factors{};
    for (size_t lines = 1; lines < factors.size(); ++lines) {
        factors[lines] = crc_detail::power_of_x(8 * kLine * lines - 33);
    }
    return factors;
}();

size_t bytes_to_line(const std::byte* at) noexcept {
    return -reinterpret_cast<uintptr_t>(at) & (kLine - 1);
}

void store_fence() noexcept {
    _mm_sfence();
}

namespace avx2 {
#define KVFERRY_TARGET __attribute__((target("avx2,sse4.2,pclmul")))
KVFERRY_TARGET inline void stream_line(std::byte* dst, const std::byte* src) noexcept {
    const auto* from = reinterpret_cast<const __m256i*>(src);
    auto* to = reinterpret_cast<__m256i*>(dst);
    const __m256i low = _mm256_loadu_si256(from);
    const __m256i high = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, low);
    _mm256_stream_si256(to + 1, high);
}
#include "copy_kernel_x86.inc"
#undef KVFERRY_TARGET
}  // namespace avx2

namespace avx512 {
#define KVFERRY_TARGET __attribute__((target("avx512f,sse4.2,pclmul")))
KVFERRY_TARGET inline void stream_line(std::byte* dst, const std::byte* src) noexcept {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
}
#include "copy_kernel_x86.inc"
#undef KVFERRY_TARGET
}  // namespace avx512

#endif

std::vector<CopyKernel> find_kernels() {
    std::vector<CopyKernel> kernels;
#if defined(__x86_64__)
    const bool crc = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
    if (crc && __builtin_cpu_supports("avx512f")) {
        kernels.push_back({"avx512", avx512::copy, avx512::copy_crc, store_fence});
    }
    if (crc && __builtin_cpu_supports("avx2")) {
        kernels.push_back({"avx2", avx2::copy, avx2::copy_crc, store_fence});
    }
#endif
    kernels.push_back({"portable", portable::copy, portable::copy_crc, portable::fence});
    return kernels;
}

}  // namespace

std::span<const CopyKernel> copy_kernels() noexcept {
    static const std::vector<CopyKernel> kernels = find_kernels();
    return kernels;
}

}  // namespace kvferry

// The innermost loops of the copy engine, one set per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvferry {

// Copies of many gigabytes go past the caches (non-temporal stores): neither side is read again
// soon, and reading the destination's lines first would cost a third of the bandwidth.
//
// `ahead` is where the source continues a few KiB later; as many bytes as are copied are fetched
// from there into the second-level cache. It is only a hint and may point anywhere.
struct CopyKernel {
    const char* name;
    // memcpy(dst, src, bytes); the ranges do not overlap.
    void (*copy)(std::byte* dst, const std::byte* src, size_t bytes,
                 const std::byte* ahead) noexcept;
    // The same, returning crc32c(src, bytes, crc).
    uint32_t (*copy_crc)(std::byte* dst, const std::byte* src, size_t bytes, const std::byte* ahead,
                         uint32_t crc) noexcept;
    // Orders this thread's non-temporal stores before whatever it stores next.
    void (*fence)() noexcept;
};

// Those this CPU can run, the fastest first; the last is the portable one.
std::span<const CopyKernel> copy_kernels() noexcept;

}  // namespace kvferry

// Every kernel this CPU runs against memcpy and the plain checksum: all small sizes, alignments.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "kvferry/copy_kernel.h"
#include "kvferry/crc32c.h"

namespace {

using kvferry::CopyKernel;

constexpr size_t kRoom = 64 << 10;
constexpr auto kGuard = std::byte{0xA5};

struct Buffers {
    std::vector<std::byte> src = std::vector<std::byte>(kRoom);
    std::vector<std::byte> dst = std::vector<std::byte>(kRoom);

    Buffers() {
        std::mt19937 random(3);
        std::generate(src.begin(), src.end(), [&] { return static_cast<std::byte>(random()); });
    }
};

void check_one(const CopyKernel& kernel, Buffers& buffers, size_t from, size_t to, size_t bytes) {
    const std::byte* src = buffers.src.data() + from;
    std::byte* dst = buffers.dst.data() + to;
    const auto untouched = [&] {
        return std::all_of(buffers.dst.data(), dst, [](std::byte b) { return b == kGuard; }) &&
               std::all_of(dst + bytes, buffers.dst.data() + std::min(kRoom, to + bytes + 256),
                           [](std::byte b) { return b == kGuard; });
    };
    std::memset(buffers.dst.data(), static_cast<int>(kGuard), std::min(kRoom, to + bytes + 256));
    kernel.copy(dst, src, bytes, src);
    kernel.fence();
    CHECK(std::memcmp(dst, src, bytes) == 0);
    CHECK(untouched());

    std::memset(buffers.dst.data(), static_cast<int>(kGuard), std::min(kRoom, to + bytes + 256));
    const uint32_t seed = 0x12345678U * static_cast<uint32_t>(bytes + 1);
    const uint32_t crc = kernel.copy_crc(dst, src, bytes, src, seed);
    kernel.fence();
    CHECK(crc == kvferry::crc32c_portable(src, bytes, seed));
    CHECK(std::memcmp(dst, src, bytes) == 0);
    CHECK(untouched());
}

void test_kernel(const CopyKernel& kernel) {
    Buffers buffers;
    for (size_t bytes = 0; bytes <= 700; ++bytes) {
        check_one(kernel, buffers, bytes % 64, bytes * 7 % 64, bytes);
        check_one(kernel, buffers, 0, 0, bytes);
    }
    for (const size_t bytes : {1000, 4032, 4095, 4096, 4097, 8064, 12288, 20000, 40000}) {
        for (const size_t shift : {0, 1, 8, 31, 63}) {
            check_one(kernel, buffers, shift, 0, bytes);
            check_one(kernel, buffers, 0, shift, bytes);
            check_one(kernel, buffers, shift, 64 - shift, bytes);
        }
    }
}

void test_chaining(const CopyKernel& kernel) {
    Buffers buffers;
    std::mt19937 random(9);
    for (int round = 0; round < 200; ++round) {
        const size_t bytes = 1 + random() % 20000;
        const size_t cut = random() % bytes;
        std::byte* dst = buffers.dst.data();
        const std::byte* src = buffers.src.data();
        const uint32_t seed = random();
        const uint32_t first = kernel.copy_crc(dst, src, cut, src, seed);
        const uint32_t both = kernel.copy_crc(dst + cut, src + cut, bytes - cut, src, first);
        CHECK(both == kvferry::crc32c_portable(src, bytes, seed));
    }
}

}  // namespace

int main() {
    CHECK(!kvferry::copy_kernels().empty());
    for (const CopyKernel& kernel : kvferry::copy_kernels()) {
        std::printf("%s\n", kernel.name);
        test_kernel(kernel);
        test_chaining(kernel);
    }
    return 0;
}

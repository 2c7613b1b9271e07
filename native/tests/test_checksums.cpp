// Checksums by several threads are those by one, however the pieces are cut.
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "kvferry/checksums.h"
#include "kvferry/crc32c.h"

namespace {

using kvferry::Checksums;

constexpr size_t kCut = Checksums::kCutBytes;

struct Pieces {
    std::vector<uint64_t> addresses;
    std::vector<uint64_t> sizes;
    std::vector<uint32_t> seeds;

    void add(const std::byte* at, size_t bytes, uint32_t seed) {
        addresses.push_back(reinterpret_cast<uint64_t>(at));
        sizes.push_back(bytes);
        seeds.push_back(seed);
    }

    void check(Checksums& checksums) const {
        checksums.begin(addresses, sizes, seeds);
        const std::vector<uint32_t> found = checksums.end();
        CHECK(found.size() == sizes.size());
        for (size_t i = 0; i < sizes.size(); ++i) {
            const auto* at = reinterpret_cast<const std::byte*>(addresses[i]);
            CHECK(found[i] == kvferry::crc32c(at, sizes[i], seeds[i]));
        }
    }
};

std::vector<std::byte> random_bytes(size_t bytes) {
    std::mt19937 random(7);
    std::vector<std::byte> data(bytes);
    for (std::byte& one : data) {
        one = static_cast<std::byte>(random());
    }
    return data;
}

void test_two_checksums_are_joined(const std::vector<std::byte>& data) {
    const size_t all = 70001;
    for (const size_t first : {size_t{0}, size_t{1}, size_t{9}, size_t{4096}, all - 1, all}) {
        for (const uint32_t seed : {0u, 1u, 0x416bf9f8u}) {
            const uint32_t a = kvferry::crc32c(data.data(), first, seed);
            const uint32_t b = kvferry::crc32c(data.data() + first, all - first);
            CHECK(kvferry::crc32c_joined(a, b, all - first) ==
                  kvferry::crc32c(data.data(), all, seed));
        }
    }
}

void test_pieces_of_every_size(const std::vector<std::byte>& data) {
    for (const size_t threads : {1, 2, 5}) {
        Checksums checksums(threads);
        CHECK(checksums.end().empty());
        Pieces none;
        none.check(checksums);
        for (const size_t bytes : {size_t{0}, size_t{1}, kCut - 1, kCut, kCut + 1, 3 * kCut + 5}) {
            Pieces one;
            one.add(data.data() + 3, bytes, 77);
            one.check(checksums);
        }
        std::mt19937 random(static_cast<uint32_t>(threads));
        for (int round = 0; round < 20; ++round) {
            Pieces many;
            for (int i = 0; i < 30; ++i) {
                const size_t bytes = random() % (i % 5 == 0 ? 2 * kCut : 5000);
                many.add(data.data() + random() % kCut, bytes, random());
            }
            many.check(checksums);
        }
    }
}

void test_nothing_is_begun_twice_and_an_end_may_be_missing(const std::vector<std::byte>& data) {
    Checksums checksums(2);
    Pieces pieces;
    pieces.add(data.data(), 4 * kCut, 1);
    checksums.begin(pieces.addresses, pieces.sizes, pieces.seeds);
    CHECK_THROWS(checksums.begin(pieces.addresses, pieces.sizes, pieces.seeds), std::logic_error);
    CHECK(checksums.end() == std::vector{kvferry::crc32c(data.data(), 4 * kCut, 1)});
    checksums.begin(pieces.addresses, pieces.sizes, pieces.seeds);  // its destructor waits
}

}  // namespace

int main() {
    const std::vector<std::byte> data = random_bytes(4 * kCut + 64);
    test_two_checksums_are_joined(data);
    test_pieces_of_every_size(data);
    test_nothing_is_begun_twice_and_an_end_may_be_missing(data);
    CHECK_THROWS(Checksums(0), std::invalid_argument);
    CHECK_THROWS(Checksums(257), std::invalid_argument);
    return 0;
}

// Golden values (keys and seeds are stored: they may never change), spread, and the checksum.
#include <array>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kvferry/crc32c.h"
#include "kvferry/key_mix.h"

namespace {

using kvferry::Key;
using kvferry::MixInput;

struct Sample {
    std::array<std::byte, 16> name_space;
    std::vector<std::byte> hashes;
    uint32_t group = 1;
    uint32_t end_kind = 0;
    size_t hash_bytes = 32;

    std::vector<Key> mix(size_t first, size_t step) const {
        const MixInput input{.name_space = name_space.data(),
                             .group = group,
                             .end_kind = end_kind,
                             .hashes = hashes.data(),
                             .total = hashes.size() / hash_bytes,
                             .hash_bytes = hash_bytes,
                             .first = first,
                             .step = step};
        std::vector<Key> keys(kvferry::mixed_count(input));
        kvferry::mix_keys(input, reinterpret_cast<std::byte*>(keys.data()));
        return keys;
    }
};

Sample counting_sample(size_t bytes) {
    Sample sample;
    for (size_t i = 0; i < 16; ++i) {
        sample.name_space[i] = static_cast<std::byte>(i);
    }
    for (size_t i = 0; i < bytes; ++i) {
        sample.hashes.push_back(static_cast<std::byte>(i * 7));
    }
    return sample;
}

void test_golden() {
    Sample sample = counting_sample(64);
    const std::vector<Key> keys = sample.mix(0, 1);
    CHECK(keys.size() == 2);
    sample.hash_bytes = 20;
    sample.hashes.resize(20);
    const std::vector<Key> odd = sample.mix(0, 1);
    CHECK((keys[0] == Key{0x91b5643652027f2c, 0xedbb7b470c0d5c6f}));
    CHECK((odd[0] == Key{0xc56a42ff0a3846e9, 0xd90d03564967a344}));
    CHECK(kvferry::crc_seed(keys[0]) == 0x416bf9f8);
}

void test_selection() {
    const Sample sample = counting_sample(32 * 10);
    const std::vector<Key> all = sample.mix(0, 1);
    const std::vector<Key> some = sample.mix(3, 4);
    CHECK(all.size() == 10 && some.size() == 2);
    CHECK(some[0] == all[3] && some[1] == all[7]);
    CHECK(sample.mix(9, 100).size() == 1);
    CHECK(sample.mix(10, 1).empty() && sample.mix(1000, 1).empty());
}

// Some processors mix many keys at a time: the same keys, wherever the hashes lie.
void test_many_at_a_time() {
    for (const size_t hash_bytes : {32, 20}) {
        Sample many = counting_sample(37 * hash_bytes);
        many.hash_bytes = hash_bytes;
        std::mt19937_64 random(5);
        for (std::byte& byte : many.hashes) {
            byte = static_cast<std::byte>(random());
        }
        for (const size_t first : {0, 1, 29, 30}) {
            const std::vector<Key> keys = many.mix(first, 1);
            CHECK(keys.size() == 37 - first);
            for (size_t i = 0; i < keys.size(); ++i) {
                CHECK(keys[i] == many.mix(first + i, 37)[0]);
            }
        }
    }
}

void test_every_field_counts() {
    const Sample sample = counting_sample(32);
    const Key key = sample.mix(0, 1)[0];
    Sample other = sample;
    other.group = 2;
    CHECK(other.mix(0, 1)[0] != key);
    other = sample;
    other.end_kind = 1;
    CHECK(other.mix(0, 1)[0] != key);
    other = sample;
    other.hash_bytes = 16;
    CHECK(other.mix(0, 1)[0] != key);
}

// Each input bit flips about half of the output bits, each output bit about half of the time.
void test_avalanche() {
    std::mt19937_64 random(7);
    constexpr int kRounds = 64;
    std::array<int, 128> by_output{};
    for (size_t bit = 0; bit < 48 * 8; ++bit) {
        int flipped = 0;
        for (int round = 0; round < kRounds; ++round) {
            Sample sample = counting_sample(32);
            for (std::byte& byte : sample.hashes) {
                byte = static_cast<std::byte>(random());
            }
            for (std::byte& byte : sample.name_space) {
                byte = static_cast<std::byte>(random());
            }
            const Key before = sample.mix(0, 1)[0];
            std::byte& byte =
                bit < 256 ? sample.hashes[bit / 8] : sample.name_space[(bit - 256) / 8];
            byte ^= static_cast<std::byte>(1 << (bit % 8));
            const Key after = sample.mix(0, 1)[0];
            const std::array<uint64_t, 2> delta = {before.low ^ after.low,
                                                   before.high ^ after.high};
            for (size_t i = 0; i < 128; ++i) {
                const int flip = static_cast<int>(delta[i / 64] >> (i % 64) & 1);
                flipped += flip;
                by_output[i] += flip;
            }
        }
        CHECK(flipped > kRounds * 58 && flipped < kRounds * 70);  // 64 wanted, sigma 0.7
    }
    for (const int count : by_output) {  // of 24,576: sigma 78
        CHECK(count > 11'800 && count < 12'780);
    }
}

void test_crc() {
    CHECK(kvferry::crc32c("123456789", 9) == 0xE3069283);
    CHECK(kvferry::crc32c_portable("123456789", 9) == 0xE3069283);
    CHECK(kvferry::crc32c(nullptr, 0) == 0);
    std::mt19937_64 random(11);
    std::vector<uint8_t> data(40'000);
    for (uint8_t& byte : data) {
        byte = static_cast<uint8_t>(random());
    }
    for (int round = 0; round < 2'000; ++round) {
        const size_t from = random() % 100;
        const size_t bytes = round < 1'000 ? random() % 600 : random() % 30'000;
        const auto seed = static_cast<uint32_t>(random());
        const uint32_t wanted = kvferry::crc32c_portable(&data[from], bytes, seed);
        CHECK(kvferry::crc32c(&data[from], bytes, seed) == wanted);
        std::vector<uint8_t> copy(bytes + 1, 0xAA);
        CHECK(kvferry::crc32c_copy(copy.data(), &data[from], bytes, seed) == wanted);
        CHECK(std::equal(copy.begin(), copy.end() - 1, data.begin() + static_cast<long>(from)));
        CHECK(copy.back() == 0xAA);
        const size_t cut = bytes == 0 ? 0 : random() % bytes;
        const uint32_t head = kvferry::crc32c(&data[from], cut, seed);
        CHECK(kvferry::crc32c(&data[from + cut], bytes - cut, head) == wanted);
    }
}

}  // namespace

int main() {
    test_golden();
    test_selection();
    test_many_at_a_time();
    test_every_field_counts();
    test_avalanche();
    test_crc();
    return 0;
}

// The curve of misses against a plain LRU of every size, its bounds, and histograms.
#include <algorithm>
#include <list>
#include <random>
#include <vector>

#include "check.h"
#include "kvferry/histogram.h"
#include "kvferry/miss_curve.h"

namespace {

using kvferry::Histogram;
using kvferry::Key;
using kvferry::KeyView;
using kvferry::MissCurve;

constexpr uint64_t kUnitBytes = 100;
constexpr uint64_t kTokens = 16;

Key key_of(uint64_t number) {
    return {number, number * 0x9E3779B97F4A7C15u};
}

std::vector<Key> prompt(std::mt19937_64& random, uint64_t chains) {
    std::vector<Key> keys(1 + random() % 6);
    const uint64_t chain = random() % chains;
    for (size_t row = 0; row < keys.size(); ++row) {
        keys[row] = key_of(1 + 1000 * chain + row);
    }
    return keys;
}

void play(MissCurve& curve, const std::vector<Key>& keys) {
    const KeyView view(keys.data(), keys.size());
    curve.looked_up(view, {kTokens, kUnitBytes, 0, kTokens * keys.size(), 0}, 0.0);
    curve.stored(view, kUnitBytes * keys.size());
}

class Lru {
  public:
    explicit Lru(size_t room) : room_(room) {}
    uint64_t missed_tokens() const { return kTokens * missed_; }
    void play(const std::vector<Key>& keys) {
        for (const Key& key : keys) {
            missed_ += std::find(held_.begin(), held_.end(), key) == held_.end();
        }
        for (size_t row = keys.size(); row-- > 0;) {
            held_.remove(keys[row]);
            held_.push_back(keys[row]);
        }
        while (held_.size() > room_) {
            held_.pop_front();
        }
    }

  private:
    size_t room_;
    std::list<Key> held_;
    uint64_t missed_ = 0;
};

void unsampled_it_is_exactly_lru() {
    constexpr size_t kRoom = 40;
    std::mt19937_64 random(7);
    MissCurve curve(kRoom * kUnitBytes, 8192);
    std::vector<Lru> pools;
    for (const double size : MissCurve::kSizes) {
        pools.emplace_back(static_cast<size_t>(size * kRoom));
    }
    for (int round = 0; round < 1000; ++round) {
        const std::vector<Key> keys = prompt(random, 60);
        play(curve, keys);
        for (Lru& pool : pools) {
            pool.play(keys);
        }
    }
    for (size_t size = 0; size < pools.size(); ++size) {
        CHECK(curve.whole().missed[size] == static_cast<double>(pools[size].missed_tokens()));
    }
}

void what_is_kept_is_bounded() {
    constexpr size_t kTracked = 64;
    std::mt19937_64 random(8);
    MissCurve curve(1'000'000 * kUnitBytes, kTracked);
    for (int round = 0; round < 5000; ++round) {
        play(curve, prompt(random, 100'000));
        CHECK(curve.tracked() <= kTracked);
        CHECK(curve.uses() <= 4 * kTracked);
    }
    CHECK(curve.sampled() < 0.001);
}

void histograms_count_up_to_their_bounds() {
    Histogram histogram({1.0, 2.0});
    for (const double value : {0.5, 1.0, 1.5, 9.0}) {
        histogram.observe(value);
    }
    CHECK((histogram.counts() == std::vector<uint64_t>{2, 1, 1}));
    CHECK(histogram.sum() == 12.0);
}

}  // namespace

int main() {
    unsampled_it_is_exactly_lru();
    what_is_kept_is_bounded();
    histograms_count_up_to_their_bounds();
}

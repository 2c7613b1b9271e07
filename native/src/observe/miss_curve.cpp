#include "kvferry/miss_curve.h"

#include <cmath>

namespace kvferry {

namespace {

constexpr size_t kSame = 2;  // place of this pool's own size
constexpr unsigned kHalvingsMax = 63;
static_assert(MissCurve::kSizes[kSame] == 1.0);

}  // namespace

MissCurve::Tally& MissCurve::Tally::operator+=(const Tally& other) {
    wanted += other.wanted;
    for (size_t size = 0; size < missed.size(); ++size) {
        missed[size] += other.missed[size];
    }
    return *this;
}

void MissCurve::looked_up(KeyView keys, const Lookup& lookup, double now_s) {
    if (now_s >= window_end_s_) {
        past_ += before_;
        before_ = now_;
        now_ = Tally{};
        window_end_s_ = now_s + kWindowS;
    }
    now_.wanted += lookup.wanted > lookup.local ? lookup.wanted - lookup.local : 0;
    follow(keys, lookup.unit_bytes);
    if (followed_.empty()) {
        return;
    }
    const size_t first = lookup.local / lookup.unit_tokens;
    const size_t last = lookup.wanted / lookup.unit_tokens;
    const size_t stored = lookup.hit / lookup.unit_tokens;
    std::array<uint64_t, kSizes.size() + 1> places{};
    size_t found = 0;
    for (const Followed& one : followed_) {
        size_t at = place(one.key);
        const bool absent = at == kSizes.size() && one.row >= stored;
        if (at == kSizes.size() && !absent) {
            at = kSame;  // the pool has it from before this start
        }
        places[at] += first <= one.row && one.row < last;
        if (!absent) {
            followed_[found++] = one;
        }
    }
    // A size misses the keys that are further away.
    double missing = 0.0;
    const double each = std::ldexp(static_cast<double>(lookup.unit_tokens), int(halvings_));
    for (size_t size = kSizes.size(); size-- > 0;) {
        missing += static_cast<double>(places[size + 1]);
        now_.missed[size] += missing * each;
    }
    for (; found > 0; --found) {  // of a prefix the head is used last, as in the pool
        use(followed_[found - 1].key, lookup.unit_bytes);
    }
    settle();
}

void MissCurve::stored(KeyView keys, uint64_t total_bytes) {
    carry_bytes_ += total_bytes;
    if (keys.size() == 0) {
        return;
    }
    const uint64_t each_bytes = carry_bytes_ / keys.size();
    carry_bytes_ %= keys.size();
    follow(keys, each_bytes);
    if (followed_.empty()) {
        return;
    }
    for (size_t left = followed_.size(); left > 0; --left) {
        use(followed_[left - 1].key, each_bytes);
    }
    settle();
}

MissCurve::Tally MissCurve::whole() const {
    Tally sum = recent();
    return sum += past_;
}

MissCurve::Tally MissCurve::recent() const {
    Tally sum = before_;
    return sum += now_;
}

double MissCurve::sampled() const {
    return std::ldexp(1.0, -int(halvings_));
}

// Finds those of the keys that are followed: none before an object's size is known.
void MissCurve::follow(KeyView keys, uint64_t each_bytes) {
    followed_.clear();
    choose(each_bytes);
    if (!chosen_) {
        return;
    }
    const uint64_t last = ~0ull >> halvings_;  // here all keys come by: a comparison for each
    for (size_t row = 0; row < keys.size(); ++row) {
        if (const uint64_t key = keys[row].high; key <= last) {
            followed_.push_back({row, key});
        }
    }
}

// Chooses the threshold by the first objects' size.
void MissCurve::choose(uint64_t unit_bytes) {
    if (chosen_ || unit_bytes == 0) {
        return;
    }
    chosen_ = true;
    const double most = std::floor(kSizes.back() * pool_bytes_ / static_cast<double>(unit_bytes));
    while (halvings_ < kHalvingsMax &&
           std::ldexp(most, -int(halvings_)) > static_cast<double>(kept_max_)) {
        ++halvings_;
    }
}

// Returns how many of the sizes are too small to hold a key still.
size_t MissCurve::place(uint64_t key) const {
    const auto found = last_use_.find(key);
    if (found == last_use_.end()) {
        return kSizes.size();
    }
    size_t place = 0;
    while (place < kSizes.size() && found->second < edges_[place]) {
        ++place;
    }
    return place;
}

// Numbers a use of a key; `new_bytes` are reckoned with where no size holds it any more.
void MissCurve::use(uint64_t key, uint64_t new_bytes) {
    const auto [known, is_new] = last_use_.try_emplace(key, 0);
    uint64_t bytes = new_bytes;
    size_t missing = kSizes.size();
    if (!is_new && known->second >= edges_.back()) {
        Use& former = uses_[known->second - first_];
        bytes = former.bytes;
        former.bytes = 0;
        for (missing = 0; known->second < edges_[missing]; ++missing) {
        }
    }
    for (size_t size = 0; size < missing; ++size) {
        inside_[size] += bytes;
    }
    known->second = first_ + uses_.size();
    uses_.push_back({key, bytes});
}

// Moves each size's edge on until what lies behind it fits; forgets what is too much.
void MissCurve::settle() {
    const double share = pool_bytes_ * sampled();
    for (size_t size = 0; size < kSizes.size(); ++size) {
        uint64_t& edge = edges_[size];
        while (static_cast<double>(inside_[size]) > kSizes[size] * share) {
            inside_[size] -= uses_[edge++ - first_].bytes;
        }
    }
    if (last_use_.size() > tracked_max_ || uses_.size() > 4 * tracked_max_) {
        forget();
    }
}

// Drops what no size holds any more, and follows half as many keys if that is not enough.
void MissCurve::forget() {
    struct Kept {
        uint64_t number;
        Use use;
    };
    std::vector<Kept> kept;
    const auto keep = [this](uint64_t number, const Use& one) {
        return number >= edges_.back() && follows(one.key) && last_use_.at(one.key) == number;
    };
    for (size_t at = 0; at < uses_.size(); ++at) {
        if (keep(first_ + at, uses_[at])) {
            kept.push_back({first_ + at, uses_[at]});
        }
    }
    while (kept.size() > kept_max_ && halvings_ < kHalvingsMax) {
        ++halvings_;
        std::erase_if(kept, [this](const Kept& one) { return !follows(one.use.key); });
    }
    std::array<uint64_t, kSizes.size()> edges{};
    inside_ = {};
    uses_.clear();
    last_use_.clear();
    for (const Kept& one : kept) {
        for (size_t size = 0; size < kSizes.size(); ++size) {
            const bool inside = one.number >= edges_[size];
            edges[size] += !inside;
            inside_[size] += inside ? one.use.bytes : 0;
        }
        last_use_[one.use.key] = uses_.size();
        uses_.push_back(one.use);
    }
    edges_ = edges;
    first_ = 0;
    settle();
}

}  // namespace kvferry

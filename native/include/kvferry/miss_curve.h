// How many tokens would miss in a pool of another size: sampled while serving (SHARDS).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvferry/key_mix.h"

namespace kvferry {

// The pool evicts by last use, so one list of keys in order of use answers for every size: a key
// misses in all pools smaller than the bytes used since its own last use. Only keys whose bits lie
// under a threshold are followed, and the sizes shrink by the same share. The threshold is chosen
// for the size of the first objects, and halved when more than `tracked_max` keys are followed.
//
// What is wanted is counted exactly and only misses are estimated: a hot key that is not followed
// then biases nothing.
class MissCurve {
  public:
    static constexpr std::array<double, 5> kSizes{0.25, 0.5, 1.0, 2.0, 4.0};  // of the pool
    static constexpr double kWindowS = 3600.0;

    // Tokens wanted, and of these missed at each of kSizes.
    struct Tally {
        uint64_t wanted = 0;
        std::array<double, kSizes.size()> missed{};

        Tally& operator+=(const Tally& other);
    };

    // One lookup of the tokens (local, wanted], answered with `hit`. `unit_bytes` is reckoned with
    // for a key that was stored before this start.
    struct Lookup {
        uint64_t unit_tokens;
        uint64_t unit_bytes;
        uint64_t local;
        uint64_t wanted;
        uint64_t hit;
    };

    MissCurve(uint64_t pool_bytes, size_t tracked_max)
        : pool_bytes_(static_cast<double>(pool_bytes)),
          tracked_max_(tracked_max),
          kept_max_(tracked_max * 7 / 8) {}

    // `keys` are those of all units of the request.
    void looked_up(KeyView keys, const Lookup& lookup, double now_s);
    // Objects were stored: `keys` of one group, `total_bytes` of all groups. What other groups take
    // without a key of this one is borne by the next that come.
    void stored(KeyView keys, uint64_t total_bytes);

    Tally whole() const;   // since the start
    Tally recent() const;  // of the last hour or two
    size_t tracked() const { return last_use_.size(); }
    size_t uses() const { return uses_.size(); }
    double sampled() const;  // share of the keys that are followed

  private:
    struct Use {
        uint64_t key;
        uint64_t bytes;  // 0 once the key was used again
    };
    struct Followed {
        size_t row;
        uint64_t key;
    };

    void follow(KeyView keys, uint64_t each_bytes);
    void choose(uint64_t unit_bytes);
    bool follows(uint64_t key) const { return key <= ~0ull >> halvings_; }
    size_t place(uint64_t key) const;
    void use(uint64_t key, uint64_t new_bytes);
    void settle();
    void forget();

    const double pool_bytes_;
    const size_t tracked_max_;
    const size_t kept_max_;  // room for more until the next look at them all
    unsigned halvings_ = 0;  // of the threshold
    bool chosen_ = false;
    // Uses are numbered; first_ is the number of uses_[0].
    std::vector<Use> uses_;
    uint64_t first_ = 0;
    std::unordered_map<uint64_t, uint64_t> last_use_;
    // Per size: what was used at or after its edge fits, and how many bytes that is.
    std::array<uint64_t, kSizes.size()> edges_{};
    std::array<uint64_t, kSizes.size()> inside_{};
    uint64_t carry_bytes_ = 0;
    std::vector<Followed> followed_;  // of the keys at hand
    Tally past_, before_, now_;
    double window_end_s_ = 0.0;
};

}  // namespace kvferry

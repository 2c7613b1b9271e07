// Counts of values by bucket.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvferry {

// Buckets count values up to and including their bound, as Prometheus has them; they are not
// cumulative, and there is one more than bounds: for values above the last.
class Histogram {
  public:
    explicit Histogram(std::vector<double> bounds)
        : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

    void observe(double value) {
        const auto place = std::lower_bound(bounds_.begin(), bounds_.end(), value);
        ++counts_[static_cast<size_t>(place - bounds_.begin())];
        sum_ += value;
    }

    // The seconds from begin() to end() are a value.
    void begin() { began_s_ = now_s(); }
    void end() { observe(now_s() - began_s_); }

    const std::vector<double>& bounds() const { return bounds_; }
    const std::vector<uint64_t>& counts() const { return counts_; }
    double sum() const { return sum_; }

  private:
    static double now_s() {
        timespec now{};
        clock_gettime(CLOCK_MONOTONIC, &now);
        return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
    }

    std::vector<double> bounds_;  // ascending
    std::vector<uint64_t> counts_;
    double sum_ = 0.0;
    double began_s_ = 0.0;
};

}  // namespace kvferry

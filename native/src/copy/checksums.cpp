#include "kvferry/checksums.h"

#include <pthread.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kvferry/crc32c.h"
#include "signals_blocked.h"

namespace kvferry {

Checksums::Checksums(size_t threads) {
    if (threads < 1 || threads > kThreadsMax) {
        throw std::invalid_argument("checksums refused: " + std::to_string(threads) +
                                    " threads; 1 to " + std::to_string(kThreadsMax) +
                                    " are possible");
    }
    const SignalsBlocked inherited_by_threads;
    try {
        for (size_t i = 0; i < threads; ++i) {
            threads_.emplace_back([this] { work(); });
            pthread_setname_np(threads_.back().native_handle(), "kvferry-sum");
        }
    } catch (...) {
        stop();
        throw;
    }
}

Checksums::~Checksums() {
    stop();
}

void Checksums::stop() noexcept {
    {
        const std::scoped_lock lock(mutex_);
        closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) {
        thread.join();
    }
}

void Checksums::begin(std::span<const uint64_t> addresses, std::span<const uint64_t> sizes,
                      std::span<const uint32_t> seeds) {
    if (open_) {  // only this thread writes it
        throw std::logic_error("checksums refused: those begun before have not ended");
    }
    cuts_.clear();
    for (size_t i = 0; i < addresses.size(); ++i) {
        const auto* from = reinterpret_cast<const std::byte*>(addresses[i]);
        size_t at = 0;
        do {  // a piece of no bytes is one cut: its checksum is its seed
            const size_t bytes = std::min<size_t>(kCutBytes, sizes[i] - at);
            cuts_.push_back({from + at, bytes, at == 0, at == 0 ? seeds[i] : 0});
            at += bytes;
        } while (at < sizes[i]);
    }
    next_ = 0;
    {
        const std::scoped_lock lock(mutex_);
        open_ = true;
        ++call_;
    }
    wake_.notify_all();
}

std::vector<uint32_t> Checksums::end() {
    drain();
    std::vector<uint32_t> found;
    for (const Cut& cut : cuts_) {
        if (cut.first) {
            found.push_back(cut.crc);
        } else {
            found.back() = crc32c_joined(found.back(), cut.crc, cut.bytes);
        }
    }
    cuts_.clear();
    return found;
}

void Checksums::drain() noexcept {
    take_cuts();
    std::unique_lock lock(mutex_);
    open_ = false;  // who has not come yet does not enter any more
    left_.wait(lock, [this] { return inside_ == 0; });
}

void Checksums::take_cuts() noexcept {
    for (size_t i = next_++; i < cuts_.size(); i = next_++) {
        Cut& cut = cuts_[i];
        cut.crc = crc32c(cut.at, cut.bytes, cut.crc);
    }
}

void Checksums::work() noexcept {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
        wake_.wait(lock, [&] { return closing_ || (open_ && call_ != seen); });
        if (closing_) {
            return;
        }
        seen = call_;
        ++inside_;
        lock.unlock();
        take_cuts();
        lock.lock();
        if (--inside_ == 0) {
            left_.notify_one();
        }
    }
}

}  // namespace kvferry

// Checksums of many pieces of memory, by threads that work behind the caller.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace kvferry {

// One thread sums slower than a link to a GPU copies, so pieces are shared among threads, and long
// ones are cut. The threads keep to the processors of the one that makes this. Used by one thread.
class Checksums {
  public:
    static constexpr size_t kThreadsMax = 256;
    static constexpr size_t kCutBytes = size_t{256} << 10;

    // Throws std::invalid_argument or std::system_error.
    explicit Checksums(size_t threads);
    ~Checksums();
    Checksums(const Checksums&) = delete;
    Checksums& operator=(const Checksums&) = delete;

    // Starts crc32c(addresses[i], sizes[i], seeds[i]) for all i; the spans are equally long. The
    // memory is read until end() has returned. Throws std::logic_error when end() is missing.
    void begin(std::span<const uint64_t> addresses, std::span<const uint64_t> sizes,
               std::span<const uint32_t> seeds);
    // Helps, waits, and returns the checksums; none when nothing was begun.
    std::vector<uint32_t> end();

  private:
    struct Cut {
        const void* at;
        size_t bytes;
        bool first;    // of its piece
        uint32_t crc;  // the seed before
    };

    void work() noexcept;
    void take_cuts() noexcept;
    void drain() noexcept;
    void stop() noexcept;

    std::vector<Cut> cuts_;        // of what was begun
    std::atomic<size_t> next_{0};  // the counter the threads take from; may pass the end

    std::mutex mutex_;  // guards the four below
    std::condition_variable wake_;
    std::condition_variable left_;
    bool open_ = false;  // there may be cuts to take
    bool closing_ = false;
    uint64_t call_ = 0;
    size_t inside_ = 0;  // threads that take cuts

    std::vector<std::thread> threads_;
};

}  // namespace kvferry

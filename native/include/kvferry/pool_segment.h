// Mapped memory: the pool's segment, or this process's own. Unmapped with its owner.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

class Segment {
  public:
    // Maps the first `bytes` of fd shared and read-write, kept out of core dumps, on huge pages
    // where the kernel gives them. Throws std::system_error.
    Segment(int fd, uint64_t bytes);
    // Memory of this process alone: zeros, there and charged, on huge pages where the kernel gives
    // them. Throws std::system_error.
    static Segment own(uint64_t bytes);
    Segment(Segment&& other) noexcept;
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    Segment& operator=(Segment&&) = delete;
    ~Segment();

    static uint64_t file_bytes(int fd);  // throws std::system_error

    // Touches every page of [at, at + bytes) with `threads` threads, so that the memory is there
    // (and charged) before anybody depends on it. Throws std::system_error where it is not.
    void populate(uint64_t at, uint64_t bytes, int threads);

    std::byte* base() const { return base_; }

  private:
    Segment(std::byte* base, uint64_t bytes) : base_(base), bytes_(bytes) {}

    std::byte* base_;
    uint64_t bytes_;
};

}  // namespace kvferry
